"""What form an answer must have: compiled once a request, followed token by token by each row.

Built on llguidance, which says for every state of a grammar which tokens may come next. A
grammar's errors are the caller's; a matcher's are those of the row that owns it.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Final

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits

from .errors import CallerError, FormError
from .exits import Exits, Ids, next_tokens
from .lead import Lead
from .sources import Source, one_line
from .spelling import Spelling

_HORIZON: Final = 128  # tokens before its budget from which on an answer's way out is looked for
_FAR: Final = 64  # the same where no way out was found from the very beginning
_LONGEST_WAY: Final = 1024  # tokens; a way out that is longer is not looked for
_KEPT: Final = 64  # grammars that stay compiled
_KEPT_SIZE: Final = 1 << 20  # characters of all of them
_MOST_ROWS: Final = 4 << 20  # characters of one grammar times the rows that follow it
_NOTHING: Final[Ids] = np.empty(0, np.int64)
_UNKNOWN_KEYS: Final = re.compile(r"Unimplemented keys: \[(?P<keys>.*)\]")
# What one mask may cost: about 15 ms of the lexer's work, and 100 MB of its states.
_LIMITS: Final = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)
# The engine recurses over what a grammar nests, so it is compiled where there is room.
_STACK: Final = 256 << 20  # bytes of address space; what is not used is not taken


class Thinking(msgspec.Struct, frozen=True):
    """How a model thinks before it answers; a grammar sleeps meanwhile.

    Args:
        opens: The token that begins it, for a model that may begin; None when the prompt has.
        closes: The tokens that end it.
    """

    opens: int | None
    closes: tuple[int, ...]


class Grammars:
    """Compiles grammars for one tokenizer; any thread may ask.

    Args:
        tokenizer: The tokenizer's own JSON.
        tokens: The bytes of every token.
        control: Tokens that stand for no text.
        end_ids: Tokens that end an answer; a grammar allows them where it may end.
    """

    def __init__(
        self,
        tokenizer: str,
        tokens: Sequence[bytes],
        control: Iterable[int],
        end_ids: Iterable[int],
    ) -> None:
        spelling = Spelling(tokenizer, tokens, control, end_ids)
        self._engine = spelling.engine
        self._end_ids = frozenset(spelling.end_ids)
        self._exits = Exits(tokens, spelling.special_token_ids, spelling.end_ids)
        self._kept: OrderedDict[tuple[Source, Thinking | None], Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def compile(self, source: Source, thinking: Thinking | None = None) -> Grammar:
        """Return a grammar that rows can follow; takes a while for large ones.

        Raises:
            CallerError: When it is not one, asks for what cannot be enforced, or no answer fits.
        """
        key = source, thinking
        with self._lock:
            if (known := self._kept.get(key)) is not None:  # agents ask for the same again
                self._kept.move_to_end(key)
                return known
        grammar = self._with_room(lambda: self._named(source, thinking))
        if len(source.text) > _KEPT_SIZE:
            return grammar  # it would drive all others out
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > _KEPT or sum(len(s.text) for s, _ in self._kept) > _KEPT_SIZE:
                self._kept.popitem(last=False)
        return grammar

    def for_rows(self, grammar: Grammar, rows: int) -> list[Grammar]:
        """Return a grammar for each of some rows, with nothing in common.

        What the engine learns on its way, and its bound on that, is shared by all copies of a
        matcher: one row would use up another's, and what was learnt would be kept for good.

        Raises:
            CallerError: When that are too many rows for so large a grammar.
        """
        self.check_rows(grammar, rows)
        return [self._with_room(partial(self._alone, grammar)) for _ in range(rows)]

    def check_rows(self, grammar: Grammar, rows: int) -> None:
        """Bound what rows of one grammar cost together.

        Raises:
            CallerError: When that are too many rows for so large a grammar.
        """
        source = grammar.source
        if len(source.text) * rows > _MOST_ROWS:
            raise CallerError(
                f"{source.param}: a grammar of {len(source.text):,} characters is too large for "
                f"{rows} choices",
                param=source.param,
            )

    def _alone(self, grammar: Grammar) -> Grammar:
        matcher = LLMatcher(self._engine, grammar.source.text, log_level=0, limits=_LIMITS)
        self._refuse_broken(matcher, grammar.source)
        return grammar.with_matcher(matcher)

    def _with_room(self, compiling: Callable[[], Grammar]) -> Grammar:
        """Compile on a thread whose stack holds what a grammar nests."""
        done: list[Grammar | BaseException] = []

        def work() -> None:
            try:
                done.append(compiling())
            except BaseException as error:  # raised by who waits for it
                done.append(error)

        thread = threading.Thread(target=work, name="grammar", daemon=True)
        with self._lock:
            usual = threading.stack_size(_STACK)
            try:
                thread.start()
            finally:
                threading.stack_size(usual)
        thread.join()
        (found,) = done
        if isinstance(found, BaseException):
            raise found
        return found

    def _named(self, source: Source, thinking: Thinking | None) -> Grammar:
        """Compile; of what is made of parts, the part that is wrong is named."""
        try:
            return self._compile(source, thinking)
        except CallerError:
            for part in source.parts:
                self._compile(part, None)
            raise

    def _compile(self, source: Source, thinking: Thinking | None) -> Grammar:
        matcher = LLMatcher(self._engine, source.text, log_level=0, limits=_LIMITS)
        self._refuse_broken(matcher, source)
        first = matcher.deep_copy()
        next_tokens(first)
        self._refuse_broken(first, source)
        structured = "json_schema" in source.text or "%json" in source.text
        way = self._exits.way_out(matcher, _LONGEST_WAY, json=structured)
        if way is None:
            self._refuse_dead(matcher.deep_copy(), source, structured)
        return Grammar(source, matcher, self._end_ids, thinking, self._exits, way, json=structured)

    def _refuse_broken(self, matcher: LLMatcher, source: Source) -> None:
        if matcher.is_error():
            raise CallerError(f"{source.param}: {why(matcher)}", param=source.param)

    def _refuse_dead(self, matcher: LLMatcher, source: Source, structured: bool) -> None:
        """Refuse a grammar whose nearest way ends where nothing may follow."""
        used = np.zeros(self._engine.vocab_size, np.int64)
        said: list[int] = []
        while len(said) < _LONGEST_WAY and not matcher.is_accepting():
            step = matcher.compute_ff_tokens()
            step = step or self._exits.next_step(
                matcher, used, json=structured, single=len(said) % 2 == 1
            )
            if not step or not matcher.consume_tokens(step):
                self._refuse_broken(matcher, source)
                shown = self._engine.decode_str(said)[-40:]
                raise CallerError(
                    f"{source.param}: no answer can have this form; nothing may follow {shown!r}",
                    param=source.param,
                )
            said += step


class Grammar:
    """A compiled grammar, never advanced itself; rows follow one each, see `Grammars.for_rows`."""

    def __init__(
        self,
        source: Source,
        matcher: LLMatcher,
        end_ids: frozenset[int],
        thinking: Thinking | None,
        exits: Exits,
        way: Sequence[int] | None,
        *,
        json: bool,
    ) -> None:
        self.source = source
        self._matcher = matcher
        self._thinking = thinking
        self._exits = exits
        self._json = json
        self._way = way
        self.end_ids = end_ids
        self.horizon = _FAR if way is None else _HORIZON + 2 * len(way)

    def follow(self) -> Follower:
        """Return the state of a row that has generated nothing yet."""
        lead = Lead(self._exits, self.horizon, self._way, json=self._json)
        return Follower(self, self._matcher.deep_copy(), _Thought(self._thinking), lead)

    def with_matcher(self, matcher: LLMatcher) -> Grammar:
        """Return the same grammar on another matcher."""
        return Grammar(
            self.source,
            matcher,
            self.end_ids,
            self._thinking,
            self._exits,
            self._way,
            json=self._json,
        )


class Follower:
    """Where one row is in its grammar; it takes committed tokens and looks ahead over drafts.

    Near the end of its budget a row is led to where its answer may end, so that what is asked to
    be JSON is JSON and not the beginning of some: of the tokens that the model chooses those are
    refused behind which no end fits.
    """

    def __init__(self, grammar: Grammar, matcher: LLMatcher, thought: _Thought, lead: Lead) -> None:
        self._grammar = grammar
        self._matcher = matcher
        self._thought = thought
        self._lead = lead
        self._here: Ids | None = None  # what may come next, once it was asked for

    def copy(self) -> Follower:
        """Return a twin that goes on by itself."""
        matcher, thought = self._matcher.deep_copy(), self._thought.copy()
        return Follower(self._grammar, matcher, thought, self._lead.copy())

    def take(self, token: int, left: int | None = None) -> None:
        """Go on by a committed token.

        Args:
            left: Tokens of the budget that were left before it; None for no budget.

        Raises:
            FormError: When the grammar does not allow it, or has become too costly to follow.
        """
        self._here = None
        if not self._thought.take(token) or token in self._grammar.end_ids:
            return
        self._lead.take(self._matcher, token, left)
        if not self._matcher.consume_token(token):
            raise _broken(self._matcher)

    def allowed(self, ahead: Sequence[int] = ()) -> Ids | None:
        """Return the tokens that may come next, ascending; None for all of them.

        Args:
            ahead: Drafts to suppose committed first; where they break the grammar nothing may.

        Raises:
            FormError: When the grammar has become too costly to follow.
        """
        thought = self._thought.copy()
        spoken = [token for token in ahead if thought.take(token)]
        if thought.sleeping:
            return None
        if not self._grammar.end_ids.isdisjoint(spoken):
            return _NOTHING
        if ahead:
            # A copy and no rollback: after one, llguidance 1.9 may give the way not taken's mask.
            matcher = self._matcher.deep_copy()
            if matcher.try_consume_tokens(spoken) < len(spoken):
                return _NOTHING
            found = self._mask(matcher)
        else:
            if self._here is None:
                self._here = self._mask(self._matcher)
            found = self._lead.narrowed(self._here)
        if thought.may_open is not None:
            found = np.union1d(found, [thought.may_open])
        return found

    def fits(self, token: int, left: int) -> bool:
        """Say whether a row may choose an allowed token, of which it has `left` with this one.

        A token that is refused is not allowed any more, until another is taken.
        """
        if self._thought.sleeping or token == self._thought.may_open:
            return True
        if token in self._grammar.end_ids:
            return True
        return self._lead.fits(self._matcher, token, left)

    def near_end(self, left: int) -> bool:
        """Say whether choices may be refused here; see `fits`."""
        return not self._thought.sleeping and self._lead.near(self._matcher, left)

    def _mask(self, matcher: LLMatcher) -> Ids:
        found = next_tokens(matcher)
        if matcher.is_error():
            raise _broken(matcher)
        # Only where an answer is whole may it end, whatever a grammar calls a token.
        if not matcher.is_accepting():
            found = found[~np.isin(found, list(self._grammar.end_ids))]
        return found


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


def _broken(matcher: LLMatcher) -> FormError:
    return FormError(f"the answer's form cannot be followed any further: {why(matcher)}")


def why(matcher: LLMatcher) -> str:
    """Return the engine's words on what is wrong with a matcher, fit for its caller."""
    text = matcher.get_error()
    if found := _UNKNOWN_KEYS.search(text):
        return f"the schema keyword {found['keys']} cannot be enforced; leave it out"
    if "NoExtension" in text:
        return "no answer can have this form"
    return one_line(text.split("<non-verbose/>")[0].split("<state>")[0])
