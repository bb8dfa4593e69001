"""What form an answer must have: compiled once a request, followed token by token by each row.

Built on llguidance, which says for every state of a grammar which tokens may come next. A
grammar's errors are the caller's; a matcher's are those of the row that owns it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from
from numpy.typing import NDArray

from .errors import CallerError, RowError

Ids = NDArray[np.int64]

# An answer is brought to its end this many tokens before its budget would cut it.
MARGIN: Final = 16
_HORIZON: Final = 128  # tokens before its budget from which on an answer's way out is looked for
_KEPT: Final = 64  # grammars that stay compiled
_LONGEST_WAY: Final = 512  # a way out that is longer is not looked for
# The ways out of JSON, best first: outside of a string, and inside of one, where words may come.
_OUTSIDE: Final = ("}", "]", "0", "1", "null", "true", "false", '"', "[", "{", ",", ":")
_INSIDE: Final = ('"',)
_WORD: Final = "qZ#"
_NOTHING: Final[Ids] = np.empty(0, np.int64)
_UNKNOWN_KEYS: Final = re.compile(r"Unimplemented keys: \[(?P<keys>.*)\]")
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


class Thinking(msgspec.Struct, frozen=True):
    """How a model thinks before it answers; a grammar sleeps meanwhile.

    Args:
        opens: The token that begins it, for a model that may begin; None when the prompt has.
        closes: The tokens that end it.
    """

    opens: int | None
    closes: tuple[int, ...]


class Grammars:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer: The tokenizer's own JSON.
        end_ids: Tokens that end an answer; a grammar allows them where it may end.
    """

    def __init__(self, tokenizer: str, vocab_size: int, end_ids: Iterable[int]) -> None:
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(end_ids))
        self._exits = Exits(self._tokenizer)
        self._kept = lru_cache(_KEPT)(self._compile)  # agents ask for the same again and again

    def compile(self, source: Source, thinking: Thinking | None = None) -> Grammar:
        """Return a grammar that rows can follow; takes a while for large ones.

        Raises:
            CallerError: When it is not one, or asks for what cannot be enforced.
        """
        return self._kept(source, thinking)

    def _compile(self, source: Source, thinking: Thinking | None) -> Grammar:
        matcher = LLMatcher(self._tokenizer, source.text, log_level=0)
        if matcher.is_error():
            raise CallerError(f"{source.param}: {_why(matcher)}", param=source.param)
        return Grammar(matcher, frozenset(self._tokenizer.eos_tokens), thinking, self._exits)


class Exits:
    """Finds ways to end an answer soon: not the shortest, but ones that do not wander.

    Structure is closed first; where it cannot be, what was used least is tried, so that a
    pattern gets all its characters in turn.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        spelled = [tokenizer.decode_bytes([token]) for token in range(tokenizer.vocab_size)]
        other = np.array([100 if len(text) == 1 else 1000 + len(text) for text in spelled])
        ids = {text: token for token, text in enumerate(spelled)}
        self._outside = _ranked(other, ids, _OUTSIDE)
        self._inside = _ranked(other, ids, _INSIDE)
        # Numbers and words wear out: a pattern may ask for others than the best.
        structure = (text.encode() for text in _OUTSIDE if not text.isalnum())
        self._lasting = {ids[text] for text in structure if text in ids}
        self._words = [ids[c.encode()] for c in _WORD if c.encode() in ids]

    def way_out(self, matcher: LLMatcher) -> list[int] | None:
        """Return tokens after which a matcher accepts; None when none were found.

        Args:
            matcher: Advanced on the way, so a copy that is not needed any more.
        """
        way: list[int] = []
        used = np.zeros(len(self._inside), np.int64)
        while not matcher.is_accepting() and len(way) < _LONGEST_WAY:
            step = matcher.compute_ff_tokens() or self._next(matcher, used)
            if not step or not matcher.consume_tokens(step):
                break
            way += step
        return way if matcher.is_accepting() else None

    def _next(self, matcher: LLMatcher, used: NDArray[np.int64]) -> list[int]:
        allowed = _bits(matcher)
        if not allowed.size:
            return []
        words = np.isin(self._words, allowed).any()
        ranks = self._inside if words else self._outside
        token = int(allowed[np.argmin(ranks[allowed] + used[allowed])])
        used[token] += 0 if token in self._lasting else 1000
        return [token]


def _ranked(other: Ids, ids: Mapping[bytes, int], first: Sequence[str]) -> Ids:
    """Return ranks in which some texts come first."""
    ranks = other.copy()
    for at, text in enumerate(first):
        if (token := ids.get(text.encode())) is not None:
            ranks[token] = at
    return ranks


class Grammar:
    """A compiled grammar, never advanced itself."""

    def __init__(
        self,
        matcher: LLMatcher,
        end_ids: frozenset[int],
        thinking: Thinking | None,
        exits: Exits,
    ) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._thinking = thinking
        self._exits = exits
        shortest = exits.way_out(matcher.deep_copy())
        self._horizon = _HORIZON + 2 * len(shortest or ())

    def follow(self) -> Follower:
        """Return the state of a row that has generated nothing yet."""
        matcher, thought = self._matcher.deep_copy(), _Thought(self._thinking)
        return Follower(matcher, self._end_ids, thought, self._exits, self._horizon)


class Follower:
    """Where one row is in its grammar; it takes committed tokens and looks ahead over drafts.

    Near the end of its budget a row is led to where its answer may end, so that what is asked to
    be JSON is JSON and not the beginning of some.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_ids: frozenset[int],
        thought: _Thought,
        exits: Exits,
        horizon: int,
    ) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._thought = thought
        self._exits = exits
        self._horizon = horizon
        self._way: list[int] | None = None  # out of the grammar from here, once it was looked for

    def copy(self) -> Follower:
        """Return a twin that goes on by itself."""
        matcher, thought = self._matcher.deep_copy(), self._thought.copy()
        return Follower(matcher, self._end_ids, thought, self._exits, self._horizon)

    def take(self, token: int) -> None:
        """Go on by a committed token.

        Raises:
            RowError: When the grammar does not allow it, or has become too costly to follow.
        """
        if not self._thought.take(token) or token in self._end_ids:
            return
        self._way = self._way[1:] if self._way and self._way[0] == token else None
        if not self._matcher.consume_token(token):
            raise RowError(f"the grammar cannot go on: {_why(self._matcher)}")

    def allowed(self, ahead: Sequence[int] = (), left: int | None = None) -> Ids | None:
        """Return the tokens that may come next, ascending; None for all of them.

        Args:
            ahead: Drafts to suppose committed first; where they break the grammar nothing may.
            left: Tokens of the budget that are left after them; None for no budget.

        Raises:
            RowError: When the grammar has become too costly to follow.
        """
        thought = self._thought.copy()
        spoken = [token for token in ahead if thought.take(token)]
        if thought.sleeping:
            return None
        if not self._end_ids.isdisjoint(spoken):
            return _NOTHING
        # A copy and no rollback: after one, llguidance 1.9 may give the mask of the way not taken.
        matcher = self._matcher.deep_copy() if spoken else self._matcher
        if matcher.try_consume_tokens(spoken) < len(spoken):
            return _NOTHING
        found = self._leading_out(matcher, spoken, left) if left is not None else None
        if found is None:
            found = _mask(matcher)
        if thought.may_open is not None:
            found = np.union1d(found, [thought.may_open])
        return found

    def _leading_out(self, matcher: LLMatcher, spoken: list[int], left: int) -> Ids | None:
        """Return the one token that leads out, when it is time to leave."""
        if left > self._horizon or matcher.is_accepting():
            return None
        if self._way is not None and self._way[: len(spoken)] == spoken:
            way: list[int] | None = self._way[len(spoken) :]
        else:
            way = self._exits.way_out(matcher.deep_copy())
        if not spoken:
            self._way = way
        if not way or left > len(way) + 1 + MARGIN:
            return None
        return np.array(way[:1])


class _Thought:
    """Whether a row is still thinking, told token by token."""

    def __init__(self, thinking: Thinking | None) -> None:
        self._closes = thinking.closes if thinking else ()
        self.may_open = thinking.opens if thinking else None
        self.sleeping = thinking is not None and thinking.opens is None
        self._recent: tuple[int, ...] = ()

    def copy(self) -> _Thought:
        twin = _Thought(None)
        twin.__dict__.update(self.__dict__)
        return twin

    def take(self, token: int) -> bool:
        """Go on by a token; return whether it belongs to the answer and not to the thinking."""
        if self.sleeping:
            self._recent = (*self._recent, token)[-len(self._closes) :]
            self.sleeping = self._recent != self._closes
            return False
        opened = token == self.may_open
        self.sleeping, self.may_open = opened, None
        return not opened


def _bits(matcher: LLMatcher) -> Ids:
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


def _mask(matcher: LLMatcher) -> Ids:
    found = _bits(matcher)
    if matcher.is_error():
        raise RowError(f"the grammar cannot go on: {_why(matcher)}")
    return found


def json_schema(schema: Any, param: str, *, lenient: bool = False) -> Source:
    """Return the grammar of JSON that a schema describes; see `closed`.

    Args:
        lenient: Leave out what cannot be enforced instead of refusing it.

    Raises:
        CallerError: When it is no schema.
    """
    check_schema(schema, param)
    try:
        text = LLMatcher.grammar_from_json_schema(closed(schema), overrides=_style(lenient))
        return Source(text, param)
    except ValueError as error:
        raise CallerError(f"{param}: {_one_line(str(error))}", param=param) from None


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
    out = {key: value if key in _DATA else _closed(value) for key, value in part.items()}
    for key in _MAPS & part.keys():
        if isinstance(part[key], dict):
            out[key] = {name: _closed(value) for name, value in part[key].items()}
    lists = isinstance(part.get("properties"), dict) and "additionalProperties" not in part
    if lists and _ELSEWHERE.isdisjoint(part):
        out["additionalProperties"] = False
    return out


def check_schema(schema: Any, param: str) -> None:
    """Say of a schema whether it is an object at all.

    Raises:
        CallerError: When it is not.
    """
    if not isinstance(schema, dict):
        raise CallerError(f"{param}: a JSON schema must be an object", param=param)


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
        raise CallerError(f"{param}: {_one_line(str(error))}", param=param) from None


def lark(grammar: str) -> str:
    """Return a Lark grammar in llguidance's own notation."""
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


def embedded(schema: Any, *, lenient: bool) -> str:
    """Return a schema as it stands inside a Lark grammar, in the same style as `json_schema`."""
    return "%json " + json.dumps({**closed(schema), "x-guidance": _style(lenient)})


def _style(lenient: bool) -> Any:
    return {**_JSON_STYLE, "lenient": lenient, "coerce_one_of": lenient}


def _why(matcher: LLMatcher) -> str:
    text = matcher.get_error()
    if found := _UNKNOWN_KEYS.search(text):
        keys = found["keys"]
        return f"the schema keyword {keys} cannot be enforced; leave it out"
    return _one_line(text)


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:4])[:400]
