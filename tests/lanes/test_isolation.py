"""Rows beside rows that fail: same tokens as alone, and clean slots for those who come after."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import mlx.core as mx
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lanes.test_mtp import (
    RECEIPT,
    SAMPLERS,
    at,
    context,
    lane_of,
    lockstep,
    plain,
    run,
    stock,
)
from tests.lanes.tiny import CARD, VOCAB, tiny_llama

from paceline.actors.core import Plan
from paceline.actors.engine import Engine
from paceline.lanes import sampler
from paceline.lanes.ar import ArLane, Seated
from paceline.lanes.base import DRAFT_FAILURES, Row, RowDelta, Trunk
from paceline.lanes.choosing import ON_HOST, Chooser, HostChooser
from paceline.lanes.device import DeviceChooser
from paceline.lanes.head import Head, LockstepHead
from paceline.lanes.hyper import HyperLane
from paceline.lanes.install import Wanted, install
from paceline.lanes.mtp import Drafter, MtpLane
from paceline.lanes.prefix import PrefixBank
from paceline.lanes.ragged import Layout, Pass, RowSlots
from paceline.lanes.selfcheck import LaneChecker
from paceline.lanes.solo import SoloTrunk
from paceline.lanes.stock import StockTrunk
from paceline.lanes.verify import ACCEPTANCE, Acceptance, Draft
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.errors import LaneRefused, RowError
from paceline.runtime.model import LoadedModel
from paceline.runtime.modes import Mode

NAN, INF = float("nan"), float("inf")
Made = tuple[Trunk, Head]
MAKERS: dict[str, Callable[[], Made]] = {"lockstep": lockstep, "stock": stock}
CHOOSERS: dict[str, Chooser] = {
    "host": ON_HOST,
    "device": DeviceChooser(),
    "rejection": HostChooser(ACCEPTANCE["rejection"]),
}


@lru_cache(maxsize=2)
def made_of(arithmetic: str) -> Made:
    return MAKERS[arithmetic]()


class Poisoner:
    """A trunk in which chosen rows have logits that are no numbers."""

    def __init__(self, inner: Trunk) -> None:
        self._inner = inner
        self.lane: Any = None
        self.keys: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        passed = self._inner.step(slots, layout, tokens)
        seated = getattr(self.lane._seats, "_rows", None)
        if self.keys and seated is not None and slots.count == len(seated):
            bad = np.zeros((layout.total, 1), bool)
            for place, row in enumerate(seated):
                if row is not None and row.key in self.keys:
                    first = layout.first[place]
                    bad[first : first + layout.counts[place]] = True
            assert passed.logits is not None
            passed.logits = mx.where(mx.array(bad), NAN, passed.logits)
        return passed


def where(lane: Any, row: Row) -> tuple[RowSlots, int]:
    """Return the buffers and the slot that a row's keys and values are in."""
    if row.seats is None:
        return row.slots, 0
    return lane._seats._slots, lane._seats._rows.index(row)


def poison(lane: Any, row: Row, layers: Sequence[int], first: int, last: int, what: float) -> None:
    """Overwrite positions of a row in some layers."""
    slots, at = where(lane, row)
    for layer in layers:
        for buffers in (slots.keys, slots.values):
            buffer = buffers[layer]
            if buffer is not None:
                entries = np.array(buffer)
                entries[at, :, first:last] = what
                buffers[layer] = mx.array(entries)


# What may happen to a row, and whether it goes on as if nothing had.
HARMS = {"keys": False, "overflow": False, "logits": False, "head": True, "tail": True}


def harm(lane: Any, row: Row, how: str) -> None:
    slots, at = where(lane, row)
    length = slots.lengths[at]
    if how in ("keys", "overflow"):
        poison(lane, row, [0, 1], length // 2, length, NAN if how == "keys" else INF)
    elif how == "head":
        poison(lane, row, [2], 0, slots.capacity, NAN)
    elif how == "tail":
        poison(lane, row, [0, 1, 2], length, slots.capacity, NAN)
    else:
        lane.trunk.keys.add(row.key)


def asked(number: int) -> RowContext:
    """Return what row `number` asks for; prompts share a beginning of two tiles."""
    length = (131, 9, 140, 64, 30)[number % 5]
    prompt = tuple((i * 11 + 3) % VOCAB for i in range(length))
    return RowContext((*prompt, number), SAMPLERS[number % 8], number, 14, frozenset())


@lru_cache(maxsize=64)
def alone(arithmetic: str, number: int) -> list[int]:
    return plain(made_of(arithmetic), [asked(number)])[0][0]


@lru_cache(maxsize=64)
def rejected(arithmetic: str, number: int) -> list[int]:
    """Rejection commits other tokens than plain decoding; by depth, so each step is one draft."""
    lane = lane_of(made_of(arithmetic), 3, CHOOSERS["rejection"])
    return run(lane, [asked(number)], at(1))[0][0]


def check_interleaving(data: st.DataObject, arithmetic: str, geometry: int, how: str) -> None:
    """Let rows come, be harmed, fail and go in a drawn order; all others have their tokens."""
    trunk, head = made_of(arithmetic)
    poisoner: Any = Poisoner(trunk)
    bank = PrefixBank(1 << 30, trunk.prefill_tile, 2)
    lane = MtpLane(poisoner, geometry, "float32", RECEIPT, CHOOSERS[how], head, bank)
    poisoner.lane = lane
    waiting, rows = list(range(geometry + 3)), dict[str, Row]()
    victims, failed = set[str](), set[str]()
    while waiting or rows:
        while waiting and len(rows) < geometry and (not rows or data.draw(st.booleans())):
            number = waiting.pop(0)
            row = lane.open(str(number), asked(number))
            first = lane.prefill(row, 10_000)
            assert first is not None
            assert first.error is None
            rows[row.key] = row
        seated = [row for row in rows.values() if row.seats is not None]
        if seated and data.draw(st.integers(0, 3)) == 0:
            row = data.draw(st.sampled_from(seated))
            kind = data.draw(st.sampled_from(sorted(HARMS)))
            if how == "rejection" or not HARMS[kind]:
                victims.add(row.key)
            harm(lane, row, kind)
        live = [row for row in rows.values() if row.left > 0]
        depth = 1 if how == "rejection" else data.draw(st.integers(0, 3))
        for delta in lane.step(live, [depth] * len(live)) if live else ():
            assert delta.accepted <= delta.drafted <= depth
            if delta.error is not None:
                failed.add(delta.key)
                assert delta.key in victims
        for key, row in list(rows.items()):
            if row.left <= 0 or key in failed:
                lane.close(rows.pop(key))
                if key not in victims:
                    expect = rejected if how == "rejection" else alone
                    assert row.generated == expect(arithmetic, int(key)), key


@pytest.mark.slow
@pytest.mark.parametrize("geometry", [3, 8])
@pytest.mark.parametrize(
    ("arithmetic", "how"),
    [("lockstep", "host"), ("lockstep", "device"), ("lockstep", "rejection"), ("stock", "host")],
)
@settings(max_examples=8)
@given(st.data())
def test_rows_that_fail_harm_nobody(
    arithmetic: str, how: str, geometry: int, data: st.DataObject
) -> None:
    """NaN in keys, values, logits, head and rejected places of rows at any time, bank included."""
    check_interleaving(data, arithmetic, geometry, how)


@pytest.mark.slow
@pytest.mark.parametrize("arithmetic", sorted(MAKERS))
@settings(max_examples=8)
@given(st.data())
def test_branching_rows_that_fail_harm_nobody(arithmetic: str, data: st.DataObject) -> None:
    """The same where rows take turns on the lane that branches and on B1, with one bank."""
    trunk, head = made_of(arithmetic)
    bank = PrefixBank(1 << 30, trunk.prefill_tile, 2)
    narrow = MtpLane(trunk, 1, "float32", RECEIPT, ON_HOST, head, bank)
    lanes = narrow, HyperLane(trunk, "float32", RECEIPT, head)
    rows, victims = [begin(narrow, asked(n), str(n)) for n in range(4)], set[str]()
    while rows:
        row = data.draw(st.sampled_from(rows))
        if data.draw(st.integers(0, 4)) == 0:
            kind = data.draw(st.sampled_from(sorted(HARMS.keys() - {"logits"})))
            if not HARMS[kind]:
                victims.add(row.key)
            harm(narrow, row, kind)
        lane = lanes[data.draw(st.integers(0, 1))]
        (delta,) = lane.step([row], [data.draw(st.integers(0, 3))])
        assert delta.error is None or row.key in victims
        if delta.error is not None or row.left <= 0:
            rows.remove(row)
            lane.close(row)
            if row.key not in victims:
                assert row.generated == alone(arithmetic, int(row.key))


@pytest.mark.parametrize("make", [lockstep, stock])
@pytest.mark.parametrize("drafts", [False, True])
@pytest.mark.parametrize("what", [NAN, INF])
def test_a_slot_that_a_failed_row_left_is_clean(
    make: Callable[[], Made], drafts: bool, what: float
) -> None:
    """The row fails alone at once; the rows put there next have the tokens they have alone."""
    made = make()
    depth = 2 if drafts else 0
    lane = lane_of(made, 3) if drafts else ArLane(made[0], 3, "float32", RECEIPT, ON_HOST)
    contexts = [context(i, Sampling(temperature=0), 10 + 9 * i, 12) for i in range(4)]
    expected = [tokens for tokens, _ in plain(made, contexts)]
    bad, good = begin(lane, contexts[3], "bad"), begin(lane, contexts[0], "good")
    lane.step([bad, good], [depth] * 2)
    poison(lane, bad, [0, 1], 3, 200, what)
    found = lane.step([bad, good], [depth] * 2)
    assert found[0].error is not None
    assert "no finite logit" in found[0].error
    assert found[1].error is None
    lane.close(bad)
    for number in (1, 2):  # shorter than the one that failed
        late = begin(lane, contexts[number], "late")
        for _ in range(3):
            deltas = lane.step([late, good], [depth] * 2)
            assert [delta.error for delta in deltas] == [None, None]
        assert late.generated == expected[number][: len(late.generated)]
        lane.close(late)
    assert good.generated == expected[0][: len(good.generated)]


@pytest.mark.parametrize("make", [lockstep, stock])
def test_only_the_row_that_fails_steps_once_more(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Made]
) -> None:
    """Uneven drafts beside it, or its slot taken next: no other row ever meets its numbers."""
    made = make()
    lane = lane_of(made, 3)
    bad = begin(lane, context(1, Sampling(temperature=0), 40, 20), "bad")
    good = begin(lane, context(2, Sampling(temperature=0), 10, 20), "good")
    lane.step([bad, good], [2, 2])
    poison(lane, bad, [0, 1], 3, 200, NAN)
    counts: list[tuple[int, ...]] = []
    kind = type(made[0])
    step = kind.step

    def counted(self: Any, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        counts.append(layout.counts)
        return step(self, slots, layout, tokens)

    monkeypatch.setattr(kind, "step", counted)
    assert lane.step([bad, good], [3, 1])[0].error is not None
    assert counts == [(4, 2, 0), (1, 0, 0)]
    lane.close(bad)
    late = begin(lane, context(3, Sampling(temperature=0), 9, 20), "late")
    assert all(delta.error is None for delta in lane.step([late, good], [1, 1]))
    assert counts[2:] == [(2, 2, 0)]


def begin(lane: Any, asks: RowContext, key: str = "row") -> Row:
    """Open a row and read its prompt."""
    row: Row = lane.open(key, asks)
    delta = lane.prefill(row, 10_000)
    assert delta is not None
    assert delta.error is None
    return row


def test_what_is_masked_cannot_harm_a_row() -> None:
    """NaN behind a row's length, as a wrong draft may leave, costs a pass and no token."""
    made = lockstep()
    asks = context(1, Sampling(temperature=0.8), 20, 12)
    for geometry in (1, 3):
        lane = lane_of(made, geometry)
        row = begin(lane, asks)
        while row.left > 0:
            (delta,) = lane.step([row], [2])
            assert delta.error is None
            poison(lane, row, [0, 1, 2], where(lane, row)[0].lengths[0], 250, NAN)
        assert row.generated == plain(made, [asks])[0][0]


def test_a_vacated_slot_has_no_length_left() -> None:
    """Of a long row that left neither the model's length nor its head's weighs on a step."""
    lane: Any = lane_of(lockstep(), 3)
    rows = [begin(lane, context(i, Sampling(), 20 + 100 * i, 20), str(i)) for i in range(3)]
    lane.step(rows, [2] * 3)
    lane.close(rows[2])
    slots = lane._seats._slots
    assert (slots.lengths[2], slots.drafted[2]) == (0, 0)


class _Raising:
    """An acceptance whose drafting raises for chosen rows."""

    def __init__(self, inner: Acceptance, keys: set[str], error: Exception) -> None:
        self.name = inner.name
        self.verify = inner.verify
        self._inner, self._keys, self._error = inner, keys, error
        self.tries = 0

    def draft(self, logits: Any, row: Row, before: Sequence[Draft], ids: Any) -> Draft:
        if row.key in self._keys:
            self.tries += 1
            raise self._error
        return self._inner.draft(logits, row, before, ids)


@pytest.mark.parametrize("acceptance", sorted(ACCEPTANCE))
@pytest.mark.parametrize("error", [RowError("grammar"), ValueError("x"), ZeroDivisionError()])
def test_a_draft_that_raises_is_no_draft(acceptance: str, error: Exception) -> None:
    """The row steps without drafts, after a few times for good; its neighbour drafts on."""
    raising = _Raising(ACCEPTANCE[acceptance], {"bad"}, error)
    made = lockstep()
    lane = lane_of(made, 3, HostChooser(raising))
    contexts = [context(1, Sampling(temperature=0.8)), context(2, Sampling(temperature=0.8))]
    rows = [begin(lane, contexts[0], "good"), begin(lane, contexts[1], "bad")]
    drafted = [0, 0]
    deltas: list[RowDelta] = []
    while any(row.left > 0 for row in rows):
        live = [row for row in rows if row.left > 0]
        deltas = lane.step(live, [3] * len(live))
        for row, delta in zip(live, deltas, strict=True):
            assert delta.error is None
            drafted[rows.index(row)] += delta.drafted
            assert not (delta.draft_failed and row is rows[0])
    assert rows[1].generated == plain(made, contexts[1:])[0][0]
    assert (
        rows[0].generated
        == run(lane_of(made, 3, HostChooser(ACCEPTANCE[acceptance])), contexts[:1], at(3))[0][0]
    )
    assert drafted[0] > 0
    assert (drafted[1], raising.tries) == (0, DRAFT_FAILURES)


@pytest.mark.parametrize("chooser", sorted(CHOOSERS))
@pytest.mark.parametrize("geometry", [1, 3])
def test_a_head_without_numbers_costs_drafts_only(
    monkeypatch: pytest.MonkeyPatch, geometry: int, chooser: str
) -> None:
    """A head that gives NaN: every row has the tokens of plain decoding, and says so."""
    made = lockstep()
    contexts = [context(i, SAMPLERS[i], 9 + 20 * i) for i in range(min(geometry, 3))]
    plainly = LockstepHead.logits
    monkeypatch.setattr(LockstepHead, "logits", lambda self, hidden: plainly(self, hidden) * NAN)
    step = LockstepHead.step
    monkeypatch.setattr(LockstepHead, "step", lambda self, *rest: step(self, *rest) * NAN)
    lane = lane_of(made, geometry, CHOOSERS[chooser])
    rows = [begin(lane, each, str(i)) for i, each in enumerate(contexts)]
    assert all(delta.draft_failed for delta in lane.step(rows, [3] * len(rows)))
    while any(row.left > 0 for row in rows):
        live = [row for row in rows if row.left > 0]
        assert all(delta.error is None for delta in lane.step(live, [3] * len(live)))
    assert [row.generated for row in rows] == [tokens for tokens, _ in plain(made, contexts)]


def test_one_rows_broken_head_leaves_the_others_drafts_alone() -> None:
    """NaN among what a head has kept of one row: the other's drafts keep every bit."""
    made = lockstep()
    contexts = [context(i, Sampling(temperature=0), 20 + i) for i in range(2)]
    found = []
    for what in (0.5, NAN):
        lane: Any = lane_of(made, 3)
        rows = [begin(lane, each, str(i)) for i, each in enumerate(contexts)]
        lane.step(rows, [0, 0])
        poison(lane, rows[0], [2], 0, 10, what)
        drafter = Drafter(made[1], ON_HOST, Seated(lane._seats._slots, rows, [0, 1]), [4, 2])
        drafter.run()
        found.append([d.token for d in drafter.drafts[1] if d is not None])
        assert drafter.failed == ({0} if what != what else set())
    assert found[0] == found[1]
    assert len(found[0]) == 2


@pytest.mark.parametrize("make", [lockstep, stock])
def test_a_tree_that_cannot_be_drafted_is_no_tree(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Made]
) -> None:
    """On the branching lane, too, a head that fails costs drafts and no token."""
    made = make()
    asks = context(1, Sampling(temperature=0.8), budget=12)
    expected = plain(made, [asks])[0][0]
    lane = HyperLane(made[0], "float32", RECEIPT, made[1])
    row = begin(lane, asks)
    lane.step([row], [3])
    best = sampler.best

    def fails(*rest: Any) -> Any:
        raise FloatingPointError("overflow")

    monkeypatch.setattr(sampler, "best", fails)
    (delta,) = lane.step([row], [3])
    assert (delta.error, delta.draft_failed, delta.drafted) == (None, True, 0)
    monkeypatch.setattr(sampler, "best", best)
    poison(lane, row, [2], 0, 10, NAN)
    while row.left > 0:
        assert lane.step([row], [3])[0].error is None
    assert row.generated == expected[: len(row.generated)]


@pytest.mark.parametrize("make", [lockstep, stock])
def test_what_is_no_number_is_never_kept_for_others(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Made]
) -> None:
    """A prompt that was read wrongly fails its row; the same prompt is computed anew and right."""
    made = make()
    made[0].prefill_tile = 64
    bank = PrefixBank(1 << 30, 64, 2)
    lane = MtpLane(made[0], 1, "float32", RECEIPT, ON_HOST, made[1], bank)
    asks = context(1, Sampling(temperature=0), 200, 12)
    expected = plain(made, [asks])[0][0]
    kind = type(made[0])
    prefill = kind.prefill

    def spoilt(self: Any, slots: RowSlots, tokens: Any, *, want: str) -> Pass:
        passed = prefill(self, slots, tokens, want=want)
        values = slots.values[1]
        if slots.lengths[0] == 128 and values is not None:
            values[:, :, 100] = INF
            slots.values[1] = values
        return passed

    with monkeypatch.context() as patch:
        patch.setattr(kind, "prefill", spoilt)
        row = lane.open("bad", asks)
        failed = lane.prefill(row, 10_000)
        assert failed is not None
        assert failed.error is not None
    row = lane.open("good", asks)
    delta = lane.prefill(row, 10_000)
    assert delta is not None
    assert (delta.error, delta.cached) == (None, 64)  # the tile before the bad one
    while row.left > 0:
        lane.step([row], [2])
    assert row.generated == expected[: len(row.generated)]


def test_a_bank_that_fails_costs_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither giving nor keeping may end a row, let alone the owner."""
    made = lockstep()
    asks = context(1, Sampling(temperature=0), 200, 12)

    def fails(*rest: Any) -> Any:
        raise RuntimeError("[malloc] Unable to allocate")

    for name in ("give", "keep"):
        with monkeypatch.context() as patch:
            patch.setattr(PrefixBank, name, fails)
            bank = PrefixBank(1 << 30, 64, 2)
            lane = MtpLane(made[0], 1, "float32", RECEIPT, ON_HOST, made[1], bank)
            assert run(lane, [asks], at(2)) == plain(made, [asks])


def test_prompt_scores_without_numbers_end_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """No NaN is ever reported as a log probability."""
    made = lockstep()
    lane = lane_of(made, 1)
    monkeypatch.setattr(Pass, "host", lambda self: np.full((9, VOCAB), NAN, np.float32))
    asks = RowContext(tuple(range(9)), Sampling(logprobs=1), 1, 4, frozenset(), score_prompt=True)
    row = lane.open("row", asks)
    with pytest.raises(RowError, match="no finite logit"):
        lane.prefill(row, 100)


def test_a_failed_row_of_a_running_state_ends_alone() -> None:
    """Models with caches of their own: a row without finite logits ends with its error."""
    trunk: Any = SoloTrunk(tiny_llama(), VOCAB)
    asks = context(1, Sampling(temperature=0), budget=12)
    lane = ArLane(trunk, 1, "float32", RECEIPT, ON_HOST)
    good, bad = begin(lane, asks), begin(lane, asks)
    lane.step([good], [0])
    bad.slots.spoil()
    (delta,) = lane.step([bad], [0])
    assert "no finite logit" in (delta.error or "")
    lane.close(bad)
    while good.left > 0:
        lane.step([good], [0])
    fresh = begin(lane, asks)
    while fresh.left > 0:
        lane.step([fresh], [0])
    assert good.generated == fresh.generated


def test_a_row_that_cannot_start_or_sit_ends_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Opening and seating are a row's own work: an error there is that row's."""
    made = lockstep()
    lane = lane_of(made, 3)
    rows = [begin(lane, context(i, Sampling(), 9, 20), str(i)) for i in range(2)]
    lane.step(rows[:1], [1])
    place = RowSlots.place

    def fails(self: RowSlots, slot: int, row: RowSlots) -> None:
        self.lengths[slot] = 7
        raise ValueError("shapes do not match")

    monkeypatch.setattr(RowSlots, "place", fails)
    found = {delta.key: delta for delta in lane.step(rows, [1, 1])}
    assert found["1"].error == "shapes do not match"
    assert found["0"].error is None
    monkeypatch.setattr(RowSlots, "place", place)
    assert where(lane, rows[0])[0].lengths[1] == 0

    def no_row(self: ArLane, key: str, asks: RowContext) -> Row:
        raise RowError("there is no memory")

    monkeypatch.setattr(ArLane, "open", no_row)
    core: Any = None
    engine = Engine(core, {"mtp-b3": lane}, lambda: 0.0)
    plan = Plan(open=(("late", context(1, Sampling())),), read=("late", 64))
    outcome = engine.run(plan)
    assert outcome.read is not None
    assert outcome.read.error == "starting the row failed: there is no memory"
    assert engine.run(Plan(close=("late",))).read is None


@pytest.mark.parametrize("make", [lockstep, stock])
@pytest.mark.parametrize("why", ["memory", "anything"])
def test_a_second_pass_that_raises_costs_only_the_row_it_is_for(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Made], why: str
) -> None:
    """What the neighbours committed in the first pass comes out, at a buffer's end, too."""
    made = make()
    lane = lane_of(made, 3)
    asks = context(0, Sampling(temperature=0), 249, 40)
    good = begin(lane, asks, "good")
    bad = begin(lane, context(3, Sampling(temperature=0), 40, 40), "bad")
    lane.step([bad, good], [0, 0])
    slots = where(lane, good)[0]
    while max(slots.lengths) < 255:  # the second pass would need a longer buffer
        lane.step([bad, good], [0, 0])
    poison(lane, bad, [0, 1], 3, 200, NAN)
    before = len(good.generated)
    kind, passes = type(made[0]), []
    step, reserve = kind.step, RowSlots.reserve

    def once(self: Any, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        passes.append(layout.counts)
        if len(passes) == 2 and why == "anything":
            raise RuntimeError("[malloc] Unable to allocate")
        return step(self, slots, layout, tokens)

    def full(self: RowSlots, positions: int) -> None:
        if passes and positions > self.capacity:
            raise RowError("there is no memory")
        reserve(self, positions)

    monkeypatch.setattr(kind, "step", once)
    monkeypatch.setattr(RowSlots, "reserve", full)
    found = {delta.key: delta for delta in lane.step([bad, good], [0, 0])}
    assert passes == [(1, 1, 0), (1, 0, 0)]
    assert "no finite logit" in (found["bad"].error or "")
    assert found["good"].error is None
    assert len(found["good"].tokens) == len(good.generated) - before == 1
    monkeypatch.undo()
    lane.close(bad)
    while good.left > 0:
        lane.step([good], [0])
    assert good.generated == plain(made, [asks])[0][0]


def test_a_second_pass_of_a_row_with_branches_may_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row ends with the first pass's error, and nothing else does."""
    trunk, head = made = lockstep()
    row = begin(lane_of(made, 1), context(1, Sampling(temperature=0), 40, 20))
    lane = HyperLane(trunk, "float32", RECEIPT, head)
    lane.step([row], [2])
    poison(lane, row, [0, 1], 3, 40, NAN)
    kind, passes = type(trunk), []

    def counted(plain: Any) -> Any:
        def run(*args: Any) -> Pass:
            passes.append(plain)
            if len(passes) == 2:
                raise ValueError
            done: Pass = plain(*args)
            return done

        return run

    monkeypatch.setattr(kind, "step", counted(kind.step))
    monkeypatch.setattr(kind, "branch", counted(kind.branch))
    (delta,) = lane.step([row], [2])
    assert len(passes) == 2
    assert "no finite logit" in (delta.error or "")
    assert row.failed


@pytest.mark.parametrize("make", [lockstep, stock])
@pytest.mark.parametrize("head", [False, True])
def test_a_row_that_ended_well_leaves_a_clean_slot(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], Made], head: bool
) -> None:
    """A refused draft may have overflowed, or a head: the next row there never meets it."""
    made = make()
    lane = lane_of(made, 3)
    first = begin(lane, context(0, Sampling(temperature=0), 24, 40), "first")
    other = begin(lane, context(2, Sampling(temperature=0), 9, 60), "other")
    lane.step([first, other], [2, 2])
    slots, at = where(lane, first)
    if head:
        poison(lane, first, [2], 0, 200, NAN)
        assert lane.step([first, other], [2, 2])[0].draft_failed
    else:
        poison(lane, first, [0, 1, 2], slots.lengths[at], 200, NAN)
    lane.close(first)
    late = begin(lane, context(1, Sampling(temperature=0), 20, 40), "late")
    kind, counts = type(made[0]), []
    step = kind.step

    def counted(self: Any, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        counts.append(layout.counts)
        return step(self, slots, layout, tokens)

    monkeypatch.setattr(kind, "step", counted)
    for _ in range(3):
        deltas = lane.step([late, other], [2, 2])
        assert [(delta.error, delta.draft_failed) for delta in deltas] == [(None, False)] * 2
    assert counts == [(3, 3, 0)] * 3
    assert late.generated == plain(made, [late.context])[0][0][: len(late.generated)]


def test_drafts_that_work_make_up_for_those_that_failed() -> None:
    """Only failures in a row end drafting; in the lane with branches, too."""
    trunk, head = made = lockstep()
    raising = _Raising(ACCEPTANCE["coupled"], set(), ValueError("x"))
    narrow = lane_of(made, 1, HostChooser(raising))
    row = begin(narrow, context(1, Sampling(temperature=0), 20, 60))
    hyper = HyperLane(trunk, "float32", RECEIPT, head)
    for lane in (narrow, hyper, narrow):
        raising._keys = {"row"}
        for _ in range(DRAFT_FAILURES - 1):
            (delta,) = narrow.step([row], [1])
            assert delta.draft_failed
        raising._keys = set()
        (delta,) = lane.step([row], [1])
        assert (delta.draft_failed, delta.drafted) == (False, 1)
    assert row.drafts


@pytest.mark.parametrize("error", [MemoryError(), RowError(""), ValueError("shapes")])
def test_an_error_without_words_still_ends_its_row(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """An empty reason would read as none at every place that looks for one."""
    lane = lane_of(lockstep(), 3)
    rows = [begin(lane, context(i, Sampling(), 9, 20), str(i)) for i in range(2)]

    def fails(*rest: Any) -> Any:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(RowSlots, "place", fails)
        seats = [delta.error for delta in lane.step(rows, [0, 0])]
    with monkeypatch.context() as patch:
        patch.setattr(RowSlots, "reserve", fails if isinstance(error, RowError) else reserve_all)
        patch.setattr(sampler, "choose", fails)
        chosen = [delta.error for delta in lane.step(rows, [0, 0])]
    words = str(error) or type(error).__name__
    assert all(words in (found or "") for found in (*seats, *chosen))


reserve_all = RowSlots.reserve


@pytest.mark.parametrize("damage", ["filler", "wipe"])
def test_lanes_that_let_nan_through_are_not_installed(
    monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    """The self-check has neighbours that are no numbers, and a slot that such a row left."""
    if damage == "wipe":
        monkeypatch.setattr(RowSlots, "wipe", lambda *rest: None)
    else:
        monkeypatch.setattr(Layout, "_filler", lambda self, packed: packed[:1])
    trunk, head = lockstep()
    with pytest.raises(LaneRefused, match="row isolation"):
        LaneChecker(trunk, 2e-3, 3, head).check("mtp-b3", 3)


@pytest.mark.parametrize("chunk", [64, 65, 200, 512, 4096])
def test_a_turn_reads_no_more_than_asked(chunk: int) -> None:
    """mlx-lm's own layers read `prefill_chunk_tokens` at once where that is less than a tile."""
    card = msgspec.structs.replace(CARD, device="gpu")
    (lane,) = install(LoadedModel(tiny_llama(), card), Wanted(Mode.SERIAL, chunk=chunk)).lanes
    assert lane.spec.arithmetic == "stock"
    assert lane.spec.prefill_tile == min(chunk, 512)
    asks = RowContext(
        tuple(i % VOCAB for i in range(300)), Sampling(temperature=0), 1, 8, frozenset()
    )
    row = lane.open("row", asks)
    lane.prefill(row, min(chunk, 512))
    assert row.read == min(chunk, 300)
    whole = ArLane(StockTrunk(tiny_llama(), VOCAB), 1, "float32", RECEIPT, ON_HOST)
    assert run(lane, [asks], at(0))[0][0] == run(whole, [asks], at(0))[0][0]
