"""Ways out of a grammar: what to say so that an answer may end soon.

Not the shortest ways, but ones that do not wander. Structure is closed first; where it cannot be,
what was used least is tried, so that a pattern gets all its characters in turn.
"""

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

Ids = NDArray[np.int64]

_LONGEST_WAY: Final = 512  # a way out that is longer is not looked for
# The ways out of JSON, best first: outside of a string, and inside of one, where words may come.
_OUTSIDE: Final = ("}", "]", "0", "1", "null", "true", "false", '"', "[", "{", ",", ":")
_INSIDE: Final = ('"',)
_WORD: Final = "qZ#"


def next_tokens(matcher: LLMatcher) -> Ids:
    """Return the tokens that a matcher allows next, ascending."""
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return np.flatnonzero(np.unpackbits(bits, bitorder="little"))


class Exits:
    """Finds ways out of any grammar over one tokenizer."""

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
        allowed = next_tokens(matcher)
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
