"""`paceline models`: what can be served without a network."""

import json
from pathlib import Path
from typing import Any

import click


@click.command("models")
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
def command(as_json: bool) -> None:
    """List models that are on this machine."""
    rows = [*_starter(), *_hub()]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    if not rows:
        click.echo("no model is here yet; `paceline pull` fetches the starter model")
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "size", "where", box=None)
    for row in rows:
        table.add_row(row["model"], f"{row['bytes'] / 1e6:,.0f} MB", row["path"])
    Console().print(table)


def _starter() -> list[dict[str, Any]]:
    from ...runtime.starter import NAME, starter_dir

    path = starter_dir()
    if not path.exists():
        return []
    return [{"model": f"starter ({NAME})", "bytes": _size(path), "path": str(path)}]


def _hub() -> list[dict[str, Any]]:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir()
    except CacheNotFound:
        return []
    return [
        {"model": repo.repo_id, "bytes": repo.size_on_disk, "path": str(repo.repo_path)}
        for repo in sorted(cache.repos, key=lambda repo: repo.repo_id)
        if repo.repo_type == "model"
    ]


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
