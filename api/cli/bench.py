"""`paceline bench`: load servers over HTTP, interleaved, and print what each of them did."""

from __future__ import annotations

import json
import os
import platform
import statistics
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlsplit

import click
import msgspec

from .bench_load import Round, run_round
from .bench_targets import KINDS, Target, external, spawn

if TYPE_CHECKING:
    from rich.console import Console

_DEFAULT_TARGETS: Final = "serial,ar_batch"
_SOME: Final = click.IntRange(min=1)


class Cell(msgspec.Struct):
    """One target at one number of concurrent requests: medians over rounds."""

    target: str
    concurrency: int
    rounds: int
    tokens_per_s: float
    tokens_per_s_all: list[float]
    first_token_s_p50: float
    first_token_s_p95: float
    gap_s_p50: float
    gap_s_p95: float
    gap_s_max: float
    request_s_p50: float
    request_s_p95: float
    errors: int


def _widths(context: click.Context, option: click.Parameter, given: str) -> list[int]:
    try:
        widths = [int(number) for number in given.split(",")]
    except ValueError:
        widths = []
    if not widths or min(widths) < 1:
        raise click.BadParameter(f"{given!r} is no list of whole numbers from 1, such as 1,3,8")
    return widths


def _named(
    context: click.Context, option: click.Parameter, given: tuple[str, ...]
) -> list[tuple[str, str]]:
    pairs = []
    for one in given:
        name, _, url = one.partition("=")
        try:
            known = urlsplit(url).scheme == "http"
        except ValueError:
            known = False  # brackets that are no address
        if not name or not known:
            raise click.BadParameter(f"{one!r} is not NAME=http://HOST:PORT/v1")
        pairs.append((name, url))
    return pairs


@click.command("bench")
@click.option(
    "--targets", default=_DEFAULT_TARGETS, help=f"of {', '.join(KINDS)} [{_DEFAULT_TARGETS}]"
)
@click.option(
    *("--url", "urls"),
    multiple=True,
    metavar="NAME=URL",
    callback=_named,
    help="a server that runs already",
)
@click.option(
    "--concurrency", default="1,3,8", callback=_widths, help="concurrent requests [1,3,8]"
)
@click.option("--tokens", default=128, type=_SOME, help="tokens a request [128]")
@click.option("--rounds", default=3, type=_SOME, help="times each cell is run [3]")
@click.option("--temperature", default=0.0, help="sampling temperature [0]")
@click.option("--model", default="starter", help="model of the servers that are started")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="write the result here")
def command(
    targets: str,
    urls: list[tuple[str, str]],
    concurrency: list[int],
    tokens: int,
    rounds: int,
    temperature: float,
    model: str,
    json_path: Path | None,
) -> None:
    """Measure tokens/s, time to first token and token gap.

    Every round runs each target at each concurrency once, so that what else the machine does
    falls on all of them; the median over rounds is reported. Compare ratios within one run.
    """
    from rich.console import Console

    console = Console(stderr=True)
    with ExitStack() as servers:
        running = [external(name, url) for name, url in urls]
        for kind in filter(None, targets.split(",")) if not urls else ():
            console.print(f"starting {kind}")
            running.append(servers.enter_context(spawn(kind, model)))
        cells = _measure(running, concurrency, rounds, tokens, temperature, console)
    _print(cells)
    if json_path is not None:
        result = {"machine": _machine(), "tokens": tokens, "cells": msgspec.to_builtins(cells)}
        json_path.write_text(json.dumps(result, indent=1))


def _measure(
    targets: list[Target],
    widths: list[int],
    rounds: int,
    tokens: int,
    temperature: float,
    console: Console,
) -> list[Cell]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    seen: dict[tuple[str, int], list[Round]] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as progress:
        task = progress.add_task("warming up", total=rounds * len(widths) * len(targets))
        for target in targets:
            run_round(target, 1, min(tokens, 8), temperature, salt=-1)
        for number in range(rounds):
            for width in widths:
                for target in targets:
                    progress.update(task, description=f"{target.name} x{width}")
                    found = run_round(target, width, tokens, temperature, salt=number)
                    seen.setdefault((target.name, width), []).append(found)
                    progress.advance(task)
    return [_cell(name, width, found) for (name, width), found in seen.items()]


def _cell(name: str, width: int, rounds: list[Round]) -> Cell:
    speeds = [found.tokens_per_s for found in rounds]
    firsts = sorted(t for found in rounds for t in found.first_token_s)
    gaps = sorted(t for found in rounds for t in found.gap_s)
    requests = sorted(t for found in rounds for t in found.request_s)
    return Cell(
        name,
        width,
        len(rounds),
        statistics.median(speeds),
        speeds,
        _rank(firsts, 0.5),
        _rank(firsts, 0.95),
        _rank(gaps, 0.5),
        _rank(gaps, 0.95),
        gaps[-1] if gaps else 0.0,
        _rank(requests, 0.5),
        _rank(requests, 0.95),
        sum(found.errors for found in rounds),
    )


def _rank(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def _print(cells: list[Cell]) -> None:
    from rich.console import Console
    from rich.table import Table

    first = {cell.concurrency: cell.tokens_per_s for cell in reversed(cells)}
    table = Table(
        *("target", "requests", "tokens/s", "ratio"),
        *("first token p50/p95", "gap p50/p95/max", "request p50/p95"),
    )
    for cell in cells:
        table.add_row(
            cell.target + (f" ({cell.errors} errors)" if cell.errors else ""),
            str(cell.concurrency),
            f"{cell.tokens_per_s:.1f}",
            f"{cell.tokens_per_s / (first[cell.concurrency] or 1):.2f}",
            f"{cell.first_token_s_p50:.2f} / {cell.first_token_s_p95:.2f} s",
            " / ".join(f"{s * 1e3:.0f}" for s in (cell.gap_s_p50, cell.gap_s_p95, cell.gap_s_max))
            + " ms",
            f"{cell.request_s_p50:.2f} / {cell.request_s_p95:.2f} s",
        )
    Console().print(table)


def _machine() -> dict[str, Any]:
    return {"platform": platform.platform(), "cores": os.cpu_count(), "load": os.getloadavg()}
