"""Ways out of a grammar: what to say so that an answer may end within so many tokens.

Not the very shortest ways, but short ones: structure is closed first, and where a text must go
on it goes on in long words. What was used often is passed over, so that a pattern gets all its
characters in turn.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

Ids = NDArray[np.int64]

# The ways out of JSON outside of a string, best first, behind tokens that only close.
_OUTSIDE: Final = ("0", "1", "null", "true", "false", '""', "[]", "{}", '"', "[", "{", ",", ":")
_WORDS: Final = "qZ#"  # where one of them may come, a text goes on
_LAST: Final = 1 << 20
_CONTROL: Final = 5  # the kind of a control token; see `_kind`
_SHORTER: Final = 256  # tokens of a way that goes by turns
_LOOKED_AT: Final = 128  # tokens that are looked at before all others
_SUFFIXES: Final = 3  # tokens of a known way that a token may stand for


def next_tokens(matcher: LLMatcher) -> Ids:
    """Return the tokens that a matcher allows next, ascending."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little").view(np.bool_))


class Exits:
    """Finds ways out of any grammar over one tokenizer.

    Args:
        tokens: The bytes of every token.
        control: Tokens that stand for no text; said only where nothing else may come.
        end_ids: Tokens that end an answer, which no way uses.
    """

    def __init__(
        self, tokens: Sequence[bytes], control: Iterable[int], end_ids: Sequence[int]
    ) -> None:
        self._end = end_ids[0]
        self._end_ids = sorted(end_ids)
        self._tokens = tokens
        self._ids = {text: token for token, text in reversed(list(enumerate(tokens)))}
        self.vocab_size = len(tokens)
        self._size = size = np.fromiter(map(len, tokens), np.int64, len(tokens))
        self._kind = kind = np.fromiter(map(_kind, tokens), np.int64, len(tokens))
        kind[sorted(control)] = _CONTROL
        # A text goes on in the longest words, or else in single signs that may be asked for.
        plain = np.where(kind < 2, 64 - np.minimum(size, 24), 400 + kind * 100)
        single = np.where(size == 1, 100 + np.where(kind == 0, 50, 0), 600 + size)
        inside, outside = plain.copy(), single.copy()
        for token, text in enumerate(tokens):
            if text and not text.strip(b'"]}'):
                if text[:1] == b'"':
                    inside[token] = 20 - min(len(text), 12)
                if b'"' not in text:
                    outside[token] = 20 - min(len(text), 12)
        for at, sign in enumerate(_OUTSIDE):
            if (known := self._ids.get(sign.encode())) is not None:
                outside[known] = 21 + at
        for ranks in (plain, single, inside, outside):
            ranks[kind == _CONTROL] = _LAST - 1
        out = self._end_ids
        self._plain, self._single = _Ranks(plain, out, 4), _Ranks(single, out, 1000)
        self._inside, self._outside = _Ranks(inside, out, 4), _Ranks(outside, out, 1000)
        self._lasting = {i for i, text in enumerate(tokens) if text and not text.strip(b'"]},:')}
        self._words = [self._ids[c.encode()] for c in _WORDS if c.encode() in self._ids]

    def way_out(self, matcher: LLMatcher, most: int, *, json: bool) -> list[int] | None:
        """Return tokens after which a matcher accepts; None when none were found.

        Args:
            matcher: Not changed.
            most: The most tokens that a way may have.
            json: Whether what must come is JSON.
        """
        found: list[int] | None = None
        for turns in ((1, 0), (1, 2)):
            limit = min(most, _SHORTER) if found is None and turns[1] else most
            limit = limit if found is None else len(found) - 1
            step = self._search(matcher.deep_copy(), limit, json, turns)
            found = found if step is None else step  # which may be empty: the answer is whole
            if found is not None and len(found) <= limit // 2:
                break
        return found

    def _search(
        self, matcher: LLMatcher, most: int, json: bool, turns: tuple[int, int]
    ) -> list[int] | None:
        """Search in one manner: only the longest words, or those and single signs by turns."""
        search = Search(self, matcher, [], json=json, turns=turns[1])
        search.go(most, most)
        return search.way if search.done else None

    def next_step(
        self, matcher: LLMatcher, used: NDArray[np.int64], *, json: bool, single: bool
    ) -> list[int]:
        """Return the one token that leads on, none where nothing does."""
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if json:
            inside = not single and any(bits[word >> 3] >> (word & 7) & 1 for word in self._words)
            ranks = self._inside if inside else self._outside
        else:
            ranks = self._single if single else self._plain
        token = ranks.best(bits, used)
        if token is None:
            return []
        used[token] += 0 if json and token in self._lasting else ranks.wear
        return [token]

    def alike(self, token: int) -> NDArray[np.bool_]:
        """Return which tokens lead no further than one that leads not far enough.

        Those that end the answer are never among them.
        """
        kind = self._kind[token]
        if kind == 4:
            return np.asarray((self._kind == kind) & (self._size <= self._size[token]))
        if kind > 2:
            return np.asarray(np.arange(self._kind.size) == token)
        return np.asarray((self._kind <= 2) & (self._size <= self._size[token]))

    def ending(self, allowed: Ids) -> Ids:
        """Return the allowed tokens that end an answer."""
        return allowed[np.isin(allowed, self._end_ids)]

    def behind(
        self,
        matcher: LLMatcher,
        token: int,
        way: Sequence[int],
        most: int,
        steps: int,
        *,
        json: bool,
    ) -> list[int] | None:
        """Return a way out behind a token, given the one before it; None when none is at hand.

        Args:
            matcher: Before the token; not changed.
            most: The most tokens that the way may have.
            steps: The most tokens to search for a place where the known way goes on.
        """
        if way and token == way[0]:
            return list(way[1:]) if len(way) - 1 <= most else None
        for rest in self._rests(token, way):
            if len(rest) <= most and self._ends(matcher, [token, *rest]):
                return rest
        steps = min(steps, most)
        ahead = matcher.deep_copy()
        if steps <= 0 or not ahead.consume_token(token):
            return None
        if (found := self._mended(ahead, token, way, most, steps, json)) is not None:
            return found
        return self._bridged(ahead, way, most, steps, json)

    def moved(self, matcher: LLMatcher, token: int, search: Search) -> Search | None:
        """Return a search that goes on behind a token; None when the token is not allowed.

        Args:
            matcher: Before the token; not changed.
        """
        ahead = matcher.deep_copy()
        if not ahead.consume_token(token):
            return None
        kept = self._kept(ahead, token, search.way)
        ahead.consume_tokens(kept)
        return Search(self, ahead, kept, json=search.json, turns=search.turns)

    def _kept(self, ahead: LLMatcher, token: int, way: Sequence[int]) -> list[int]:
        """Return as much of a way as may still be said behind a token.

        Args:
            ahead: Behind the token; not changed.
        """
        best: list[int] = []
        for rest in self._rests(token, way):
            kept = ahead.validate_tokens(rest)
            if kept > len(best):
                best = rest[:kept]
        return best

    def _mended(
        self, ahead: LLMatcher, token: int, way: Sequence[int], most: int, steps: int, json: bool
    ) -> list[int] | None:
        """Return the known way with another end, where that is a few tokens away."""
        kept = self._kept(ahead, token, way)
        if len(way) - len(kept) > steps or len(kept) >= most:
            return None
        ahead = ahead.deep_copy()
        ahead.consume_tokens(kept)
        search = Search(self, ahead, kept, json=json)
        search.go(steps, most)
        return search.way if search.done else None

    def _bridged(
        self, ahead: LLMatcher, way: Sequence[int], most: int, steps: int, json: bool
    ) -> list[int] | None:
        """Return a way to where the known way goes on; the matcher is used up."""
        search = Search(self, ahead, [], json=json)
        while len(search.way) < steps:
            search.go(1, most)
            if search.dead:
                return None
            for skipped in (2, 1, 0):
                rest = list(way[skipped:])
                if len(search.way) + len(rest) <= most and self._ends(ahead, rest):
                    return search.way + rest
            if search.done:
                return search.way
        return None

    def begins(self, way: Sequence[int], allowed: Ids) -> int | None:
        """Return an allowed token that a way may be spelled with at first; None for none."""
        spelled = b"".join(self._tokens[token] for token in way[:8])
        starts = [way[0]] if way else []
        starts += [self._ids.get(spelled[:size], -1) for size in range(len(spelled), 0, -1)]
        return next((start for start in starts if start in allowed), None)

    def _rests(self, token: int, way: Sequence[int]) -> Iterable[list[int]]:
        """Give what may be left of a way behind a token, the shortest first."""
        for skipped in range(min(_SUFFIXES, len(way)), -1, -1):
            yield list(way[skipped:])
        said, spelled = self._tokens[token], b""
        for at, covered in enumerate(way[:8]):
            spelled += self._tokens[covered]
            if not said.startswith(spelled[: len(said)]):
                return
            if len(spelled) >= len(said):
                yield [*self._spell(spelled[len(said) :]), *way[at + 1 :]]
                return

    def _spell(self, text: bytes) -> list[int]:
        """Return tokens that spell some bytes, the longest first."""
        out: list[int] = []
        while text:
            size = next((n for n in range(len(text), 0, -1) if text[:n] in self._ids), 0)
            if not size:
                return []
            out.append(self._ids[text[:size]])
            text = text[size:]
        return out

    def _ends(self, matcher: LLMatcher, tokens: list[int]) -> bool:
        """Say whether an answer may end behind some tokens; the matcher is not changed."""
        return matcher.validate_tokens([*tokens, self._end]) == len(tokens) + 1


class Search:
    """A search for a way out that goes on bit by bit, so that no token waits for a whole one.

    `done` says that an answer may end behind `way`, `dead` that none was found.

    Args:
        matcher: Behind `way`; it is the search's own from now on.
        way: What is known of the way.
        turns: Say single signs at each turn of so many; 0 for the longest words only.
    """

    def __init__(
        self, exits: Exits, matcher: LLMatcher, way: list[int], *, json: bool, turns: int = 0
    ) -> None:
        self._exits = exits
        self._matcher = matcher
        self._used = np.zeros(exits.vocab_size, np.int64)
        self.way = way
        self.json = json
        self.turns = turns
        self.dead = False
        self.done = matcher.is_accepting()

    def copy(self) -> Search:
        """Return a twin that goes on by itself."""
        matcher, way = self._matcher.deep_copy(), list(self.way)
        twin = Search(self._exits, matcher, way, json=self.json, turns=self.turns)
        twin._used, twin.dead = self._used.copy(), self.dead
        return twin

    def go(self, steps: int, most: int) -> None:
        """Go on by some steps, each a token or those that must follow.

        Args:
            most: The most tokens that the way may have.
        """
        for _ in range(steps):
            if self.done or self.dead:
                return
            matcher, single = self._matcher, self.turns and len(self.way) % self.turns == 1
            step = matcher.compute_ff_tokens() or self._exits.next_step(
                matcher, self._used, json=self.json, single=bool(single)
            )
            if not step or len(self.way) + len(step) > most or not matcher.consume_tokens(step):
                self.dead = True
                return
            self.way += step
            self.done = matcher.is_accepting()


class _Ranks:
    """Tokens in an order of preference.

    Args:
        ranks: Of every token, the best is the lowest.
        barred: Tokens that are never taken.
        wear: What a token loses with each use.
    """

    def __init__(self, ranks: Ids, barred: Sequence[int], wear: int) -> None:
        ranks[barred] = _LAST
        self.wear = wear
        self._ranks = ranks
        self._best = np.argsort(ranks, kind="stable")[:_LOOKED_AT]
        self._others = int(ranks[self._best[-1]])  # no better are those behind the best

    def best(self, bits: NDArray[np.uint8], used: Ids) -> int | None:
        """Return the best allowed token; None for none.

        Args:
            bits: One a token, in the order of llguidance's masks.
            used: What each token has lost.
        """
        few = self._best[(bits[self._best >> 3] >> (self._best & 7).astype(np.uint8)) & 1 > 0]
        if few.size:
            costs = self._ranks[few] + used[few]
            if costs.min() < self._others:
                return int(few[costs.argmin()])
        allowed = np.unpackbits(bits, bitorder="little")[: self._ranks.size]
        every = np.where(allowed, self._ranks + used, _LAST)
        token = int(every.argmin())
        return token if every[token] < _LAST else None


def _kind(text: bytes) -> int:
    """Sort a token: 0 a word, 1 one behind a blank, 2 other signs, 3 what JSON knows, 4 blanks."""
    if not text.strip():
        return 4
    if any(byte < 32 or byte in b'"\\[]{},:' for byte in text):
        return 3
    if text.isalnum():
        return 0
    return 1 if text[:1] == b" " and text[1:].isalnum() else 2
