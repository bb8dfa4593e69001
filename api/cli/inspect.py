"""`paceline inspect MODEL`: what a checkpoint is, which lanes it gets, how they were seen to do."""

import json
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

from ...runtime import blas
from ...runtime.settings import ServerArgs


@click.command("inspect")
@click.argument("model", default="starter")
@click.option("--dtype", default="auto", help="weights' type, as for serve [auto]")
@click.option("--device", default="auto", help="where MLX computes, as for serve [auto]")
@click.option("--tokens", default=32, help="tokens of each measured request [32]")
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
def command(model: str, dtype: str, device: str, tokens: int, as_json: bool) -> None:
    """Load a model, try every lane on it, and measure those that install."""
    args = ServerArgs(model=model, dtype=dtype, device=device)  # type: ignore[arg-type] # it checks
    blas.preload(args.fast_blas)
    from ...lanes.inspection import Checkpoint, inspect
    from ...runtime.model import find_model

    path = find_model(model)
    with Console(stderr=True).status(f"loading and trying {model}"):
        found = inspect(Checkpoint(path, args.dtype, args.device, tokens))
    if as_json:
        click.echo(json.dumps(msgspec.to_builtins(found, enc_hook=str), indent=1))
    else:
        _print(found)


def _print(found: Any) -> None:
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


def _lanes(found: Any) -> Table:
    table = Table("lane", "installs", "checks, or why not", title="lanes")
    for lane in found.lanes:
        checks = [f"{c.name}: {c.found}" for c in lane.receipt.checks] if lane.receipt else []
        table.add_row(
            lane.name, "yes" if lane.installs else "no", lane.why_not or "; ".join(checks)
        )
    return table


def _acceptance(found: Any) -> Table:
    depths = sorted({depth for row in found.acceptance for depth in row.by_depth})
    title = "drafts accepted (coupled), of those whose forerunners were"
    table = Table("temperature", *(f"depth {d}" for d in depths), "tokens a step", title=title)
    for row in found.acceptance:
        shares = [f"{row.by_depth.get(depth, 0.0):.2f}" for depth in depths]
        table.add_row(f"{row.temperature:g}", *shares, f"{row.tokens_per_step:.2f}")
    return table


def _numerics(found: Any) -> Table:
    title = "numerics: the widest lane against B1 without drafts"
    table = Table("numerics", "lane", "largest logit difference", "same tokens", title=title)
    for row in found.numerics:
        same = f"{row.identical} of {row.requests}"
        table.add_row(row.numerics, row.lane, f"{row.max_logit_difference:.3g}", same)
    return table
