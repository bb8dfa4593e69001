"""What form an answer must have: compiled once a request, followed token by token by each row.

Built on llguidance, which says for every state of a grammar which tokens may come next. A
grammar's errors are the caller's; a matcher's are those of the row that owns it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLTokenizer

from .errors import CallerError, RowError
from .exits import Exits, Ids, next_tokens
from .sources import Source, one_line

# An answer is brought to its end this many tokens before its budget would cut it.
_MARGIN: Final = 16
_HORIZON: Final = 128  # tokens before its budget from which on an answer's way out is looked for
_KEPT: Final = 64  # grammars that stay compiled
_NOTHING: Final[Ids] = np.empty(0, np.int64)
_UNKNOWN_KEYS: Final = re.compile(r"Unimplemented keys: \[(?P<keys>.*)\]")


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


class Grammar:
    """A compiled grammar, never advanced itself.

    From `horizon` tokens before its budget on a row looks for its way out.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        end_ids: frozenset[int],
        thinking: Thinking | None,
        exits: Exits,
    ) -> None:
        self._matcher = matcher
        self._thinking = thinking
        self.end_ids = end_ids
        self.exits = exits
        shortest = exits.way_out(matcher.deep_copy())
        self.horizon = _HORIZON + 2 * len(shortest or ())

    def follow(self) -> Follower:
        """Return the state of a row that has generated nothing yet."""
        return Follower(self, self._matcher.deep_copy(), _Thought(self._thinking))


class Follower:
    """Where one row is in its grammar; it takes committed tokens and looks ahead over drafts.

    Near the end of its budget a row is led to where its answer may end, so that what is asked to
    be JSON is JSON and not the beginning of some.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, thought: _Thought) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._thought = thought
        self._way: list[int] | None = None  # out of the grammar from here, once it was looked for

    def copy(self) -> Follower:
        """Return a twin that goes on by itself."""
        return Follower(self._grammar, self._matcher.deep_copy(), self._thought.copy())

    def take(self, token: int) -> None:
        """Go on by a committed token.

        Raises:
            RowError: When the grammar does not allow it, or has become too costly to follow.
        """
        if not self._thought.take(token) or token in self._grammar.end_ids:
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
        if not self._grammar.end_ids.isdisjoint(spoken):
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
        if left > self._grammar.horizon or matcher.is_accepting():
            return None
        if self._way is not None and self._way[: len(spoken)] == spoken:
            way: list[int] | None = self._way[len(spoken) :]
        else:
            way = self._grammar.exits.way_out(matcher.deep_copy())
        if not spoken:
            self._way = way
        if not way or left > len(way) + 1 + _MARGIN:
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


def _mask(matcher: LLMatcher) -> Ids:
    found = next_tokens(matcher)
    if matcher.is_error():
        raise RowError(f"the grammar cannot go on: {_why(matcher)}")
    return found


def _why(matcher: LLMatcher) -> str:
    text = matcher.get_error()
    if found := _UNKNOWN_KEYS.search(text):
        keys = found["keys"]
        return f"the schema keyword {keys} cannot be enforced; leave it out"
    return one_line(text)
