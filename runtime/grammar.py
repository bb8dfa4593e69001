"""What form an answer must have: compiled once a request, followed token by token by each row.

Built on llguidance, which says for every state of a grammar which tokens may come next. A
grammar's errors are the caller's; a matcher's are those of the row that owns it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer, grammar_from
from numpy.typing import NDArray

from .errors import CallerError, RowError

Ids = NDArray[np.int64]

_NOTHING: Final[Ids] = np.empty(0, np.int64)
_UNKNOWN_KEYS: Final = re.compile(r"Unimplemented keys: \[(?P<keys>.*)\]")
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

    def compile(self, source: Source, thinking: Thinking | None = None) -> Grammar:
        """Return a grammar that rows can follow; takes a while for large ones.

        Raises:
            CallerError: When it is not one, or asks for what cannot be enforced.
        """
        matcher = LLMatcher(self._tokenizer, source.text, log_level=0)
        if matcher.is_error():
            raise CallerError(f"{source.param}: {_why(matcher)}", param=source.param)
        return Grammar(matcher, frozenset(self._tokenizer.eos_tokens), thinking)


class Grammar:
    """A compiled grammar, never advanced itself."""

    def __init__(
        self, matcher: LLMatcher, end_ids: frozenset[int], thinking: Thinking | None
    ) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._thinking = thinking

    def follow(self) -> Follower:
        """Return the state of a row that has generated nothing yet."""
        return Follower(self._matcher.deep_copy(), self._end_ids, self._thinking)


class Follower:
    """Where one row is in its grammar; it takes committed tokens and looks ahead over drafts."""

    def __init__(
        self, matcher: LLMatcher, end_ids: frozenset[int], thinking: Thinking | None
    ) -> None:
        self._matcher = matcher
        self._end_ids = end_ids
        self._thought = _Thought(thinking)

    def copy(self) -> Follower:
        """Return a twin that goes on by itself."""
        twin = Follower(self._matcher.deep_copy(), self._end_ids, None)
        twin._thought = self._thought.copy()
        return twin

    def take(self, token: int) -> None:
        """Go on by a committed token.

        Raises:
            RowError: When the grammar does not allow it, or has become too costly to follow.
        """
        if not self._thought.take(token) or token in self._end_ids:
            return
        if not self._matcher.consume_token(token):
            raise RowError(f"the grammar cannot go on: {_why(self._matcher)}")

    def allowed(self, ahead: Sequence[int] = ()) -> Ids | None:
        """Return the tokens that may come next, ascending; None for all of them.

        Args:
            ahead: Drafts to suppose committed first; where they break the grammar nothing may.

        Raises:
            RowError: When the grammar has become too costly to follow.
        """
        thought = self._thought.copy()
        spoken = [token for token in ahead if thought.take(token)]
        if thought.sleeping:
            return None
        if not self._end_ids.isdisjoint(spoken):
            return _NOTHING
        taken = self._matcher.try_consume_tokens(spoken) if spoken else 0
        try:
            found = self._mask() if taken == len(spoken) else _NOTHING
        finally:
            if taken:
                self._matcher.rollback(taken)
        if thought.may_open is not None:
            found = np.union1d(found, [thought.may_open])
        return found

    def _mask(self) -> Ids:
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise RowError(f"the grammar cannot go on: {_why(self._matcher)}")
        return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


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


def json_schema(schema: Any, param: str, *, lenient: bool = False) -> Source:
    """Return the grammar of JSON that a schema describes.

    Args:
        lenient: Leave out what cannot be enforced instead of refusing it.

    Raises:
        CallerError: When it is no schema.
    """
    check_schema(schema, param)
    style: Any = {**_JSON_STYLE, "lenient": lenient}
    try:
        return Source(LLMatcher.grammar_from_json_schema(schema, overrides=style), param)
    except ValueError as error:
        raise CallerError(f"{param}: {_one_line(str(error))}", param=param) from None


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
    style = {**_JSON_STYLE, "lenient": lenient}
    return "%json " + json.dumps({**schema, "x-guidance": style})


def _why(matcher: LLMatcher) -> str:
    text = matcher.get_error()
    if found := _UNKNOWN_KEYS.search(text):
        keys = found["keys"]
        return f"the schema keyword {keys} cannot be enforced; leave it out"
    return _one_line(text)


def _one_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return "; ".join(lines[:4])[:400]
