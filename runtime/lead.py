"""Leading an answer to its end: which tokens are still good when the budget runs out.

A row says what the model likes best among the tokens behind which an end still fits. Where none
fits any more, or it is far away, it says what the grammar allows.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from .exits import Exits, Ids

_CLOSE: Final = 24  # tokens to spare from which on each choice is looked at
_TRIES: Final = 12  # choices at one position, before the known way is taken
_STEPS: Final = 32  # tokens searched for behind all choices at one position
_NONE: Final = (-1, None)
_BRIDGE: Final = 8  # and behind each


class Lead:
    """How one row may still end: a pure function of its committed tokens and its budget.

    Args:
        horizon: Tokens left from which on a way out is looked for.
        json: Whether the answer is JSON.
    """

    def __init__(self, exits: Exits, horizon: int, *, json: bool) -> None:
        self._exits = exits
        self._json = json
        self._due = horizon  # tokens left from which on a search may be made
        self._way: list[int] | None = None
        self._behind: tuple[int, list[int] | None] = _NONE  # a choice, and the way behind it
        self._out: NDArray[np.bool_] | None = None  # tokens that are refused
        self._tries = 0
        self._steps = _STEPS
        self._settled = False

    def copy(self) -> Lead:
        """Return a twin that goes on by itself."""
        twin = Lead(self._exits, self._due, json=self._json)
        twin._way = self._way
        return twin

    def near(self, matcher: LLMatcher, left: int) -> bool:
        """Say whether choices are looked at here.

        Args:
            left: Tokens of the budget that are left.
        """
        if self._way is None and left <= self._due:
            self._way = self._exits.way_out(matcher, left, json=self._json)
            if self._way is None:  # and hardly later: it would have to come nearer than it costs
                self._due = left // 2
        return self._way is not None and left - len(self._way) <= _CLOSE

    def fits(self, matcher: LLMatcher, token: int, left: int) -> bool:
        """Say whether a row may go on by a token; one that is refused is refused from now on."""
        if self._settled or not self.near(matcher, left):
            return True
        way = self._way
        assert way is not None
        # There should be room for the token that ends the answer, too.
        most = left - 1 - (0 < len(way) < left)
        steps = min(self._steps, _BRIDGE)
        found = self._exits.behind(matcher, token, way, most, steps, json=self._json)
        if found is None:
            self._steps -= max(0, min(steps, most))
            alike = self._exits.alike(token)
            self._out = alike if self._out is None else self._out | alike
            self._tries += 1
            return False
        self._behind = (token, found)
        return True

    def narrowed(self, allowed: Ids) -> Ids:
        """Return what is left of allowed tokens when the refused ones are gone."""
        if self._out is None or self._settled:
            return allowed
        rest = allowed[~self._out[allowed]]
        if rest.size and self._tries < _TRIES:
            return rest
        self._settled = True
        begin = self._exits.begins(self._way or (), allowed)
        return allowed if begin is None else np.array([begin])

    def take(self, matcher: LLMatcher, token: int, left: int | None) -> None:
        """Go on by a token.

        Args:
            matcher: Before the token.
            left: Tokens of the budget that were left before it; None for no budget.
        """
        way, (chosen, behind) = self._way, self._behind
        if way is not None and left is not None:
            if chosen != token:
                most = max(left - 1, 0)
                exits, json = self._exits, self._json
                behind = exits.behind(matcher, token, way, most, _BRIDGE, json=json)
            self._way = behind
            if behind is None:
                self._due = min(left - 1, max(left // 2, len(way) + 2 * _CLOSE))
        self._begin()

    def _begin(self) -> None:
        """Begin a position: nothing is refused, and no choice was looked at."""
        self._behind = _NONE
        self._out = None
        self._tries = 0
        self._steps = _STEPS
        self._settled = False
