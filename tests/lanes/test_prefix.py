"""The prefix bank: rows that take tiles from it are none the wiser, and it keeps to its budget."""

from collections.abc import Callable

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lanes.test_mtp import RECEIPT, SAMPLERS, Answer, lockstep, stock
from tests.lanes.tiny import VOCAB

from paceline.lanes.ar import ArLane
from paceline.lanes.base import Lane, Row, RowDelta, Trunk
from paceline.lanes.choosing import ON_HOST
from paceline.lanes.head import Head
from paceline.lanes.mtp import MtpLane
from paceline.lanes.prefix import PrefixBank
from paceline.lanes.reading import gathered
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.errors import RowError

TILE = 64
PLENTY = 1 << 30
Made = tuple[Trunk, Head]


@pytest.fixture(autouse=True)
def _small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's own layers read 512 tokens at once, more than these prompts have."""
    monkeypatch.setattr("paceline.lanes.stock.StockTrunk.prefill_tile", TILE)


def banked(made: Made, limit: int = PLENTY) -> tuple[Lane, PrefixBank]:
    trunk, head = made
    layers = 2
    bank = PrefixBank(limit, TILE, layers)
    return MtpLane(trunk, 1, "float32", RECEIPT, ON_HOST, head, bank), bank


def prompt_of(*parts: tuple[int, int]) -> tuple[int, ...]:
    """Return a prompt of parts, each a seed and a length; equal parts have equal tokens."""
    return tuple((seed * 131 + i * 7 + 3) % VOCAB for seed, length in parts for i in range(length))


def context(prompt: tuple[int, ...], number: int = 0, budget: int = 12) -> RowContext:
    return RowContext(prompt, SAMPLERS[number % len(SAMPLERS)], number, budget, frozenset())


def answer(lane: Lane, asked: RowContext, piece: int = 10_000) -> tuple[Answer, int]:
    """Run one row alone; return what it gained and how many of its tokens came from the bank."""
    row = lane.open("row", asked)
    gained: list[RowDelta] = []
    while row.read < len(asked.prompt):
        delta = lane.prefill(row, piece)
        gained += [delta] if delta is not None else []
    while row.left > 0:
        gained += lane.step([row], [2])
    assert all(delta.error is None for delta in gained)
    tokens = [token for delta in gained for token in delta.tokens]
    reports = [report for delta in gained for report in delta.logprobs]
    return (tokens, reports), sum(delta.cached for delta in gained)


@pytest.mark.parametrize("make", [lockstep, stock])
def test_reuse_changes_no_bit(make: Callable[[], Made]) -> None:
    """Growing, equal, branching prompts: same tokens and log probabilities, whole tiles taken."""
    made = make()
    plain = MtpLane(made[0], 1, "float32", RECEIPT, ON_HOST, made[1])
    lane, bank = banked(made)
    shared = (1, 130)
    cases = [
        (prompt_of(shared), 0),
        (prompt_of(shared), 128),
        (prompt_of(shared, (2, 70)), 128),
        (prompt_of(shared, (2, 70), (3, 60)), 192),
        (prompt_of(shared, (4, 70)), 128),
        (prompt_of((5, 64)), 0),
        (prompt_of((5, 64)), 0),  # the tile with the last token is always computed
        (prompt_of((5, 65)), 64),
        (prompt_of((6, 20)), 0),
    ]
    for number, (prompt, expected) in enumerate(cases):
        asked = context(prompt, number)
        found, cached = answer(lane, asked, (64, 10_000)[number % 2])
        assert found == answer(plain, asked)[0]
        assert cached == expected
    assert bank.nbytes > 0


@pytest.mark.parametrize("make", [lockstep, stock])
def test_a_row_from_the_bank_is_the_row_that_was_read(make: Callable[[], Made]) -> None:
    """Keys and values of every layer, the head's among them, and what it has still to read."""
    made = make()
    lane, _ = banked(made)
    asked = context(prompt_of((1, 200)))
    rows = [lane.open(str(i), asked) for i in range(2)]
    taken = [lane.prefill(row, 10_000) for row in rows]
    assert [delta.cached for delta in taken if delta is not None] == [0, 192]
    first, second = rows
    assert (first.slots.lengths, first.slots.drafted) == (second.slots.lengths, [199])
    for layer, length in enumerate((200, 200, 199)):
        for ours, theirs in (
            (first.slots.keys[layer], second.slots.keys[layer]),
            (first.slots.values[layer], second.slots.values[layer]),
        ):
            assert ours is not None
            assert theirs is not None
            assert mx.array_equal(ours[:, :, :length], theirs[:, :, :length])
    states = [gathered(row.unheard) for row in rows]
    assert states[0].shape[0] == 1
    assert mx.array_equal(states[0], states[1])


def test_rows_that_read_one_prefix_in_turns_compute_it_once() -> None:
    """Two rows side by side, a tile a turn: each takes what the other has just read."""
    lane, _ = banked(lockstep())
    prompt = prompt_of((1, 500))
    rows = [lane.open(str(i), context(prompt, i)) for i in range(2)]
    cached = 0
    while any(row.read < len(prompt) for row in rows):
        for row in rows:
            if row.read < len(prompt):
                delta = lane.prefill(row, TILE)
                cached += delta.cached if delta is not None else 0
    assert cached == 7 * TILE  # all tiles of one row but the last, which each computes


def test_scored_prompts_are_computed() -> None:
    """A row that reports its prompt's log probabilities needs every position's logits."""
    lane, _ = banked(lockstep())
    asked = context(prompt_of((1, 150)))
    answer(lane, asked)
    scoring = RowContext(
        asked.prompt, Sampling(temperature=0, logprobs=0), 0, 2, frozenset(), score_prompt=True
    )
    row = lane.open("row", scoring)
    delta = lane.prefill(row, 10_000)
    assert delta is not None
    assert delta.cached == 0
    assert len(delta.prompt_logprobs) == 150


@settings(max_examples=25)
@given(
    st.integers(0, 6),
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(60, 200)), max_size=12),
)
def test_the_budget_holds_and_what_is_given_is_right(
    tiles: int, asks: list[tuple[int, int, int]]
) -> None:
    """Whatever is asked for in whatever order, the bank stays within its bytes and exact."""
    made = lockstep()
    plain = ArLane(made[0], 1, "float32", RECEIPT, ON_HOST)
    one = 2 * 3 * 2 * TILE * 16 * 4 + 64 * 4  # keys and values, layers with the head's, heads
    lane, bank = banked(made, tiles * one)
    for first, second, length in asks:
        prompt = prompt_of((first, 70), (second, length))
        asked = context(prompt, first, 3)
        assert answer(lane, asked)[0][0] == answer(plain, asked)[0][0]
        assert bank.nbytes <= tiles * one
        assert bank.nbytes == sum(node.nbytes for node in bank._used)


def test_the_longest_unused_goes_first() -> None:
    """A prompt that was asked for again outlives one that was not; tails go before their heads."""
    made = lockstep()
    sizes, probe = [], banked(made)
    answer(probe[0], context(prompt_of((1, 200))))
    sizes.append(probe[1].nbytes)
    lane, _ = banked(made, 2 * sizes[0])
    a, b, c = (prompt_of((seed, 200)) for seed in (1, 2, 3))
    for prompt in (a, b, a, c):
        answer(lane, context(prompt))
    assert answer(lane, context(a))[1] == 192
    assert answer(lane, context(c))[1] == 192
    assert answer(lane, context(b))[1] < 192


def test_no_memory_ends_the_row_and_leaves_the_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row for which there is no room raises before anything has changed."""
    lane, bank = banked(lockstep())
    asked = context(prompt_of((1, 300)))
    answer(lane, asked)

    def full(*_: object) -> None:
        raise RowError("there is no memory for it")

    row: Row = lane.open("row", asked)
    monkeypatch.setattr(type(row.slots), "reserve", full)
    with pytest.raises(RowError):
        lane.prefill(row, TILE)
    monkeypatch.undo()
    assert row.read == 0
    assert bank.nbytes > 0
