"""Speculative lanes: the same tokens as plain decoding, and rows that never touch each other."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lanes.tiny import VOCAB, some_ids, tiny_head, tiny_llama

from paceline.lanes.ar import ArLane, Seated
from paceline.lanes.base import Lane, Receipt, Row, RowDelta, Trunk
from paceline.lanes.choosing import ON_HOST, Chooser, HostChooser, Span, on_host
from paceline.lanes.device import DeviceChooser
from paceline.lanes.head import Head, LockstepHead, StockHead
from paceline.lanes.install import Installed
from paceline.lanes.lockstep import LockstepTrunk, products
from paceline.lanes.mtp import Drafter, MtpLane
from paceline.lanes.penalties import Adjuster
from paceline.lanes.ragged import Layout, Pass, RowSlots
from paceline.lanes.stock import StockTrunk
from paceline.lanes.tiles import probe_tiles
from paceline.lanes.verify import ACCEPTANCE, Draft
from paceline.runtime.context import RowContext, Sampling, TokenLogprob
from paceline.runtime.errors import RowError
from paceline.runtime.text import Text

RECEIPT = Receipt((), 0.0, 0.0)
Answer = tuple[list[int], list[TokenLogprob]]


def lockstep() -> tuple[Trunk, Head]:
    """Return a tiny model and head in constant-shape arithmetic."""
    net: Any = tiny_llama()
    parts: Any = tiny_head(net)
    layers = [net.layers[0], parts.layers[0]]
    tiles = probe_tiles(
        products(layers, net.model.embed_tokens.weight, parts.fc.weight), exact_widths=True
    )
    assert tiles is not None
    trunk = LockstepTrunk(net, tiles, VOCAB)
    return trunk, LockstepHead(trunk, parts, some_ids(200))


def stock() -> tuple[Trunk, Head]:
    """Return the same through mlx-lm's own layers."""
    net = tiny_llama()
    trunk = StockTrunk(net, VOCAB)
    return trunk, StockHead(trunk, tiny_head(net), None)


def lane_of(made: tuple[Trunk, Head], geometry: int, chooser: Chooser = ON_HOST) -> MtpLane:
    return MtpLane(made[0], geometry, "float32", RECEIPT, chooser, made[1])


def at(depth: int) -> Callable[[int], int]:
    """Return a depth for every step."""
    return lambda step: depth


def context(
    number: int,
    sampling: Sampling,
    length: int = 9,
    budget: int = 24,
    ends: frozenset[int] = frozenset(),
) -> RowContext:
    prompt = tuple((number * 37 + i * 11 + 3) % VOCAB for i in range(length))
    return RowContext(prompt, sampling, 50 + number, budget, ends)


SAMPLERS = (
    Sampling(temperature=0, logprobs=1),
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, top_p=0.9, logprobs=0),
    Sampling(temperature=1.3, top_k=40, min_p=0.02),
    Sampling(temperature=1.0, frequency_penalty=0.6, presence_penalty=0.3),
    Sampling(temperature=0.9, repetition_penalty=1.3),
    Sampling(temperature=1.0, logit_bias=((7, 4.0), (11, -9.0))),
    Sampling(temperature=0),
)


def run(
    lane: Lane,
    contexts: Sequence[RowContext],
    depth: Callable[[int], int],
    joins: Sequence[int] | None = None,
    leaves: dict[int, int] | None = None,
) -> list[Answer]:
    """Run rows to their ends, up to the lane's width at once; a row that left has what it got.

    Args:
        depth: Of each step.
        joins: The step before which each row joins; all at the start otherwise.
        leaves: Rows that are cancelled, and after which step.
    """
    rows: dict[int, Row] = {}
    gained: dict[str, Answer] = {str(i): ([], []) for i in range(len(contexts))}
    waiting, step = dict(enumerate(joins or [0] * len(contexts))), 0

    def take(delta: RowDelta | None) -> None:
        assert delta is not None
        assert delta.error is None
        gained[delta.key][0].extend(delta.tokens)
        gained[delta.key][1].extend(delta.logprobs)

    while waiting or rows:
        for i, at in list(waiting.items()):
            if at <= step and len(rows) < lane.spec.geometry:
                del waiting[i]
                rows[i] = lane.open(str(i), contexts[i])
                take(lane.prefill(rows[i], 10_000))
        live = [row for row in rows.values() if row.left > 0]
        if live:
            for delta in lane.step(live, [depth(step)] * len(live)):
                take(delta)
        for i, row in list(rows.items()):
            ended = row.left <= 0 or row.generated[-1] in row.context.end_ids
            if ended or (leaves or {}).get(i, 10**9) <= step:
                lane.close(rows.pop(i))
        step += 1
    return [gained[str(i)] for i in range(len(contexts))]


def plain(made: tuple[Trunk, Head], contexts: Sequence[RowContext]) -> list[Answer]:
    """Run every row alone, without drafts, on the target-only lane."""
    lane = ArLane(made[0], 1, "float32", RECEIPT, ON_HOST)
    return [run(lane, [each], at(0))[0] for each in contexts]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lockstep, stock])
@pytest.mark.parametrize("geometry", [1, 3, 8])
def test_every_depth_gives_the_tokens_of_plain_decoding(
    make: Callable[[], tuple[Trunk, Head]], geometry: int
) -> None:
    """All samplers side by side, rows joining late: the tokens do not know the depth."""
    made = make()
    contexts = [context(i, SAMPLERS[i % 8], 2 + 7 * i) for i in range(geometry + 1)]
    expected = [tokens for tokens, _ in plain(made, contexts)]
    lane = lane_of(made, geometry)
    for depth in range(5):
        found = run(lane, contexts, at(depth), [3 * (i % 4) for i in range(len(contexts))])
        assert [tokens for tokens, _ in found] == expected
    changing = run(lane, contexts, lambda step: (3, 0, 1, 4, 0, 0, 2)[step % 7])
    assert [tokens for tokens, _ in changing] == expected


@pytest.mark.slow
def test_log_probabilities_keep_their_bits_at_every_depth_and_width() -> None:
    """In constant-shape arithmetic a verified position has the bits a decoded one has."""
    made = lockstep()
    contexts = [context(i, SAMPLERS[i % 3], 5 + 30 * i) for i in range(8)]
    expected = plain(made, contexts)
    for geometry in (1, 3, 8):
        lane = lane_of(made, geometry)
        for depth in (0, 1, 3, 4):
            assert run(lane, contexts, at(depth)) == expected


@pytest.mark.slow
@settings(max_examples=25)
@given(st.data())
def test_changing_every_neighbour_changes_nothing_of_a_row(data: st.DataObject) -> None:
    """Other prompts, seeds, samplers, lengths, joins and cancellations leave a row's bits alone."""
    made, geometry = _shared(), data.draw(st.sampled_from([3, 8]))
    acceptance = data.draw(st.sampled_from(sorted(ACCEPTANCE)))
    lane = lane_of(made, geometry, HostChooser(ACCEPTANCE[acceptance]))
    depth = data.draw(st.integers(1, 4))
    mine = context(0, data.draw(st.sampled_from(SAMPLERS)), data.draw(st.integers(1, 70)), 12)
    alone = run(lane, [mine], at(depth))[0]
    rows = st.tuples(
        st.integers(1, 90), st.sampled_from(SAMPLERS), st.integers(1, 90), st.integers(1, 20)
    )
    others = data.draw(st.lists(rows, min_size=1, max_size=geometry - 1))
    contexts = [mine, *(context(*other) for other in others)]
    joins = [0, *(data.draw(st.integers(0, 6)) for _ in others)]
    leaves = {i + 1: data.draw(st.integers(0, 8)) for i in range(len(others))}
    assert run(lane, contexts, at(depth), joins, leaves)[0] == alone


def _shared(made: list[tuple[Trunk, Head]] = []) -> tuple[Trunk, Head]:  # noqa: B006 # one for all examples
    if not made:
        made.append(lockstep())
    return made[0]


@pytest.mark.slow
@settings(max_examples=4)
@given(
    st.integers(0, 2**32), st.integers(1, 3), st.integers(0, 5), st.sampled_from([0.0, 0.8, 1.2])
)
def test_neighbours_leave_a_row_alone_on_the_real_model(
    drafting: Installed, text: Text, seed: int, depth: int, leave: int, temperature: float
) -> None:
    """The same on the starter model and its head, with neighbours that come and go."""
    lane = drafting.lanes[1]
    sampling = Sampling(temperature=temperature, top_p=0.95, logprobs=1)
    ask = tuple(text.encode_chat([{"role": "user", "content": "Name three rivers."}]))
    mine = RowContext(ask, sampling, seed, 12, frozenset())
    other = RowContext(
        ask[: 5 + seed % 20] * 2, Sampling(temperature=1.5), seed + 1, 30, frozenset()
    )
    alone = run(lane, [mine], at(depth))[0]
    beside = run(lane, [mine, other, other], at(depth), [0, 0, 2], {1: leave, 2: 9})
    assert beside[0] == alone


@pytest.mark.slow
def test_real_tokens_and_log_probabilities_are_those_of_plain_decoding(
    installed: Installed, drafting: Installed, text: Text
) -> None:
    """Starter model, real head: every width and depth, bit for bit."""
    asks = (
        "Name three rivers.",
        "Write a Python function that adds.",
        "hi",
        "What is rain?",
        "Count.",
    )
    contexts = [
        RowContext(
            tuple(text.encode_chat([{"role": "user", "content": ask}])),
            Sampling(temperature=(0.0, 0.7, 1.3)[i % 3], top_p=(1.0, 0.9)[i % 2], logprobs=1),
            i,
            12,
            frozenset(),
        )
        for i, ask in enumerate(asks)
    ]
    expected = [run(installed.lanes[0], [each], at(0))[0] for each in contexts]
    for lane, depth in zip(drafting.lanes, (4, 2, 1), strict=True):
        assert run(lane, contexts, at(depth), [0, 0, 0, 2, 4]) == expected


@pytest.mark.slow
def test_a_real_head_is_worth_drafting_with(drafting: Installed, text: Text) -> None:
    """Greedy, three drafts a step: well over one token a step, or the head is wired wrongly."""
    ask = text.encode_chat(
        [{"role": "user", "content": "Write a Python function that adds two numbers."}]
    )
    rows = [RowContext(tuple(ask), Sampling(temperature=0), 0, 60, frozenset())]
    lane = drafting.lanes[0]
    row = lane.open("r", rows[0])
    lane.prefill(row, 1000)
    steps = 0
    while row.left > 0:
        lane.step([row], [3])
        steps += 1
    lane.close(row)
    assert len(row.generated) / steps > 2


def test_a_row_ends_inside_a_step() -> None:
    """What would follow an end token or the budget is neither committed nor drafted for."""
    made = lockstep()
    hot = Sampling(temperature=1.0)
    every = plain(made, [context(1, hot, budget=40)])[0][0]
    end = next(token for i, token in enumerate(every) if i > 5 and token not in every[:i])
    lane = lane_of(made, 3)
    cases = ((frozenset({end}), 40, every.index(end) + 1), (frozenset[int](), 11, 11))
    for ends, budget, length in cases:
        cut = context(1, hot, budget=budget, ends=ends)
        beside = context(2, Sampling(temperature=1.0), budget=30)
        found = run(lane, [cut, beside], at(4))
        assert found[0][0] == every[:length]
        assert found[1] == run(lane, [beside], at(4))[0]


def test_no_more_is_drafted_than_a_row_may_still_commit() -> None:
    """A row with three tokens left gets two drafts at most, its neighbour as many as asked."""
    lane = lane_of(lockstep(), 3)
    rows = [lane.open(str(i), context(i, Sampling(), budget=b)) for i, b in enumerate((4, 30))]
    for row in rows:
        lane.prefill(row, 100)
    assert [row.left for row in rows] == [3, 29]
    assert [delta.drafted for delta in lane.step(rows, [4] * len(rows))] == [2, 4]


def test_drafts_are_the_heads_own_recursion() -> None:
    """Four drafts of a lane are those of the head run on its own output, one by one."""
    trunk, head = lockstep()
    lane = lane_of((trunk, head), 3)
    contexts = [context(i, Sampling(temperature=0), 6 + 20 * i) for i in range(2)]
    rows = [lane.open(str(i), each) for i, each in enumerate(contexts)]
    for row in rows:
        lane.prefill(row, 100)
    expected = [_recursion(trunk, head, row) for row in rows]
    seated = Seated(trunk.new_slots(3), rows, [0, 1])
    for place, row in enumerate(rows):
        seated.slots.place(place, row.slots)
    drafter = Drafter(head, ON_HOST, seated, [4, 4])
    drafter.run()
    assert [[d.token for d in drafts if d is not None] for drafts in drafter.drafts] == expected


def _recursion(trunk: Trunk, head: Head, row: Row) -> list[int]:
    """Read a prompt position by position and draft greedily behind it."""
    prompt, slots, alone = row.context.prompt, trunk.new_row(), Layout([1])
    hidden = trunk.prefill(slots, prompt, want="none").hidden
    assert hidden is not None
    for i, following in enumerate(prompt[1:]):
        head.step(slots, [i], alone, hidden[i : i + 1], mx.array([following]))
    for ours, theirs in zip(row.slots.keys, slots.keys, strict=True):
        assert ours is not None
        assert theirs is not None
        read = slice(0, len(prompt) - 1)
        assert np.allclose(np.array(ours)[:, :, read], np.array(theirs)[:, :, read], atol=1e-4)
    states, token, found = hidden[-1:], row.last_token, list[int]()
    for depth in range(4):
        at = [len(prompt) - 1 + depth]
        states = head.step(slots, at, alone, states, mx.array([token]))
        assert head.ids is not None
        token = int(head.ids[int(on_host(head.logits(states))[0].argmax())])
        found.append(token)
    return found


def test_one_row_with_a_bad_setting_fails_alone() -> None:
    """A bias beyond the vocabulary ends its row in the step; the others step on."""
    made = lockstep()
    lane = lane_of(made, 3)
    good = context(1, Sampling(temperature=0.8))
    bad = context(2, Sampling(temperature=0.8))
    expected = run(lane, [good], at(2))[0]
    rows = [lane.open(str(i), each) for i, each in enumerate((good, bad))]
    gained = []
    for row in rows:
        delta = lane.prefill(row, 100)
        assert delta is not None
        gained.append(list(delta.tokens))
    broken = Sampling(temperature=0.8, logit_bias=((VOCAB + 5, 1.0),))
    rows[1].context = RowContext(bad.prompt, broken, 1, 20, frozenset())
    rows[1].adjuster = Adjuster(broken, bad.prompt)
    first = {delta.key: delta for delta in lane.step(rows, [2] * len(rows))}
    assert "failed" in (first["1"].error or "")
    lane.close(rows[1])
    gained[0] += first["0"].tokens
    while rows[0].left > 0:
        gained[0] += lane.step(rows[:1], [2])[0].tokens
    assert gained[0] == expected[0]


@pytest.mark.slow
@pytest.mark.parametrize("geometry", [1, 3])
def test_choosing_on_the_device_gives_the_hosts_tokens(geometry: int) -> None:
    """Noise has the same bits there; rows that stay on the host mix with rows that do not."""
    made = lockstep()
    contexts = [context(i, SAMPLERS[i % 8], 5 + 9 * i) for i in range(8)]
    expected = run(lane_of(made, geometry), contexts, at(2))
    lane = lane_of(made, geometry, DeviceChooser())
    for depth in (0, 2, 4):
        found = run(lane, contexts, at(depth))
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


def test_a_long_silence_of_the_head_is_caught_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """After many steps without drafts the head has read everything once it drafts again."""
    made = lockstep()
    lane = lane_of(made, 1)
    seen: list[int] = []
    plain_read = LockstepHead.read

    def read(self: LockstepHead, slots: Any, slot: int, hidden: mx.array, tokens: Any) -> None:
        seen.append(len(tokens))
        plain_read(self, slots, slot, hidden, tokens)

    monkeypatch.setattr(LockstepHead, "read", read)
    row = lane.open("r", context(1, Sampling(temperature=0), budget=60))
    lane.prefill(row, 100)
    for _ in range(40):
        lane.step([row], [0])
    assert row.unheard_count <= 20
    lane.step([row], [2])
    assert row.slots.drafted[0] + row.unheard_count == row.slots.lengths[0]
    assert max(seen[1:]) < 20


@pytest.mark.parametrize("geometry", [1, 8])
def test_a_row_that_outgrows_the_memory_ends_alone(
    monkeypatch: pytest.MonkeyPatch, geometry: int
) -> None:
    """In the middle of an answer: that row has an error, its neighbours the tokens they had."""
    made = lockstep()
    contexts = [context(i, SAMPLERS[i], (200, 9, 30)[i], 90) for i in range(3)]
    expected = plain(made, contexts)
    lane = lane_of(made, geometry)
    rows = [lane.open(str(i), each) for i, each in enumerate(contexts)]
    for row in rows:
        lane.prefill(row, 10_000)
    reserve = RowSlots.reserve

    def small(slots: RowSlots, positions: int) -> None:
        if positions > 256:
            raise RowError("there is no memory for it")
        reserve(slots, positions)

    monkeypatch.setattr(RowSlots, "reserve", small)
    errors: dict[str, str] = {}
    live = rows
    while live:
        groups = [live] if geometry > 1 else [[row] for row in live]
        for group in groups:
            for delta in lane.step(group, [3] * len(group)):
                if delta.error is not None:
                    errors[delta.key] = delta.error
                    lane.close(rows[int(delta.key)])
        live = [row for row in live if row.key not in errors and row.left > 0]
    assert errors == {"0": "there is no memory for it"}
    assert len(rows[0].generated) > 40
    for row, (tokens, _) in zip(rows, expected, strict=True):
        assert row.generated == tokens[: len(row.generated)]
    assert [row.left for row in rows[1:]] == [0, 0]


def test_a_row_without_finite_logits_ends_alone_on_the_device_too() -> None:
    """Tokens before the bad position count; the step that begins there ends the row alone."""
    made = lockstep()
    rows = [Row(str(i), context(i, SAMPLERS[0]), made[0].new_row()) for i in range(2)]
    logits = np.random.default_rng(1).standard_normal((4, VOCAB)).astype(np.float32)
    first = int(logits[0].argmax())
    logits[1] = np.nan
    passed = Pass(made[0].new_row(), Layout([2, 2]), None, mx.array(logits))
    right = int(logits[2].argmax())
    spans = [Span(rows[0], 0, [Draft(first)]), Span(rows[1], 2, [Draft(right)])]
    half, good = DeviceChooser().verify(passed, spans, [mx.array([first, right])])
    assert (half.error, half.tokens) == (None, (first,))
    passed = Pass(made[0].new_row(), Layout([1]), None, mx.array(logits[1:2]))
    (bad,) = DeviceChooser().verify(passed, [Span(rows[0], 0, [])], [])
    assert bad.error is not None
    assert "no finite logit" in bad.error
    assert good.error is None
    assert good.tokens == (right, int(logits[3].argmax()))
