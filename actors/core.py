"""The scheduler core: rows, plans, outcomes. Pure: no trio, no MLX, and no clock of its own.

`feed` takes messages, `next_plan` says what to run, `apply` takes what came of it. In
production the device thread drives it; in tests a trio task drives the same object in virtual
time.
"""

from collections.abc import Mapping, Sequence
from typing import Final, assert_never

import msgspec

from ..lanes.base import RowDelta
from ..lanes.geometry import lane_name
from ..runtime.context import RowContext
from .depth import Depths, Steps
from .entry import Entry, Parking
from .messages import (
    Admit,
    Admitted,
    CohortDissolved,
    CohortSealed,
    Drafts,
    Failed,
    Finish,
    Grant,
    Lease,
    Leave,
    Note,
    OwnerMessage,
    RowMessage,
    Tokens,
    Turn,
)
from .scene import Choice, Costs, Policy, Scene


class StepPlan(msgspec.Struct, frozen=True):
    """One lockstep step: these rows, in this order, on this lane."""

    rows: tuple[str, ...]
    steps: Steps
    cohort_id: str


class Plan(msgspec.Struct, frozen=True):
    """What the device does in one turn, in this order: close, open, read, step.

    Args:
        wait_until: When to plan again if no message comes first.
        news: Whether rows came, went or changed their state since the last turn.
    """

    close: tuple[str, ...] = ()
    open: tuple[tuple[str, RowContext], ...] = ()
    read: tuple[str, int] | None = None
    step: StepPlan | None = None
    wait_until: float | None = None
    news: bool = False

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run and nothing to tell."""
        return not (self.close or self.open or self.read or self.step or self.news)


class Outcome(msgspec.Struct, frozen=True):
    """What came of a plan and how long its parts took, in seconds.

    Args:
        read_tokens: Prompt tokens the row is on by, those from the prefix bank included.
    """

    read: RowDelta | None = None
    read_tokens: int = 0
    read_s: float = 0.0
    steps: tuple[RowDelta, ...] = ()
    step_s: float = 0.0


class Cohort(msgspec.Struct):
    """A set of rows stepping together."""

    cohort_id: str
    rows: tuple[str, ...]
    geometry: int
    lane: str
    sealed_at: float
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    depths: dict[int, int] = {}


_PARKING: Final = Parking()


class Core:
    """The state machine behind the model owner.

    Args:
        policy: The scheduler mode.
        depths: Chooses the lane of each step and how many tokens it drafts.
        parking: How many rows may be parked, and for how long.
    """

    def __init__(self, policy: Policy, depths: Depths, parking: Parking = _PARKING) -> None:
        self._policy = policy
        self._depths = depths
        self._parking = parking
        self._news = False
        self._queue: dict[str, Entry] = {}
        self._rows: dict[str, Entry] = {}
        self._cohorts: list[Cohort] = []
        self._sealed = 0
        self._costs = Costs()
        self._closing: list[str] = []
        self._messages: list[RowMessage] = []
        self._notes: list[Note] = []
        self._plan = Plan()
        self._stepping: frozenset[str] = frozenset()

    @property
    def rows(self) -> Mapping[str, Entry]:
        """Admitted rows, in the order of admission."""
        return self._rows

    @property
    def queued(self) -> Sequence[Entry]:
        """Rows that wait for a place."""
        return tuple(self._queue.values())

    @property
    def cohorts(self) -> Sequence[Cohort]:
        """Cohorts that are not dissolved."""
        return self._cohorts

    def feed(self, message: OwnerMessage, now: float) -> None:
        """Take one message; a stale lease is dropped."""
        match message:
            case Admit(lease, request_id, context, credits, at, priority):
                self._news = True
                self._queue[lease.row] = Entry(
                    lease, request_id, context, credits, at, len(context.prompt), priority
                )
            case Leave(lease, reason):
                if self._held(lease):
                    self._news = True
                    self._drop(lease.row, reason, now)
            case Grant(lease, tokens):
                if entry := self._held(lease):
                    self._news |= entry.parked
                    entry.grant(tokens, now)
            case _:
                assert_never(message)

    def next_plan(self, now: float) -> Plan:
        """Admit what the policy has room for and say what to run."""
        wake = self._give_up_places(now)
        opened, room_at = self._admit(now)
        choice = self._policy.choose(self._scene(now))
        step = self._step_plan(choice, now)
        wakes = [at for at in (wake, room_at, choice.wait_until) if at is not None]
        self._plan = Plan(
            tuple(self._closing),
            tuple(opened),
            choice.read,
            step,
            min(wakes, default=None),
            self._news,
        )
        self._closing, self._news = [], False
        return self._plan

    def expected_s(self, plan: Plan) -> float | None:
        """Return what a plan should take by what was measured; None for what never ran."""
        read = plan.read[1] if plan.read is not None else 0
        return self._costs.expected_s(read, plan.step.steps.geometry if plan.step else None)

    def apply(self, outcome: Outcome, now: float) -> Turn:
        """Take what came of the last plan and return everything to hand out."""
        plan = self._plan
        read_tokens = self._apply_read(plan, outcome, now)
        self._apply_step(plan, outcome, now)
        turn = Turn(
            messages=tuple(self._messages),
            notes=tuple(self._notes),
            width=len(plan.step.rows) if plan.step else 0,
            lane=plan.step.steps.lane if plan.step else None,
            step_s=outcome.step_s,
            depth=max(plan.step.steps.depths) if plan.step else 0,
            drafts=tuple(
                Drafts(d.drafted, d.accepted, len(d.tokens), d.branches, d.draft_failed)
                for d in outcome.steps
            ),
            committed=sum(len(m.tokens) for m in self._messages if isinstance(m, Tokens)),
            prompt_tokens=read_tokens,
            cached_tokens=outcome.read.cached if outcome.read is not None else 0,
            read_s=outcome.read_s,
            active_rows=sum(row.placed and not row.parked for row in self._rows.values()),
            parked=frozenset(row.lease for row in self._rows.values() if row.parked),
            queue_depth=len(self._queue) + len(self._back()),
            state=self._state(),
        )
        self._messages, self._notes = [], []
        return turn

    def _held(self, lease: Lease) -> Entry | None:
        entry = self._rows.get(lease.row) or self._queue.get(lease.row)
        return entry if entry is not None and entry.lease == lease else None

    def _give_up_places(self, now: float) -> float | None:
        """Take parked rows' places, end what was parked for too long; return when to do so again.

        A place is held for a moment where it was earned; see `HOLD_SECONDS`.
        """
        wakes = []
        for entry in [row for row in self._rows.values() if row.parked]:
            if (cut_at := entry.cut_at(self._parking)) <= now:
                self._cut_off(entry, now)
                continue
            wakes.append(cut_at)
            if entry.placed and now >= entry.hold_until:
                entry.placed, self._news = False, True
            elif entry.placed:
                wakes.append(entry.hold_until)
        return min(wakes, default=None)

    def _admit(self, now: float) -> tuple[list[tuple[str, RowContext]], float | None]:
        """Give free places to rows that wait for one, new ones and such as were parked.

        Returns:
            The rows to open, and when a parked row may make room for one that had to wait.
        """
        if sum(row.placed for row in self._rows.values()) >= self._policy.places:
            return [], None
        blocked: set[str] = set()
        while True:
            back = self._back()
            new = [row for row in self._queue.values() if row.key not in blocked]
            waiting = sorted((*back, *new), key=lambda row: (row.queued_at, row.epoch))
            if not waiting:
                return [], self._room_at(now) if blocked else None
            chosen = self._policy.admit(waiting, self._scene(now))
            cuts, without = self._room_for([r.key for r in chosen if r.key in self._queue], now)
            if not without:
                break
            blocked |= without
        for entry in cuts:
            self._cut_off(entry, now)
        opened = []
        for row in chosen:
            if row.key in self._rows:
                self._rows[row.key].placed = True
                continue
            entry = self._rows[row.key] = self._queue.pop(row.key)
            entry.placed = True
            opened.append((row.key, entry.context))
            self._messages.append(Admitted(entry.lease, max(0.0, now - entry.queued_at)))
        return opened, self._room_at(now) if blocked else None

    def _back(self) -> list[Entry]:
        """Return the open rows whose readers take again and that wait for a place."""
        return [row for row in self._rows.values() if not row.placed and not row.parked]

    def _room_for(self, keys: Sequence[str], now: float) -> tuple[list[Entry], set[str]]:
        """Return the parked rows to end so that these can be opened, and those that cannot be.

        A request never ends rows of its own by that.
        """
        room = self._policy.places + self._parking.rows - len(self._rows)
        cuttable = [row for row in self._by_parking() if now >= self._cuttable_at(row)]
        cuts: list[Entry] = []
        without: set[str] = set()
        for key in keys:
            if room > 0:
                room -= 1
                continue
            mine = self._queue[key].request_id
            victim = next((row for row in cuttable if row.request_id != mine), None)
            if victim is None:
                without.add(key)
                continue
            cuttable.remove(victim)
            cuts.append(victim)
        return cuts, without

    def _by_parking(self) -> list[Entry]:
        """Return the parked rows, the one that has been parked the longest first."""
        parked = [row for row in self._rows.values() if row.parked]
        return sorted(parked, key=lambda row: row.parked_at or 0.0)

    def _cuttable_at(self, entry: Entry) -> float:
        return (entry.parked_at or 0.0) + self._parking.grace_s

    def _room_at(self, now: float) -> float | None:
        """Return when the next parked row may be ended to make room."""
        later = [at for row in self._by_parking() if (at := self._cuttable_at(row)) > now]
        return min(later, default=None)

    def _cut_off(self, entry: Entry, now: float) -> None:
        """End a row whose reader is too slow."""
        self._messages.append(Failed(entry.lease, "client_stall", "the client reads too slowly"))
        self._drop(entry.key, "client_stall", now)

    def _scene(self, now: float) -> Scene:
        rows = self._rows.values()
        placed = [r for r in rows if r.placed]
        return Scene(
            reading=[r for r in placed if r.unread],
            ready=[r for r in placed if not r.unread and not r.parked],
            parked=[r for r in rows if r.parked],
            holding=sum(r.parked for r in placed),
            back=self._back(),
            stepping=self._stepping,
            costs=self._costs,
            now=now,
        )

    def _step_plan(self, choice: Choice, now: float) -> StepPlan | None:
        self._stepping = frozenset(choice.step)
        if not choice.step:
            return None
        steps = self._depths.choose(choice.step)
        return StepPlan(choice.step, steps, self._cohort_of(choice.step, steps, now).cohort_id)

    def _cohort_of(self, rows: tuple[str, ...], steps: Steps, now: float) -> Cohort:
        """Return the open cohort of exactly these rows on this lane, sealing it when it is new."""
        for cohort in self._cohorts:
            if cohort.rows == rows and cohort.lane == steps.lane:
                return cohort
        for old in list(self._cohorts):
            if not self._policy.keeps_cohorts or set(old.rows) & set(rows):
                reason = "lane changed" if old.rows == rows else "rows changed"
                self._dissolve(old, reason, now)
        self._sealed += 1
        cohort = Cohort(f"cohort-{self._sealed}", rows, steps.geometry, steps.lane, now)
        self._cohorts.append(cohort)
        requests = tuple(self._rows[key].request_id for key in rows)
        self._notes.append(
            CohortSealed(cohort.cohort_id, cohort.lane, cohort.geometry, rows, requests)
        )
        return cohort

    def _apply_read(self, plan: Plan, outcome: Outcome, now: float) -> int:
        if plan.read is None:
            return 0
        key, _ = plan.read
        cached = outcome.read.cached if outcome.read is not None else 0
        computed = outcome.read_tokens - cached
        if computed:
            self._costs.saw_read(computed, outcome.read_s)
        entry = self._rows[key]
        entry.unread -= outcome.read_tokens
        if outcome.read is not None:
            self._take(entry, outcome.read, lane_name(self._depths.kind, 1), 0, None, now)
        entry.ready_at = now
        return computed

    def _apply_step(self, plan: Plan, outcome: Outcome, now: float) -> None:
        if plan.step is None:
            return
        rows, steps = plan.step.rows, plan.step.steps
        longest = max(self._rows[key].length for key in rows)
        self._costs.saw_step(steps.geometry, longest, outcome.step_s)
        self._depths.saw(rows, steps, outcome.step_s, outcome.steps)
        cohort = next(c for c in self._cohorts if c.cohort_id == plan.step.cohort_id)
        cohort.steps += 1
        cohort.tokens += sum(len(delta.tokens) for delta in outcome.steps)
        cohort.drafted += sum(delta.drafted for delta in outcome.steps)
        cohort.accepted += sum(delta.accepted for delta in outcome.steps)
        depth = max(steps.depths)
        cohort.depths[depth] = cohort.depths.get(depth, 0) + 1
        for delta in outcome.steps:
            row = self._rows[delta.key]
            self._take(row, delta, steps.lane, len(rows), cohort.cohort_id, now)

    def _take(
        self,
        entry: Entry,
        delta: RowDelta,
        lane: str,
        width: int,
        cohort_id: str | None,
        now: float,
    ) -> None:
        """Book one row's gain, and end the row if it is over."""
        if delta.error is not None:
            self._messages.append(Failed(entry.lease, delta.code, delta.error))
            self._drop(entry.key, "failed", now)
            return
        kept, finish = _cut(entry, delta.tokens)
        entry.emitted += kept
        entry.credits -= kept
        if entry.parked:
            entry.park(now)
        self._messages.append(
            Tokens(
                entry.lease,
                delta.tokens[:kept],
                delta.logprobs[:kept],
                delta.prompt_logprobs,
                lane,
                width,
                cohort_id,
                finish,
                delta.drafted,
                delta.accepted,
                delta.cached,
            )
        )
        if finish is not None:
            self._drop(entry.key, finish, now)

    def _drop(self, key: str, reason: str, now: float) -> None:
        """Forget a row; its cohorts are over, and the device closes it before the next run."""
        if self._queue.pop(key, None) is not None:
            return
        del self._rows[key]
        self._depths.forget(key)
        self._closing.append(key)
        for cohort in list(self._cohorts):
            if key in cohort.rows:
                self._dissolve(cohort, reason, now)

    def _dissolve(self, cohort: Cohort, reason: str, now: float) -> None:
        self._cohorts.remove(cohort)
        self._notes.append(
            CohortDissolved(
                cohort.cohort_id,
                cohort.lane,
                cohort.geometry,
                cohort.rows,
                cohort.steps,
                cohort.tokens,
                cohort.drafted,
                cohort.accepted,
                cohort.depths,
                now - cohort.sealed_at,
                reason,
            )
        )

    def _state(self) -> str:
        """Return what is to be done next; rows that wait for their readers are nothing to do."""
        going_on = [row for row in self._rows.values() if not row.parked]
        if any(not row.unread for row in going_on):
            return "decoding"
        return "prefilling" if going_on else "idle"


def _cut(entry: Entry, tokens: Sequence[int]) -> tuple[int, Finish | None]:
    """Return how many tokens count and whether the row ends with them; the end token counts."""
    for at, token in enumerate(tokens, start=1):
        if token in entry.context.end_ids:
            return at, "stop"
        if entry.emitted + at >= entry.context.budget:
            return at, "length"
    return len(tokens), None
