"""Modes in which rows step together, and the ways of forming cohorts under trial. Pure."""

from collections.abc import Sequence
from itertools import groupby
from typing import Final

from ..lanes.geometry import geometry_for
from ..runtime.modes import Pace
from .reader import Reader
from .scene import Choice, RowView, Scene, first_come, span_class

_PROBE: Final = 64  # rounds after which the other way of forming cohorts is tried once
_PATIENCE: Final = 8.0  # tokens of a row's budget that one second of waiting is worth


class BatchPolicy:
    """All ready rows step together; one bounded piece of prompt is read beside each step."""

    keeps_cohorts = False

    def __init__(self, pace: Pace, share: float, tile: int) -> None:
        self._width = pace.decode_batch_max
        self._wait_s = pace.batch_wait_ms / 1000
        self._reader = Reader(pace, share, tile)

    @property
    def places(self) -> int:
        """Rows that step together."""
        return self._width

    def admit(self, queued: Sequence[RowView], scene: Scene) -> Sequence[RowView]:
        """Fill up to decode_batch_max."""
        return first_come(queued, self.places - scene.running)

    def choose(self, scene: Scene) -> Choice:
        """Step every ready row; hold a new cohort back while company may still come."""
        gather_end = self._gather_end(scene)
        stepping = () if gather_end is not None else self._cohort(scene)
        read = None
        if scene.reading:
            row = self._reader.next(self._reading_order(scene))
            step_s = max(scene.costs.per_step.values(), default=0.0) if stepping else 0.0
            read = (row.key, self._reader.tokens(row, scene, step_s))
        return Choice(read, stepping, None if read or stepping else gather_end)

    def _cohort(self, scene: Scene) -> tuple[str, ...]:
        """Return the rows to step."""
        return tuple(row.key for row in scene.ready[: self._width])

    def _reading_order(self, scene: Scene) -> Sequence[RowView]:
        """Return the rows to read, those that come first in front."""
        return scene.reading

    def _gather_end(self, scene: Scene) -> float | None:
        """Return when a first row's wait for company ends, or None when nobody waits."""
        if not scene.ready or self._wait_s == 0 or len(scene.ready) >= self._width:
            return None
        if any(row.key in scene.stepping for row in scene.ready):
            return None
        end = min(row.ready_at for row in scene.ready) + self._wait_s
        return end if scene.now < end else None


class LengthPolicy(BatchPolicy):
    """Rows of like length step together, where measured steps say that this is quicker.

    A pass attends over the span of its longest row for every row, so one long row makes a step
    dear for all. Apart, each class of lengths steps in turn and pays for its own span, and for a
    pass of its own. Both ways give every row one step a round; the quicker round is taken.
    """

    keeps_cohorts = True

    def __init__(self, pace: Pace, share: float, tile: int) -> None:
        super().__init__(pace, share, tile)
        self._round: list[tuple[str, ...]] = []  # cohorts that have still to step in this round
        self._rounds = 0

    def _cohort(self, scene: Scene) -> tuple[str, ...]:
        ready = {row.key for row in scene.ready}
        while self._round:
            cohort = tuple(key for key in self._round.pop(0) if key in ready)
            if cohort:
                return cohort
        if not ready:
            return ()
        self._rounds += 1
        first, *self._round = self._plan(scene)
        return first

    def _plan(self, scene: Scene) -> list[tuple[str, ...]]:
        """Return the cohorts of a round."""
        rows = scene.ready[: self._width]
        together = [tuple(row.key for row in rows)]
        by_class = sorted(rows, key=lambda row: span_class(row.length))
        classes = [list(some) for _, some in groupby(by_class, lambda row: span_class(row.length))]
        apart = [tuple(row.key for row in some) for some in classes]
        if len(classes) == 1:
            return together
        costs = self._seconds(scene, [list(rows)]), self._seconds(scene, classes)
        if None in costs:
            return together if costs[0] is None else apart
        quicker = costs[1] < costs[0]  # type: ignore[operator]
        other = self._rounds % _PROBE == 0
        return apart if quicker != other else together

    def _seconds(self, scene: Scene, cohorts: Sequence[Sequence[RowView]]) -> float | None:
        """Return what a round of cohorts takes as seen so far, None while some part is unknown."""
        kinds = [(geometry_for(len(c)), span_class(max(row.length for row in c))) for c in cohorts]
        seen = [scene.costs.per_span.get(kind, 0.0) for kind in kinds]
        return sum(seen) if all(seen) else None


class FinishPolicy(BatchPolicy):
    """Rows near the end of their budgets come first (shortest remaining time, Schrage 1968).

    Twice as many rows as step together hold a place. When a place in the cohort is free, the row
    with the fewest tokens left takes it, and prompts are read in the same order; a row that steps
    goes on stepping. Waiting counts like tokens already done, so a long answer gets its turn.
    """

    @property
    def places(self) -> int:
        """Twice the rows that step together, so that there is a choice."""
        return 2 * self._width

    def _cohort(self, scene: Scene) -> tuple[str, ...]:
        going_on = [row for row in scene.ready if row.key in scene.stepping]
        waiting = [row for row in scene.ready if row.key not in scene.stepping]
        waiting.sort(key=lambda row: self._claim(row, scene.now))
        chosen = [*going_on, *waiting][: self._width]
        return tuple(row.key for row in sorted(chosen, key=lambda row: row.epoch))

    def _reading_order(self, scene: Scene) -> Sequence[RowView]:
        return sorted(scene.reading, key=lambda row: self._claim(row, scene.now))

    def _claim(self, row: RowView, now: float) -> tuple[float, int]:
        return row.left + row.unread / 8 - _PATIENCE * (now - row.queued_at), row.epoch
