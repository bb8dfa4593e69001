"""Stop strings, matched on text and never on tokens: pure, and never streamed in part."""

from collections.abc import Sequence
from functools import lru_cache


class StopMatcher:
    """Holds back what may become a stop string and cuts the text where one is complete.

    `emitted` counts characters passed on; once `matched` is set nothing more comes out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._borders = tuple(_borders(stop) for stop in self._stops)
        self._begun = [0] * len(self._stops)  # characters of each that the text ends with
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
        for at, stop in enumerate(self._stops):
            self._begun[at] = _begun(stop, self._borders[at], self._begun[at], text)
        return self._release(len(self._held) - max(self._begun, default=0))

    def flush(self) -> str:
        """Return what was held back, when no more text will come."""
        if self.matched is not None:
            return ""
        self._begun = [0] * len(self._stops)
        return self._release(len(self._held))

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


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """Return for each beginning of a text how much of it stands at its own end again.

    With it a text is matched in one look at each character (Knuth, Morris, Pratt 1977).
    """
    borders = [0]
    for character in stop[1:]:
        size = borders[-1]
        while size and stop[size] != character:
            size = borders[size - 1]
        borders.append(size + (stop[size] == character))
    return tuple(borders)


def _begun(stop: str, borders: tuple[int, ...], begun: int, text: str) -> int:
    """Return how much of a stop string some text ends with, going on from what it began with."""
    for character in text:
        while begun and stop[begun] != character:
            begun = borders[begun - 1]
        begun += stop[begun] == character
    return begun
