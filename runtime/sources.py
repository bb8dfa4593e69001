"""Grammars as they are asked for: schemas, expressions, choices and grammars, in one notation.

The notation is llguidance's own. Whether it can be kept is seen when it is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from llguidance import LLMatcher, LLTokenizer, grammar_from

from .errors import CallerError

# Keywords whose values are data, or schemas by name, or may list properties beside an object's.
_DATA: Final = frozenset({"const", "enum", "default", "examples"})
_MAPS: Final = frozenset({"properties", "$defs", "definitions", "patternProperties"})
_ELSEWHERE: Final = frozenset({"anyOf", "oneOf", "$ref", "patternProperties"})
# Between two tokens of JSON: enough for an indented answer, too little for a loop to hide in.
_JSON_STYLE: Final[Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{1,16}"}

_LARGEST: Final = 1 << 20  # characters of one grammar
_MOST_LINES: Final = 1_000  # of a written grammar: rules that call each other cost their square
_DEEPEST: Final = 120  # levels of a schema; the engine's own bound is near
_MOST_PAIRS: Final = 10_000  # a property and a pattern each; a pair takes some 10 us
_MOST_PATTERNS: Final = 1_000  # beside properties; each takes 0.1 ms and 40 kB
_BYTES: Final = LLTokenizer("byte")
_LITERAL: Final = re.compile(r"\^(?P<inner>.*)\$", re.DOTALL)


class Source(msgspec.Struct, frozen=True):
    """A grammar as it was asked for, in llguidance's own notation, and the field it came from.

    Args:
        parts: What it was put together from, each with the field it came from.
    """

    text: str
    param: str
    parts: tuple[Source, ...] = ()

    def named(self, name: str) -> dict[str, Any]:
        """Return it as a part of a larger grammar, which calls it `@name`."""
        (part,) = json.loads(self.text)["grammars"]
        return {**part, "name": name}


def bounded(schema: Any, param: str) -> Any:
    """Return a schema that is nested so little, and pairs so little, that it can be walked.

    Raises:
        CallerError: When it is nested too deeply, or has too many properties beside patterns.
    """
    layer, pairs, patterns = [schema], 0, 0
    for _ in range(_DEEPEST):
        parts = [p for p in layer if isinstance(p, dict | list)]
        if not parts:
            return schema
        for part in parts:
            named, others = _beside(part)
            pairs += len(named) * len(others)
            patterns += len(others)
        if pairs > _MOST_PAIRS or patterns > _MOST_PATTERNS:
            raise CallerError(
                f"{param}: patternProperties beside properties are more than {_MOST_PATTERNS:,}, "
                f"or times those more than {_MOST_PAIRS:,}",
                param=param,
            )
        layer = [v for p in parts for v in (p.values() if isinstance(p, dict) else p)]
    raise CallerError(f"{param}: nested more than {_DEEPEST} deep", param=param)


def _beside(part: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return properties and the patterns that they are looked for among; see `_apart`."""
    if isinstance(part, dict):
        named, patterns = part.get("properties"), part.get("patternProperties")
        if isinstance(named, dict) and named and isinstance(patterns, dict):
            return named, patterns
    return {}, {}


def sized(text: str, param: str) -> str:
    """Return a grammar that is not too large to compile.

    Raises:
        CallerError: When it is.
    """
    if len(text) > _LARGEST:
        raise CallerError(f"{param}: larger than {_LARGEST:,} characters", param=param)
    return text


def json_schema(schema: Any, param: str, *, lenient: bool = False) -> Source:
    """Return the grammar of JSON that a schema describes; see `closed`.

    Args:
        lenient: Leave out what cannot be enforced instead of refusing it.

    Raises:
        CallerError: When it is no schema.
    """
    if not isinstance(schema, dict):
        raise CallerError(f"{param}: a JSON schema must be an object", param=param)
    sized(msgspec.json.encode(bounded(schema, param)).decode(), param)
    try:
        text = LLMatcher.grammar_from_json_schema(closed(schema), overrides=_style(lenient))
        return Source(sized(text, param), param)
    except ValueError as error:
        raise CallerError(f"{param}: {one_line(str(error))}", param=param) from None


def closed(schema: Any) -> Any:
    """Return a schema whose objects have the properties they list and no others.

    What it describes is described by the schema as well: it only leaves out what a model would
    make up. Where a schema says `additionalProperties` itself, that holds; parts of an `allOf`
    would exclude each other, so a schema with one stays as it is.
    """
    return _apart(schema if _combines(schema) else _closed(schema))


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


def _apart(part: Any) -> Any:
    """Return a schema in which no property has a pattern of `patternProperties` as well.

    The engine takes either one or the other, and stops where a pattern has no names left.
    """
    if isinstance(part, list):
        return [_apart(item) for item in part]
    if not isinstance(part, dict):
        return part
    out = {key: value if key in _DATA else _apart(value) for key, value in part.items()}
    named, patterns = _beside(out)
    if patterns:
        finders = [(_finder(pattern), each) for pattern, each in patterns.items()]
        out["properties"] = {n: _with_patterns(n, each, finders) for n, each in named.items()}
        out["patternProperties"] = {
            pattern: each for pattern, each in patterns.items() if not _only(pattern, named)
        }
    return out


def _with_patterns(name: str, schema: Any, finders: Sequence[tuple[LLMatcher, Any]]) -> Any:
    spelled = [*json.dumps(name, ensure_ascii=False).encode(), _BYTES.eos_token]
    more = [
        each
        for finder, each in finders
        if each not in (schema, True, {}) and finder.validate_tokens(spelled) == len(spelled)
    ]
    return {"allOf": [schema, *more]} if more else schema


def _only(pattern: str, named: Iterable[str]) -> bool:
    """Say whether a pattern finds none but some names."""
    found = _LITERAL.fullmatch(pattern)
    if found is None:
        return False
    listed = found["inner"].removeprefix("(?:").removeprefix("(").removesuffix(")").split("|")
    return all(re.escape(each) == each and each in named for each in listed)


def _finder(pattern: str) -> LLMatcher:
    """Return what finds a pattern in strings, as the engine itself does and in linear time."""
    schema = {"type": "string", "pattern": pattern}
    return LLMatcher(_BYTES, LLMatcher.grammar_from_json_schema(schema), log_level=0)


def json_object(param: str) -> Source:
    """Return the grammar of any JSON object."""
    return json_schema({"type": "object"}, param)


def regex(pattern: str, param: str) -> Source:
    """Return the grammar of texts that a regular expression matches as a whole."""
    return Source(LLMatcher.grammar_from_regex(sized(pattern, param)), param)


def choice(options: Sequence[str], param: str) -> Source:
    """Return the grammar of one of some texts."""
    quoted = (json.dumps(option, ensure_ascii=False) for option in options)
    # One terminal: as rules of their own, thousands of texts are too many for the parser.
    return Source(lark("start: CHOICE\nCHOICE: " + sized(" | ".join(quoted), param)), param)


def written(grammar: str, param: str) -> Source:
    """Return a grammar written in Lark's or llama.cpp's notation (GBNF).

    Raises:
        CallerError: When it is neither.
    """
    sized(grammar, param)
    if grammar.count("\n") > _MOST_LINES:
        raise CallerError(f"{param}: at most {_MOST_LINES} lines are taken", param=param)
    try:
        return Source(lark(grammar_from("grammar", grammar)), param)
    except (ValueError, RecursionError) as error:
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
