"""Grammars as they are asked for: schemas, expressions, choices and grammars, in one notation.

The notation is llguidance's own. Whether it can be kept is seen when it is compiled.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, grammar_from

from .errors import CallerError

# Keywords whose values are data, or schemas by name, or may list properties beside an object's.
_DATA: Final = frozenset({"const", "enum", "default", "examples"})
_MAPS: Final = frozenset({"properties", "$defs", "definitions", "patternProperties"})
_ELSEWHERE: Final = frozenset({"anyOf", "oneOf", "$ref", "patternProperties"})
# Between two tokens of JSON: enough for an indented answer, too little for a loop to hide in.
_JSON_STYLE: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}


class Source(msgspec.Struct, frozen=True):
    """A grammar as it was asked for, in llguidance's own notation, and the field it came from."""

    text: str
    param: str

    def named(self, name: str) -> dict[str, Any]:
        """Return it as a part of a larger grammar, which calls it `@name`."""
        (part,) = json.loads(self.text)["grammars"]
        return {**part, "name": name}


def json_schema(schema: Any, param: str, *, lenient: bool = False) -> Source:
    """Return the grammar of JSON that a schema describes; see `closed`.

    Args:
        lenient: Leave out what cannot be enforced instead of refusing it.

    Raises:
        CallerError: When it is no schema.
    """
    if not isinstance(schema, dict):
        raise CallerError(f"{param}: a JSON schema must be an object", param=param)
    try:
        text = LLMatcher.grammar_from_json_schema(closed(schema), overrides=_style(lenient))
        return Source(text, param)
    except ValueError as error:
        raise CallerError(f"{param}: {one_line(str(error))}", param=param) from None


def closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties they list and no others.

    What it describes is described by the schema as well: it only leaves out what a model would
    make up. Where a schema says `additionalProperties` itself, that holds; parts of an `allOf`
    would exclude each other, so a schema with one stays as it is.
    """
    return schema if _combines(schema) else _closed(schema)


def _combines(part: Any) -> bool:
    if isinstance(part, dict):
        return "allOf" in part or any(map(_combines, part.values()))
    return isinstance(part, list) and any(map(_combines, part))


def _closed(part: Any) -> Any:
    if isinstance(part, list):
        return [_closed(item) for item in part]
    if not isinstance(part, dict):
        return part
    out = {key: _closed_under(key, value) for key, value in part.items()}
    lists = isinstance(part.get("properties"), dict) and "additionalProperties" not in part
    if lists and _ELSEWHERE.isdisjoint(part):
        out["additionalProperties"] = False
    return out


def _closed_under(key: str, value: Any) -> Any:
    """Close what stands under a keyword: data stay, and schemas by name are closed each."""
    if key in _DATA:
        return value
    if key in _MAPS and isinstance(value, dict):
        return {name: _closed(inner) for name, inner in value.items()}
    return _closed(value)


def json_object(param: str) -> Source:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"}, param)


def regex(pattern: str, param: str) -> Source:
    """Return the grammar of texts that a regular expression matches as a whole."""
    return Source(LLMatcher.grammar_from_regex(pattern), param)


def choice(options: Sequence[str], param: str) -> Source:
    """Return the grammar of one of some texts."""
    quoted = (json.dumps(option, ensure_ascii=False) for option in options)
    return Source(lark("start: " + " | ".join(quoted)), param)


def written(grammar: str, param: str) -> Source:
    """Return a grammar written in Lark's or llama.cpp's notation (GBNF).

    Raises:
        CallerError: When it is neither.
    """
    try:
        return Source(lark(grammar_from("grammar", grammar)), param)
    except ValueError as error:
        raise CallerError(f"{param}: {one_line(str(error))}", param=param) from None


def lark(grammar: str) -> str:
    """Return a Lark grammar in llguidance's own notation."""
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def embedded(schema: Any, *, lenient: bool) -> str:
    """Return a schema as it stands inside a Lark grammar, in the same style as `json_schema`."""
    return "%json " + json.dumps({**closed(schema), "x-guidance": _style(lenient)})


def _style(lenient: bool) -> Any:
    return {**_JSON_STYLE, "lenient": lenient}


def one_line(text: str) -> str:
    """Return the library's words on what is wrong, fit for an error message."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:4])[:400]
