"""The log of cohorts: followable when they are few, bounded when they change at every token."""

from typing import Any

from tests.fakes import TILE, row_context

from paceline.actors.cohort_log import AT_ONCE, PER_SECOND, CohortLog
from paceline.actors.core import Core, Outcome
from paceline.actors.depth import Depths, Steps
from paceline.actors.messages import Admit, CohortDissolved, CohortSealed, Lease
from paceline.actors.policies import make_policy
from paceline.lanes.base import RowDelta
from paceline.runtime.modes import PRESETS, Mode, Preset


class _Log:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []
        self.detail: list[dict[str, Any]] = []

    def info(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    def debug(self, event: str, **fields: Any) -> None:
        self.detail.append({"event": event, **fields})


def _flicker(log: CohortLog, number: int, now: float) -> None:
    rows = ("a",) if number % 2 else ("a", "b")
    name = f"cohort-{number}"
    log.note(CohortSealed(name, "ar-b3", 3, rows, rows), now)
    log.note(CohortDissolved(name, "ar-b3", 3, rows, 1, len(rows), 0, 0, {0: 1}, 0.01, "x"), now)
    log.sum_up(now, False)


def test_cohorts_that_change_at_every_token_are_summed_up() -> None:
    """Lines are bounded by the time, and with the sums no cohort, step or token is missing."""
    written = _Log()
    log = CohortLog(written)
    seconds, cohorts = 20, 2000
    for number in range(cohorts):
        _flicker(log, number, number * seconds / cohorts)
    log.sum_up(seconds, True)
    assert len(written.lines) <= 2 * (AT_ONCE + seconds * PER_SECOND) + seconds + 1
    ended = [e for e in written.lines if e["event"] == "cohort.dissolved"]
    sums = [e for e in written.lines if e["event"] == "cohort.unlogged"]
    assert len(ended) + sum(e["cohorts"] for e in sums) == cohorts
    assert sum(e["steps"] for e in ended + sums) == cohorts
    assert sum(e["tokens"] for e in ended + sums) == cohorts * 3 // 2
    sealed = [e["cohort_id"] for e in written.lines if e["event"] == "cohort.sealed"]
    assert sealed == [e["cohort_id"] for e in ended]
    assert len(written.lines) - len(sums) + len(written.detail) == 2 * cohorts


def test_cohorts_that_are_few_have_both_lines_each() -> None:
    """At a rate that is allowed nothing is summed up."""
    written = _Log()
    log = CohortLog(written)
    for number in range(100):
        _flicker(log, number, number / PER_SECOND)
    log.sum_up(1000.0, True)
    assert [e["event"] for e in written.lines] == ["cohort.sealed", "cohort.dissolved"] * 100


class _Alternating(Depths):
    """Steps a row on two lanes in turns, as where both are equally quick."""

    turn = 0

    def choose(self, rows: Any) -> Steps:
        self.turn += 1
        lane, geometry = (("mtp-b1", 1), ("hyper-b8", 8))[self.turn % 2]
        return Steps(lane, geometry, (1,))


def test_lanes_that_take_turns_are_a_cohort_each_time_and_not_two_lines_a_token() -> None:
    """Every change of lane seals a cohort and says why; the log stays bounded by its time."""
    core = Core(make_policy(Mode.HYPER, PRESETS[Preset.SOLO], 0.5, TILE), _Alternating("mtp", 1))
    core.feed(Admit(Lease("a", 1), "a", row_context(1, 1001), 1001, 0.0), 0.0)
    core.next_plan(0.0)
    notes = [*core.apply(Outcome(read=RowDelta("a", (1000,)), read_tokens=1), 0.0).notes]
    written = _Log()
    log = CohortLog(written)
    tokens, token_s = 1000, 0.01
    for token in range(tokens):
        now = token * token_s
        core.next_plan(now)
        turn = core.apply(Outcome(steps=(RowDelta("a", (1001 + token,)),)), now)
        for note in turn.notes:
            log.note(note, now)
        log.sum_up(now, not turn.active_rows)
        notes += turn.notes
    sealed = [note for note in notes if isinstance(note, CohortSealed)]
    ended = [note for note in notes if isinstance(note, CohortDissolved)]
    assert [note.lane for note in sealed] == ["hyper-b8", "mtp-b1"] * (tokens // 2)
    assert [note.cohort_id for note in sealed] == [note.cohort_id for note in ended]
    assert [note.steps for note in ended] == [1] * tokens
    assert {note.reason for note in ended[:-1]} == {"lane changed"}
    seconds = tokens * token_s
    assert len(written.lines) <= 2 * (AT_ONCE + seconds * PER_SECOND) + seconds + 1
    logged = [e["steps"] for e in written.lines if "steps" in e]
    assert sum(logged) == tokens
