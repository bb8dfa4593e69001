"""The scheduler core: rows, plans, outcomes. Pure: no trio, no MLX, and no clock of its own.

`feed` takes messages, `next_plan` says what to run, `apply` takes what came of it. In
production the device thread drives it; in tests a trio task drives the same object in virtual
time.
"""

from collections.abc import Mapping, Sequence
from typing import assert_never

import msgspec

from ..lanes.base import RowDelta
from ..lanes.geometry import lane_name
from ..runtime.context import RowContext
from ..runtime.modes import Priority
from .depth import Depths, Steps
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
    """What the device does in one turn, in this order: close, open, read, step."""

    close: tuple[str, ...] = ()
    open: tuple[tuple[str, RowContext], ...] = ()
    read: tuple[str, int] | None = None
    step: StepPlan | None = None
    wait_until: float | None = None

    @property
    def idle(self) -> bool:
        """Whether there is nothing to run."""
        return not (self.close or self.open or self.read or self.step)


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


class Entry(msgspec.Struct):
    """One row as the scheduler sees it."""

    lease: Lease
    request_id: str
    context: RowContext
    credits: int
    queued_at: float
    unread: int
    priority: Priority = Priority.NORMAL
    ready_at: float = 0.0
    emitted: int = 0

    @property
    def key(self) -> str:
        """The row's id."""
        return self.lease.row

    @property
    def epoch(self) -> int:
        """The order rows were asked for."""
        return self.lease.epoch

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.context.prompt) + self.emitted

    @property
    def left(self) -> int:
        """Tokens the row may still generate."""
        return self.context.budget - self.emitted

    @property
    def parked(self) -> bool:
        """Whether the row waits for its reader."""
        return self.unread == 0 and self.credits <= 0


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


class Core:
    """The state machine behind the model owner.

    Args:
        policy: The scheduler mode.
        depths: Chooses the lane of each step and how many tokens it drafts.
    """

    def __init__(self, policy: Policy, depths: Depths) -> None:
        self._policy = policy
        self._depths = depths
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
                self._queue[lease.row] = Entry(
                    lease, request_id, context, credits, at, len(context.prompt), priority
                )
            case Leave(lease, reason):
                if self._held(lease):
                    self._drop(lease.row, reason, now)
            case Grant(lease, tokens):
                if entry := self._held(lease):
                    if entry.parked:
                        entry.ready_at = now
                    entry.credits += tokens
            case _:
                assert_never(message)

    def next_plan(self, now: float) -> Plan:
        """Admit what the policy has room for and say what to run."""
        opened = self._admit(now)
        choice = self._policy.choose(self._scene(now))
        step = self._step_plan(choice, now)
        self._plan = Plan(tuple(self._closing), tuple(opened), choice.read, step, choice.wait_until)
        self._closing = []
        return self._plan

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
                Drafts(d.drafted, d.accepted, len(d.tokens), d.branches) for d in outcome.steps
            ),
            committed=sum(len(m.tokens) for m in self._messages if isinstance(m, Tokens)),
            prompt_tokens=read_tokens,
            cached_tokens=outcome.read.cached if outcome.read is not None else 0,
            read_s=outcome.read_s,
            active_rows=len(self._rows),
            queue_depth=len(self._queue),
            state=self._state(),
        )
        self._messages, self._notes = [], []
        return turn

    def _held(self, lease: Lease) -> Entry | None:
        entry = self._rows.get(lease.row) or self._queue.get(lease.row)
        return entry if entry is not None and entry.lease == lease else None

    def _admit(self, now: float) -> list[tuple[str, RowContext]]:
        if not self._queue:
            return []
        opened = []
        for row in self._policy.admit(tuple(self._queue.values()), self._scene(now)):
            entry = self._queue.pop(row.key)
            self._rows[row.key] = entry
            opened.append((row.key, entry.context))
            self._messages.append(Admitted(entry.lease, max(0.0, now - entry.queued_at)))
        return opened

    def _scene(self, now: float) -> Scene:
        rows = self._rows.values()
        return Scene(
            reading=[r for r in rows if r.unread],
            ready=[r for r in rows if not r.unread and not r.parked],
            parked=[r for r in rows if r.parked],
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
            if old.rows == rows:
                continue  # on another lane, and the two are tried in turns: both last
            if not self._policy.keeps_cohorts or set(old.rows) & set(rows):
                self._dissolve(old, "rows changed", now)
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
            self._messages.append(Failed(entry.lease, "row_failed", delta.error))
            self._drop(entry.key, "failed", now)
            return
        kept, finish = _cut(entry, delta.tokens)
        entry.emitted += kept
        entry.credits -= kept
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
        if not self._rows:
            return "idle"
        if self._plan.step is not None:
            return "decoding"
        return "prefilling" if any(row.unread for row in self._rows.values()) else "idle"


def _cut(entry: Entry, tokens: Sequence[int]) -> tuple[int, Finish | None]:
    """Return how many tokens count and whether the row ends with them; the end token counts."""
    for at, token in enumerate(tokens, start=1):
        if token in entry.context.end_ids:
            return at, "stop"
        if entry.emitted + at >= entry.context.budget:
            return at, "length"
    return len(tokens), None
