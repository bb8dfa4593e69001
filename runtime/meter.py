"""Counters and histograms that /health and /metrics read; written on the trio side only."""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

_RECENT: Final = 1024  # waits remembered for percentiles
_RECEIPTS: Final = 32  # steps whose branches are remembered


class Quantiles(msgspec.Struct, frozen=True):
    """Three percentiles in seconds, None before anything was seen."""

    p50: float | None
    p90: float | None
    p99: float | None


class BranchReceipt(msgspec.Struct, frozen=True):
    """One step that carried branches: how many, with how many drafts, and what came of them."""

    branches: int
    nodes: int
    accepted_branch: int
    tokens: int


class Meter:
    """What a running server counts."""

    def __init__(self) -> None:
        self.last_real_width = 0
        self.batch_histogram: dict[int, int] = {}
        self.rows_peak = 0
        self.active_rows = 0
        self.parked_rows = 0
        self.queue_depth = 0
        self.steps = 0
        self.row_steps = 0
        self.steps_by_depth: dict[int, int] = {}
        self.drafting_rows = 0  # rows summed over steps that drafted for them
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.draft_failures = 0  # steps of a row in which drafting failed, as with a head's NaN
        self._reached: dict[int, int] = {}  # drafts at a depth whose forerunners were all accepted
        self._accepted: dict[int, int] = {}
        self.tokens_committed = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.cohorts_sealed = 0
        self.active_lane: str | None = None
        self.state = "idle"
        self.last_progress = 0.0
        self.step_seconds = 0.0
        self.read_seconds = 0.0
        self.requests: dict[str, int] = {}
        self.first_tokens: deque[float] = deque(maxlen=_RECENT)
        self.branches: deque[BranchReceipt] = deque(maxlen=_RECEIPTS)
        self._waits: deque[float] = deque(maxlen=_RECENT)

    def saw_cohort(self, width: int) -> None:
        """Count a sealed cohort; the histogram holds those of two or more rows."""
        self.cohorts_sealed += 1
        if width >= 2:
            self.batch_histogram[width] = self.batch_histogram.get(width, 0) + 1

    def saw_step(self, lane: str, width: int, seconds: float) -> None:
        """Count one lockstep step."""
        self.active_lane = lane
        self.last_real_width = width
        self.steps += 1
        self.row_steps += width
        self.step_seconds += seconds

    def saw_drafts(self, depth: int, rows: Sequence[tuple[int, int]]) -> None:
        """Count what a step drafted.

        Args:
            rows: Of each row how many tokens were drafted, in a tree those of its longest
                branch, and how many of them accepted.
        """
        self.steps_by_depth[depth] = self.steps_by_depth.get(depth, 0) + 1
        for drafted, accepted in rows:
            self.drafting_rows += drafted > 0
            self.drafted_tokens += drafted
            self.accepted_tokens += accepted
            for at in range(1, min(drafted, accepted + 1) + 1):
                self._reached[at] = self._reached.get(at, 0) + 1
                self._accepted[at] = self._accepted.get(at, 0) + (at <= accepted)

    def saw_branches(self, carried: int, nodes: int, taken: int, committed: int) -> None:
        """Keep the receipt of a step that carried branches of one row."""
        self.branches.append(BranchReceipt(carried, nodes, taken, committed))

    @property
    def acceptance_by_depth(self) -> dict[int, float]:
        """Share of drafts at each depth that were accepted once those before them were."""
        return {at: self._accepted[at] / seen for at, seen in sorted(self._reached.items())}

    @property
    def mean_accepted(self) -> float | None:
        """Drafts accepted per row and step that drafted; None before there was one."""
        return self.accepted_tokens / self.drafting_rows if self.drafting_rows else None

    def saw_read(self, tokens: int, seconds: float) -> None:
        """Count prompt tokens read."""
        self.prompt_tokens += tokens
        self.read_seconds += seconds

    def saw_rows(
        self, active: int, queued: int, state: str, now: float, *, parked: int = 0
    ) -> None:
        """Note who is there and that the owner has just made progress."""
        self.active_rows = active
        self.parked_rows = parked
        self.queue_depth = queued
        self.rows_peak = max(self.rows_peak, active)
        self.state = state
        self.last_progress = now

    def saw_wait(self, seconds: float) -> None:
        """Note how long a row waited for its place."""
        self._waits.append(seconds)

    def saw_end(self, outcome: str) -> None:
        """Count a request by how it ended."""
        self.requests[outcome] = self.requests.get(outcome, 0) + 1

    @property
    def queue_wait(self) -> Quantiles:
        """Percentiles of recent waits."""
        return quantiles(self._waits)

    @property
    def time_to_first_token(self) -> Quantiles:
        """Percentiles of recent times from receipt to first token."""
        return quantiles(self.first_tokens)


def quantiles(values: Iterable[float]) -> Quantiles:
    """Return p50, p90 and p99 by nearest rank."""
    ordered = sorted(values)
    if not ordered:
        return Quantiles(None, None, None)
    ranks = (ordered[min(len(ordered) - 1, int(q * len(ordered)))] for q in (0.5, 0.9, 0.99))
    return Quantiles(*(round(value, 6) for value in ranks))
