"""Ragged rows: writing, taking back, moving between slots and lanes."""

import mlx.core as mx
import numpy as np
import pytest

from paceline.lanes.base import Row
from paceline.lanes.geometry import geometry_for
from paceline.lanes.ragged import Frame, RowSlots, StepCache
from paceline.lanes.seats import OwnSeat, Seats
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.errors import RowError

_LAYERS, _HEADS, _SIZE = 2, 2, 4


def _row(key: str, length: int) -> Row:
    """Return a row whose every key is its own number."""
    slots = RowSlots(1, _LAYERS)
    slots.reserve(length)
    for layer in range(_LAYERS):
        values = mx.arange(length * _HEADS * _SIZE, dtype=mx.float32) + hash(key) % 97 + layer
        slots.append(
            layer,
            slice(0, 1),
            0,
            values.reshape(1, _HEADS, length, _SIZE),
            -values.reshape(1, _HEADS, length, _SIZE),
        )
    slots.lengths[0] = length
    return Row(key, RowContext((1,), Sampling(), 0, 1, frozenset()), slots)


def _content(slots: RowSlots, at: int) -> list[list[float]]:
    length = slots.lengths[at]
    return [
        np.array(buffer[at, :, :length]).ravel().tolist()
        for buffers in (slots.keys, slots.values)
        for buffer in buffers
        if buffer is not None
    ]


def _seated(seats: Seats, rows: list[Row]) -> list[list[list[float]]]:
    """Seat all rows and return what is then in each one's slot."""
    places = [seats.take(row, rows) for row in rows]
    return [_content(seats.buffers(rows), place) for place in places]


def test_rows_move_through_seats_without_a_change() -> None:
    """Seating, stepping elsewhere and coming back keeps every key and value of a row."""
    wide, narrow = Seats(RowSlots(3, _LAYERS)), OwnSeat()
    rows = [_row("a", 5), _row("b", 300), _row("c", 1)]
    before = [_content(row.slots, 0) for row in rows]
    assert _seated(wide, rows) == before
    narrow.take(rows[1], rows[1:2])
    assert _content(narrow.buffers(rows[1:2]), 0) == before[1]
    assert _seated(wide, [rows[2], rows[1], rows[0]]) == [before[2], before[1], before[0]]


def test_a_full_lane_makes_room_for_a_stepping_row() -> None:
    """A row that is not stepping gives up its seat, with all it has, to one that is."""
    seats = Seats(RowSlots(3, _LAYERS))
    rows = [_row(name, 4) for name in "abcd"]
    kept = _content(rows[0].slots, 0)
    _seated(seats, rows[:3])
    _seated(seats, rows[1:])
    assert rows[0].seats is None
    assert _content(rows[0].slots, 0) == kept


def test_leaving_empties_the_slot_and_the_last_one_the_buffers() -> None:
    """When nobody is seated, the lane holds no memory."""
    slots = RowSlots(3, _LAYERS)
    seats = Seats(slots)
    rows = [_row("a", 4), _row("b", 6)]
    _seated(seats, rows)
    assert slots.nbytes > 0
    for row in rows:
        seats.leave(row)
    assert slots.nbytes == 0
    assert slots.lengths == [0, 0, 0]


def test_taking_tokens_back_is_changing_a_length() -> None:
    """What lies beyond a row's length is masked, and overwritten by what comes next."""
    slots = RowSlots(2, 1)
    slots.reserve(8)
    slots.lengths = [3, 1]
    frame = Frame(slots.lengths, 1, 4)
    cache = StepCache(slots, 0, frame)
    one = mx.ones((2, _HEADS, 1, _SIZE))
    keys, _ = cache.update_and_fetch(one, one)
    assert keys.shape == (2, _HEADS, 4, _SIZE)
    assert np.array(frame.mask)[:, 0, 0].tolist() == [
        [True, True, True, True],
        [True, True, False, False],
    ]
    written = np.array(keys)[:, 0, :, 0]
    assert written.tolist() == [[0, 0, 0, 1], [0, 1, 0, 0]]


def test_capacity_grows_and_keeps_what_is_there() -> None:
    """Growing never loses a token."""
    row = _row("a", 5)
    before = _content(row.slots, 0)
    row.slots.reserve(5000)
    assert row.slots.capacity >= 5000
    assert _content(row.slots, 0) == before


def test_no_memory_for_a_row_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """When buffers cannot grow the row gets the error and its neighbours keep all they have."""
    seats = Seats(RowSlots(3, _LAYERS))
    seated, late = _row("a", 5), _row("late", 900)
    (before,) = _seated(seats, [seated])

    def full(*arrays: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate")

    with monkeypatch.context() as patch:
        patch.setattr("paceline.lanes.ragged.mx.eval", full)
        with pytest.raises(RowError, match="no memory for"):
            seats.take(late, [seated, late])
    assert late.seats is None
    assert _seated(seats, [seated]) == [before]


def test_geometries_carry_their_rows() -> None:
    """1 row runs on B1, 2 and 3 on B3, 4 to 8 on B8, and 9 on nothing."""
    assert [geometry_for(n) for n in range(1, 9)] == [1, 3, 3, 8, 8, 8, 8, 8]
    with pytest.raises(ValueError, match="9 rows"):
        geometry_for(9)


def test_what_a_head_has_read_moves_with_its_row() -> None:
    """The head's own length goes into a slot, out of it, and into a copy."""
    row, slots = _row("a", 5), RowSlots(3, _LAYERS)
    row.slots.drafted[0] = 4
    slots.place(1, row.slots)
    assert slots.drafted == [0, 4, 0]
    assert slots.extract(1).drafted == [4]
    assert row.copy().slots.drafted == [4]


def test_a_row_that_cannot_be_computed_changes_no_neighbour(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its keys and values come to nothing before the shared buffers are written."""
    slots = RowSlots(2, _LAYERS)
    good, bad = _row("good", 5), _row("bad", 6)
    slots.place(0, good.slots)
    held = [np.array(a) for pair in zip(slots.keys, slots.values, strict=True) for a in pair]

    def fails(*arrays: object) -> None:
        raise RuntimeError("[malloc] Unable to allocate")

    with monkeypatch.context() as patch:
        patch.setattr(mx, "eval", fails)
        with pytest.raises(RuntimeError):
            slots.place(1, bad.slots)
    assert slots.lengths == [5, 0]
    now = [np.array(a) for pair in zip(slots.keys, slots.values, strict=True) for a in pair]
    assert all(np.array_equal(a, b) for a, b in zip(held, now, strict=True))
