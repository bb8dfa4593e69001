"""Stop strings, matched on text and never on tokens: pure, and never streamed in part."""

from collections.abc import Sequence


class StopMatcher:
    """Holds back what may become a stop string and cuts the text where one is complete.

    `emitted` counts characters passed on; once `matched` is set nothing more comes out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.emitted = 0
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take more text; return what can be shown now."""
        if self.matched is not None:
            return ""
        self._held += text
        end, stop = self._first_match()
        if stop is not None:
            self.matched = stop
            return self._release(end)
        return self._release(len(self._held) - self._longest_possible_start())

    def flush(self) -> str:
        """Return what was held back, when no more text will come."""
        return "" if self.matched is not None else self._release(len(self._held))

    def _release(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        self.emitted += len(out)
        return out

    def _first_match(self) -> tuple[int, str | None]:
        """Return where the earliest stop string begins; the longest wins where two begin."""
        found = [(at, -len(s), s) for s in self._stops if (at := self._held.find(s)) >= 0]
        if not found:
            return 0, None
        at, _, stop = min(found)
        return at, stop

    def _longest_possible_start(self) -> int:
        """Return the length of the longest held suffix that begins some stop string."""
        best = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), best, -1):
                if self._held.endswith(stop[:size]):
                    best = size
                    break
        return best
