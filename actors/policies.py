"""Who may hold a row, who reads, who steps, and how much: one small pure policy a mode.

Policies see plain rows and measured costs, never a clock, a lane or an array of their own.
"""

from collections.abc import Mapping, Sequence
from typing import Final, Protocol

import msgspec

from ..runtime.modes import Mode, Pace

READ_SECONDS: Final = 0.25  # the most a turn may spend reading, so that leaving stays quick
PARKED_MAX: Final = 8  # rows whose readers stall may hold keys and values, and no more


class RowView(Protocol):
    """What a policy may know of a row."""

    @property
    def key(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def unread(self) -> int: ...
    @property
    def ready_at(self) -> float: ...


class Costs(msgspec.Struct):
    """Running means of what the device was seen to take, in seconds; 0 while unknown."""

    per_prompt_token: float = 0.0
    per_step: dict[int, float] = {}

    def saw_read(self, tokens: int, seconds: float) -> None:
        """Note that reading `tokens` prompt tokens took `seconds`."""
        self.per_prompt_token = _smoothed(self.per_prompt_token, seconds / tokens)

    def saw_step(self, geometry: int, seconds: float) -> None:
        """Note that a step at a geometry took `seconds`."""
        self.per_step[geometry] = _smoothed(self.per_step.get(geometry, 0.0), seconds)


class Scene(msgspec.Struct, frozen=True):
    """Everything a policy decides on; rows are in the order they were admitted.

    Args:
        reading: Admitted rows whose prompts are not read to the end.
        ready: Rows that can step now; a row without credits is in neither.
        parked: Rows that wait for their reader.
        stepping: Keys of the cohort that stepped last, empty when it was dissolved.
    """

    reading: Sequence[RowView]
    ready: Sequence[RowView]
    parked: Sequence[RowView]
    stepping: frozenset[str]
    costs: Costs
    now: float


class Choice(msgspec.Struct, frozen=True):
    """What to do in one turn; `wait_until` says when to look again if there is nothing."""

    read: tuple[str, int] | None = None
    step: tuple[str, ...] = ()
    wait_until: float | None = None


class Policy(Protocol):
    """One scheduler mode."""

    # Whether cohorts of other rows outlive a step (turns) or the new set replaces them (batch).
    keeps_cohorts: bool

    def room(self, scene: Scene) -> int:
        """Return how many queued rows may be admitted now."""
        ...

    def choose(self, scene: Scene) -> Choice:
        """Return what to run this turn."""
        ...


class SerialPolicy:
    """One row at a time, first come, first served; a parked row lets the next one by."""

    keeps_cohorts = True

    def __init__(self, pace: Pace, share: float, tile: int) -> None:
        self._reader = Reader(pace, share, tile)

    def room(self, scene: Scene) -> int:
        """Admit one when nobody can run and few are parked."""
        running = len(scene.reading) + len(scene.ready)
        return 1 if running == 0 and len(scene.parked) < PARKED_MAX else 0

    def choose(self, scene: Scene) -> Choice:
        """Serve the oldest row that can go on."""
        oldest = min((*scene.reading, *scene.ready), key=lambda row: row.epoch, default=None)
        if oldest is None:
            return Choice()
        if oldest.unread:
            return Choice(read=(oldest.key, self._reader.tokens(oldest, scene, 0.0)))
        return Choice(step=(oldest.key,))


class CooperativePolicy:
    """Rows take turns at B1, one step each; reading prompts is one more taker of turns."""

    keeps_cohorts = True

    def __init__(self, pace: Pace, share: float, tile: int) -> None:
        self._limit = pace.max_active_requests
        self._reader = Reader(pace, share, tile)
        self._last = -1  # epoch of the row that had the last turn; readers come after all rows

    def room(self, scene: Scene) -> int:
        """Fill up to max_active_requests."""
        return self._limit - len(scene.reading) - len(scene.ready) - len(scene.parked)

    def choose(self, scene: Scene) -> Choice:
        """Give the next row in the round its step, and at the round's end read some prompt."""
        following = [row for row in scene.ready if row.epoch > self._last]
        if following:
            self._last = following[0].epoch
            return Choice(step=(following[0].key,))
        self._last = -1
        if scene.reading:
            row = self._reader.next(scene)
            round_s = len(scene.ready) * scene.costs.per_step.get(1, 0.0)
            return Choice(read=(row.key, self._reader.tokens(row, scene, round_s)))
        return self.choose(scene) if scene.ready else Choice()


class BatchPolicy:
    """All ready rows step together; one bounded piece of prompt is read beside each step."""

    keeps_cohorts = False

    def __init__(self, pace: Pace, share: float, tile: int) -> None:
        self._width = pace.decode_batch_max
        self._wait_s = pace.batch_wait_ms / 1000
        self._reader = Reader(pace, share, tile)

    def room(self, scene: Scene) -> int:
        """Fill up to decode_batch_max; a parked row keeps its place only while few are parked."""
        taken = len(scene.reading) + len(scene.ready)
        return min(self._width - taken, self._width + PARKED_MAX - taken - len(scene.parked))

    def choose(self, scene: Scene) -> Choice:
        """Step every ready row; hold a new cohort back while company may still come."""
        ready = scene.ready[: self._width]
        gather_end = self._gather_end(scene)
        stepping = () if gather_end is not None else tuple(row.key for row in ready)
        read = None
        if scene.reading:
            row = self._reader.next(scene)
            step_s = max(scene.costs.per_step.values(), default=0.0) if stepping else 0.0
            read = (row.key, self._reader.tokens(row, scene, step_s))
        return Choice(read, stepping, None if read or stepping else gather_end)

    def _gather_end(self, scene: Scene) -> float | None:
        """Return when a first row's wait for company ends, or None when nobody waits."""
        if not scene.ready or self._wait_s == 0 or len(scene.ready) >= self._width:
            return None
        if any(row.key in scene.stepping for row in scene.ready):
            return None
        end = min(row.ready_at for row in scene.ready) + self._wait_s
        return end if scene.now < end else None


class Reader:
    """Which prompt is read next and how much of it: FIFO, but a long one lets short ones by."""

    def __init__(self, pace: Pace, share: float, tile: int) -> None:
        self._most = pace.prefill_chunk_tokens
        self._ratio = share / (1 - share)
        self._tile = tile
        self._short_next = False

    def next(self, scene: Scene) -> RowView:
        """Alternate between the oldest prompt and the oldest that fits into one tile."""
        oldest = scene.reading[0]
        short = next((r for r in scene.reading if r.unread <= self._tile), oldest)
        chosen = short if self._short_next else oldest
        self._short_next = not self._short_next
        return chosen

    def tokens(self, row: RowView, scene: Scene, beside_s: float) -> int:
        """Return how many tokens to read, in whole tiles.

        Args:
            beside_s: Seconds of decoding this turn shares with; 0 when nobody decodes.
        """
        cost = scene.costs.per_prompt_token
        if cost == 0:
            return min(self._tile, row.unread)
        seconds = min(READ_SECONDS, beside_s * self._ratio) if beside_s else READ_SECONDS
        tiles = max(1, int(seconds / cost) // self._tile)
        return min(tiles * self._tile, max(self._most // self._tile, 1) * self._tile, row.unread)


POLICIES: Final[Mapping[Mode, type[SerialPolicy | CooperativePolicy | BatchPolicy]]] = {
    Mode.SERIAL: SerialPolicy,
    Mode.COOPERATIVE: CooperativePolicy,
    Mode.AR_BATCH: BatchPolicy,
    Mode.MTP_BATCH: BatchPolicy,
}


def make_policy(mode: Mode, pace: Pace, share: float, tile: int) -> Policy:
    """Return the policy of a mode.

    Args:
        share: The part of a turn that reading may take while rows decode.
        tile: Prompt tokens of one forward pass of the installed lanes.
    """
    return POLICIES[mode](pace, share, tile)


def _smoothed(old: float, new: float) -> float:
    return new if old == 0 else 0.8 * old + 0.2 * new
