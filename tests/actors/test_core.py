"""The scheduler core as a plain object: messages in, plans out, no clock but the one given."""

import pytest
from tests.fakes import TILE, row_context

from paceline.actors.core import Core, Outcome
from paceline.actors.depth import Depths
from paceline.actors.messages import Admit, Admitted, CohortSealed, Grant, Lease, Leave, Tokens
from paceline.actors.policies import make_policy
from paceline.actors.scene import Costs
from paceline.lanes.base import RowDelta
from paceline.runtime.modes import PRESETS, Mode, Preset


def _core(mode: Mode = Mode.AR_BATCH) -> Core:
    return Core(make_policy(mode, PRESETS[Preset.LATENCY], 0.5, TILE), Depths("ar", 0))


def _admit(core: Core, name: str, epoch: int, prompt: int = 1, budget: int = 9) -> Lease:
    lease = Lease(name, epoch)
    core.feed(Admit(lease, name, row_context(prompt, budget), 32, 0.0), 0.0)
    return lease


def _read(core: Core, now: float = 0.0) -> tuple[object, ...]:
    plan = core.next_plan(now)
    assert plan.read is not None
    delta = RowDelta(plan.read[0], (1000,))
    return core.apply(Outcome(read=delta, read_tokens=plan.read[1], read_s=0.1), now).messages


def test_a_row_is_admitted_read_and_stepped() -> None:
    """A fed row is opened and read in one plan and stepped in the next."""
    core = _core()
    lease = _admit(core, "a", 1)
    messages = _read(core)
    assert messages[0] == Admitted(lease, 0.0)
    assert isinstance(messages[1], Tokens)
    plan = core.next_plan(1.0)
    assert plan.step is not None
    assert (plan.step.rows, plan.step.steps.lane) == (("a",), "ar-b1")
    turn = core.apply(Outcome(steps=(RowDelta("a", (1001,)),), step_s=0.01), 1.0)
    assert isinstance(turn.notes[0], CohortSealed)
    assert turn.committed == 1


def test_a_stale_lease_is_dropped() -> None:
    """Messages with another epoch than the row's own change nothing."""
    core = _core()
    lease = _admit(core, "a", 5)
    core.feed(Leave(Lease("a", 4), "old"), 0.0)
    core.feed(Grant(Lease("a", 6), 1000), 0.0)
    assert core.queued[0].lease == lease
    assert core.queued[0].credits == 32


def test_leaving_twice_is_leaving_once() -> None:
    """A second Leave for a row that is gone is nothing."""
    core = _core()
    lease = _admit(core, "a", 1)
    _read(core)
    core.feed(Leave(lease, "first"), 0.0)
    core.feed(Leave(lease, "second"), 0.0)
    assert core.next_plan(0.0).close == ("a",)


def test_a_row_without_credits_is_parked_until_it_gets_some() -> None:
    """A parked row is in no plan; a grant brings it back."""
    core = _core()
    lease = Lease("a", 1)
    core.feed(Admit(lease, "a", row_context(1, 9), 1, 0.0), 0.0)
    _read(core)
    assert core.next_plan(0.0).step is None
    core.feed(Grant(lease, 1), 0.0)
    assert core.next_plan(0.0).step is not None


def test_a_new_set_of_rows_is_a_new_cohort() -> None:
    """Joining seals a cohort with a new id and dissolves the one before."""
    core = _core()
    _admit(core, "a", 1)
    _read(core)
    first = core.next_plan(0.0).step
    core.apply(Outcome(steps=(RowDelta("a", (1001,)),), step_s=0.01), 0.0)
    _admit(core, "b", 2)
    plan = core.next_plan(0.0)
    core.apply(
        Outcome(RowDelta("b", (1000,)), 1, 0.1, (RowDelta("a", (1002,)),), 0.01),
        0.0,
    )
    second = core.next_plan(0.0).step
    assert first is not None
    assert plan.step is not None
    assert second is not None
    assert plan.step.cohort_id == first.cohort_id
    assert second.rows == ("a", "b")
    assert second.cohort_id != first.cohort_id
    assert len(core.cohorts) == 1


def test_what_a_turn_should_take_is_told_from_any_that_was_like_it() -> None:
    """Neither a first wide step nor a first prompt that is read has no bound of its own."""
    costs = Costs()
    assert costs.expected_s(10, None) is None
    assert costs.expected_s(0, 1) is None
    costs.saw_step(1, 10, 0.5)
    assert costs.expected_s(0, 1) == 0.5
    assert costs.expected_s(0, 8) == 4.0
    assert costs.expected_s(10, None) == 5.0
    assert costs.expected_s(10, 8) == 9.0
    costs.saw_step(8, 10, 1.0)
    costs.saw_read(10, 0.1)
    assert costs.expected_s(10, 8) == pytest.approx(1.1)
