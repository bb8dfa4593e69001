"""Leading an answer to its end: which tokens are still good when the budget runs out.

A row says what the model likes best among the tokens behind which an end still fits. Where none
fits any more, or it is far away, it says what the grammar allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from llguidance import LLMatcher
from numpy.typing import NDArray

from .exits import Exits, Ids, Search

_CLOSE: Final = 24  # tokens to spare from which on each choice is looked at
_TRIES: Final = 12  # choices at one position, before the known way is taken
_STEPS: Final = 24  # tokens searched for behind all choices at one position
_NONE: Final = (-1, None)
_BRIDGE: Final = 8  # and behind each
_TURNS: Final = 2  # of a second search, which says single signs as well
_AT_ONCE: Final = 12  # steps that a search for a way out goes at one position: a few ms


class Lead:
    """How one row may still end: a pure function of its committed tokens and its budget.

    Args:
        horizon: Tokens left from which on a way out is looked for.
        start: A way out of an answer that has not begun; None for none.
        json: Whether the answer is JSON.
    """

    def __init__(
        self, exits: Exits, horizon: int, start: Sequence[int] | None, *, json: bool
    ) -> None:
        self._exits = exits
        self._json = json
        self._due = horizon  # tokens left from which on a search may be made
        self._start = start  # while nothing was said
        self._way: list[int] | None = None
        self._search: Search | None = None  # for the way
        self._looked = False  # at this position
        self._behind: tuple[int, list[int] | None] = _NONE  # a choice, and the way behind it
        self._out: NDArray[np.bool_] | None = None  # tokens that are refused
        self._tries = 0
        self._steps = _STEPS
        self._settled = False

    def copy(self) -> Lead:
        """Return a twin that goes on by itself."""
        twin = Lead(self._exits, self._due, self._start, json=self._json)
        twin._way, twin._looked = self._way, self._looked
        twin._search = self._search.copy() if self._search else None
        return twin

    def near(self, matcher: LLMatcher, left: int) -> bool:
        """Say whether choices are looked at here.

        Args:
            left: Tokens of the budget that are left.
        """
        if self._way is None and left <= self._due and not self._looked:
            self._looked = True
            self._look(matcher, left)
        return self._way is not None and left - len(self._way) <= _CLOSE

    def _look(self, matcher: LLMatcher, left: int) -> None:
        """Look for a way out, or go on looking."""
        if self._start is not None:  # nothing was said yet, so nothing shorter will be found
            if len(self._start) <= left:
                self._way = list(self._start)
            else:
                self._due = left // 2
            return
        search = self._search or Search(self._exits, matcher.deep_copy(), [], json=self._json)
        search.go(_AT_ONCE, left)
        self._search = search
        if search.done:
            self._way, self._search = search.way, None
        elif search.dead and search.turns:
            # And hardly later: it would have to come nearer than it costs.
            self._search, self._due = None, left // 2
        elif search.dead:
            self._search = Search(
                self._exits, matcher.deep_copy(), [], json=self._json, turns=_TURNS
            )

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
        if not self._way and (ending := self._exits.ending(allowed)).size:
            return ending
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
        elif self._search is not None:
            self._search = self._exits.moved(matcher, token, self._search)
        self._begin()

    def _begin(self) -> None:
        """Begin a position: nothing is refused, and no choice was looked at."""
        self._start = None
        self._looked = False
        self._behind = _NONE
        self._out = None
        self._tries = 0
        self._steps = _STEPS
        self._settled = False
