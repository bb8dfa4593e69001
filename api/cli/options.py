"""Command-line flags made from the settings struct, so each default is written once."""

from collections.abc import Callable
from enum import EnumType
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click

from ...runtime.settings import DEFAULTS, FIELDS, help_text

F = TypeVar("F", bound=Callable[..., Any])


def settings_options(command: F) -> F:
    """Add one option a setting; an option that is not given arrives as None."""
    for name in reversed(FIELDS):
        command = _option(name)(command)
    return command


def given(values: dict[str, Any]) -> dict[str, Any]:
    """Keep the options that were given."""
    return {name: value for name, value in values.items() if value is not None}


def _option(name: str) -> Callable[[F], F]:
    kind = _plain_type(FIELDS[name].__origin__)
    flag = "--" + name.replace("_", "-")
    text = f"{help_text(name)} [{_default(name)}]"
    if kind is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=text)
    return click.option(flag, name, default=None, metavar=_metavar(kind), help=text)


def _plain_type(hint: Any) -> Any:
    """Strip limits and None off a type, as a metavar needs it."""
    if get_origin(hint) in (UnionType, Union):
        hint = next(part for part in get_args(hint) if part is not NoneType)
    return getattr(hint, "__origin__", hint) if get_origin(hint) is Annotated else hint


def _metavar(kind: Any) -> str:
    if isinstance(kind, EnumType):
        return "|".join(str(member.value) for member in kind)  # type: ignore[var-annotated]
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) is tuple:
        return "A,B,..."
    return {int: "N", float: "X"}.get(kind, "TEXT")


def _default(name: str) -> str:
    value = DEFAULTS[name]
    if value is None:
        return "preset"
    if value == () or value == "":
        return "none"
    return str(getattr(value, "value", value))
