"""One request of a test in virtual time, and when its tokens arrived."""

from itertools import pairwise

import trio
from tests.fakes import Stand, row_context

from paceline.actors.request import Finished, Generation
from paceline.actors.speech import Ended, Piece
from paceline.runtime.modes import Priority


class Arrivals(dict[str, list[float]]):
    """Of each request the times at which its tokens came, a time a token."""

    async def run(
        self,
        place: Stand,
        name: str,
        prompt: int,
        budget: int,
        priority: Priority = Priority.NORMAL,
    ) -> None:
        """Run one request to its end."""
        actor = place.house.start(
            Generation(name, (row_context(prompt, budget),), priority=priority)
        )
        self[name] = []
        ends = 0
        async for event in actor.events:
            if isinstance(event, Piece):
                self[name] += [trio.current_time()] * event.text.count(" w")
            ends += isinstance(event, Ended)
        assert isinstance(actor.outcome, Finished)
        assert ends == 1

    def between(self, begin: float, end: float) -> dict[str, int]:
        """Return how many tokens each request got within a span of time."""
        return {name: sum(begin < at <= end for at in times) for name, times in self.items()}

    def longest_gap(self, name: str) -> float:
        """Return the longest wait between two arrivals of a request."""
        return max(b - a for a, b in pairwise(self[name]))
