"""What a body's fields are to a route: served, refused by name, or harmless; read from known.py.

Unknown fields are let through, since agents send extras; a known one that would change the answer
and is not served is refused, wherever in the body it stands.
"""

import json
from collections.abc import Iterator
from typing import Any, Final, NamedTuple

from ..runtime.errors import CallerError
from .known import ANSWERING, COUNTS, GROUPS, ROUTES, Route, Verdict

_COUNTED: Final = "nothing is generated here"
# What tells Anthropic's SDK to go on with whole conversations.
_DETAILS: Final = {"thread": {"error_code": "thread_unsupported_request"}}


class Field(NamedTuple):
    """One field on one route.

    Args:
        neutral: Values that ask for nothing, beside null and what is empty.
    """

    verdict: Verdict
    why: str
    neutral: tuple[Any, ...] = ()


class Refused(CallerError):
    """A field that would change the answer and is not served.

    Args:
        details: What the error says to machines, in Anthropic's shape.
    """

    def __init__(self, param: str, why: str, details: dict[str, str] | None = None) -> None:
        super().__init__(f"{param} is not served here: {why}", param=param)
        self.details = details


def _named(names: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for name in names.split():
        path, _, values = name.partition("=")
        yield path, tuple(map(json.loads, values.split("|"))) if values else ()


def _table() -> dict[Route, dict[str, Field]]:
    table: dict[Route, dict[str, Field]] = {route: {} for route in ROUTES}
    for group in GROUPS:
        for route in ROUTES:
            if COUNTS.get(route, route) not in group.on.split():
                continue
            field = Field(group.verdict, group.why)
            if route in COUNTS and not group.prompt and group.verdict != "harmless":
                field = Field("harmless", _COUNTED)
            for path, neutral in _named(group.names):
                assert path not in table[route], f"{path} stands twice for {route}"
                table[route][path] = field._replace(neutral=neutral)
    return table


FIELDS: Final = _table()


def _tree(fields: dict[str, Field]) -> dict[str, Any]:
    """Return the refused ones by the steps of their paths; a leaf is a `Field`."""
    tree: dict[str, Any] = {}
    for path, field in fields.items():
        if field.verdict == "refused":
            *steps, last = path.replace("[]", ".[]").split(".")
            node = tree
            for step in steps:
                node = node.setdefault(step, {})
            node[last] = field
    return tree


_TREES: Final = {route: _tree(fields) for route, fields in FIELDS.items()}


def check_fields(route: Route, body: Any) -> None:
    """Refuse the first field of a decoded body that would change the answer and is not served.

    Raises:
        Refused: Naming it and what to use instead.
    """
    _check(body, _TREES[route], "")


def _check(value: Any, node: Any, path: str) -> None:
    if isinstance(node, Field):
        if not asks_nothing(value, node, path):
            raise Refused(path, node.why, _DETAILS.get(path))
    elif isinstance(value, dict):
        for name in value:
            if name in node:
                _check(value[name], node[name], f"{path}.{name}".lstrip("."))
    elif isinstance(value, list) and "[]" in node:
        for at, item in enumerate(value):
            _check(item, node["[]"], f"{path}[{at}]")


def asks_nothing(value: Any, field: Field, path: str) -> bool:
    """Say whether a refused field's value leaves the answer as it is."""
    if value is None or (isinstance(value, str | list | dict) and not value):
        return True
    if path == "context_management":
        return _keeps_all(value)
    return any(value == given and _kind(value) is _kind(given) for given in field.neutral)


def _kind(value: Any) -> type:
    """Return a value's type in JSON, which has one of numbers and tells them from truth values."""
    return float if type(value) is int else type(value)


def _keeps_all(value: Any) -> bool:
    """Say whether Anthropic's context management edits nothing, as Claude Code sends it."""
    edits = value.get("edits") if isinstance(value, dict) else None
    return isinstance(edits, list) and all(
        isinstance(edit, dict)
        and str(edit.get("type")).startswith("clear_thinking")
        and edit.get("keep") == "all"
        for edit in edits
    )


def markdown() -> str:
    """Return the list as a table for the docs."""
    lines = ["| fields | routes | | |", "|---|---|---|---|"]
    for group in GROUPS:
        names = ", ".join(f"`{path}`" for path, _ in _named(group.names))
        routes = "all" if group.on == ANSWERING else ", ".join(group.on.split())
        lines.append(f"| {names} | {routes} | {group.verdict} | {group.why} |")
    return "\n".join(lines) + "\n"
