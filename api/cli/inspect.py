"""`paceline inspect MODEL`: what a checkpoint is, which lanes it gets, how they were seen to do."""

import json
import time
from collections.abc import Callable
from typing import Any

import click
import msgspec

from ...runtime import blas
from ...runtime.settings import ServerArgs


@click.command("inspect")
@click.argument("model", default="starter")
@click.option("--dtype", default="auto", help="weights' type, as for serve [auto]")
@click.option("--device", default="auto", help="where MLX computes, as for serve [auto]")
@click.option(
    "--thorough", is_flag=True, help="measure on longer answers and more temperatures; minutes"
)
@click.option("--tokens", type=click.IntRange(1, 4096), help="tokens of each measured request [8]")
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
def command(
    model: str, dtype: str, device: str, thorough: bool, tokens: int | None, as_json: bool
) -> None:
    """Load a model, try every lane on it, and measure those that install.

    What it is doing is told on standard error.
    """
    args = ServerArgs(model=model, dtype=dtype, device=device)  # type: ignore[arg-type] # it checks
    blas.preload(args.fast_blas)
    from ...lanes.inspection import QUICK, THOROUGH, Checkpoint, inspect
    from ...runtime.model import find_model

    path = find_model(model)
    effort = THOROUGH if thorough else QUICK
    if tokens is not None:
        effort = msgspec.structs.replace(effort, tokens=tokens)
    found = inspect(Checkpoint(path, args.dtype, args.device), effort, _teller())
    if not thorough:
        click.echo("paceline inspect: a quick measurement; --thorough measures more", err=True)
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(found, enc_hook=str), indent=1))
    else:
        _print(found)


def _teller() -> Callable[[str], None]:
    """Return what prints each stage on standard error, with the seconds so far."""
    began = time.monotonic()

    def say(stage: str) -> None:
        click.echo(f"paceline inspect: {time.monotonic() - began:4.0f} s  {stage}", err=True)

    return say


def _print(found: Any) -> None:
    from rich.console import Console

    console, card = Console(), found.card
    facts = {
        "model": f"{card.name} ({card.path})",
        "family": f"{card.family}, {card.parameters / 1e6:.1f} M weights",
        "type": f"{card.dtype} on {card.device}: {card.why}",
        "context": f"{card.context} tokens",
        "arithmetic": f"{found.arithmetic}: {found.arithmetic_why}",
        "MTP head": found.head,
        "memory a row": f"{found.row_bytes_per_token / 1024:.1f} KiB a token, "
        f"{found.row_bytes_per_token * card.context / 2**20:.0f} MiB at the full context",
    }
    for name, value in facts.items():
        console.print(f"[bold]{name:13}[/bold] {value}", highlight=False)
    console.print(_lanes(found))
    if found.acceptance:
        console.print(_acceptance(found))
        console.print(_numerics(found))


def _lanes(found: Any) -> Any:
    from rich.table import Table

    table = Table("lane", "installs", "checks, or why not", title="lanes")
    for lane in found.lanes:
        checks = [f"{c.name}: {c.found}" for c in lane.receipt.checks] if lane.receipt else []
        table.add_row(
            lane.name, "yes" if lane.installs else "no", lane.why_not or "; ".join(checks)
        )
    return table


def _acceptance(found: Any) -> Any:
    from rich.table import Table

    depths = sorted({depth for row in found.acceptance for depth in row.by_depth})
    title = "drafts accepted (coupled), of those whose forerunners were"
    table = Table("temperature", *(f"depth {d}" for d in depths), "tokens a step", title=title)
    for row in found.acceptance:
        shares = [f"{row.by_depth.get(depth, 0.0):.2f}" for depth in depths]
        table.add_row(f"{row.temperature:g}", *shares, f"{row.tokens_per_step:.2f}")
    return table


def _numerics(found: Any) -> Any:
    from rich.table import Table

    tokens = found.effort.tokens
    title = f"numerics: the widest lane against B1 without drafts, {tokens} tokens a request"
    table = Table("numerics", "lane", "largest logit difference", "same tokens", title=title)
    for row in found.numerics:
        same = f"{row.identical} of {row.requests}"
        table.add_row(row.numerics, row.lane, f"{row.max_logit_difference:.3g}", same)
    return table
