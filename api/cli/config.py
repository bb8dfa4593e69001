"""`paceline config`: read and write the settings file, and see where each value comes from."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from ...runtime.errors import SettingsError
from ...runtime.settings import DEFAULTS, config_path, help_text, parse, read_file, resolve

if TYPE_CHECKING:
    import tomlkit


@click.group("config")
def command() -> None:
    """Show and change settings kept in the settings file."""


@command.command("path")
def path() -> None:
    """Print where the settings file is."""
    click.echo(config_path())


@command.command("show")
@click.option("--json", "as_json", is_flag=True, help="machine-readable")
def show(as_json: bool) -> None:
    """List every setting, its value and where that came from."""
    settings = resolve({})
    rows = {
        name: {"value": _shown(name, value), "from": settings.sources[name]}
        for name, value in msgspec.structs.asdict(settings.args).items()
    }
    if as_json:
        click.echo(json.dumps(rows, indent=1, default=str))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "value", "from", "meaning", box=None)
    for name, row in rows.items():
        table.add_row(name, str(row["value"]), row["from"], help_text(name))
    Console().print(table)


@command.command("get")
@click.argument("name")
def get(name: str) -> None:
    """Print the value that holds for one setting."""
    _known(name)
    click.echo(_shown(name, getattr(resolve({}).args, name)))


@command.command("set")
@click.argument("name")
@click.argument("value")
def set_value(name: str, value: str) -> None:
    """Write one setting to the file."""
    typed = msgspec.to_builtins(parse(name, value, "command line"))
    document = _read()
    document[name] = list(typed) if isinstance(typed, tuple | list) else typed
    _write(document)


@command.command("unset")
@click.argument("name")
def unset(name: str) -> None:
    """Take one setting out of the file."""
    _known(name)
    document = _read()
    if name not in document:
        raise SettingsError(f"{name} is not set in {config_path()}")
    del document[name]
    _write(document)


def _known(name: str) -> None:
    if name not in DEFAULTS:
        parse(name, "", "command line")


def _shown(name: str, value: Any) -> Any:
    if name == "api_key" and value:
        return "***"
    plain = msgspec.to_builtins(value)
    return "preset" if plain is None else plain


def _read() -> tomlkit.TOMLDocument:
    import tomlkit

    found = read_file(config_path(), tomlkit.parse)
    return tomlkit.document() if found is None else found


def _write(document: tomlkit.TOMLDocument) -> None:
    """Check the whole file as the server would, then put it in place in one move."""
    import tomlkit

    file = config_path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as scratch:
            draft = Path(scratch, file.name)
            draft.write_text(tomlkit.dumps(document), encoding="utf-8")
            draft.chmod(0o600)  # it may hold keys
            resolve({}, {}, draft)
            os.replace(draft, file)
    except OSError as error:
        raise SettingsError(f"cannot write {file}: {error.strerror}") from None
