"""Keys and values of rows side by side, each with its own length.

Rows are left-aligned: position p of a row lies at index p of its slot. Taking tokens back is
changing a length; what lies beyond it is masked and later overwritten. One object satisfies
mlx-lm's cache protocol a layer, so its model classes run unmodified on it.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx

from ..runtime.errors import RowError

GRAIN: Final = 256  # positions capacity grows by at least; growing copies, so it also doubles


class RowSlots:
    """Buffers [slots, heads, capacity, head size] for keys and values of every layer.

    Args:
        count: Slots side by side.
        layers: Layers of the model.

    `lengths` are host integers: the tokens of each slot that are valid.
    """

    def __init__(self, count: int, layers: int) -> None:
        self.count = count
        self.lengths = [0] * count
        self.capacity = 0
        self.keys: list[mx.array | None] = [None] * layers
        self.values: list[mx.array | None] = [None] * layers

    @property
    def nbytes(self) -> int:
        """Bytes the buffers take."""
        return sum(a.nbytes for a in (*self.keys, *self.values) if a is not None)

    def reserve(self, positions: int) -> None:
        """Make room for `positions` tokens in every slot, or change nothing.

        Raises:
            RowError: When there is no memory for it.
        """
        if positions <= self.capacity:
            return
        wanted = max(positions, min(2 * self.capacity, self.capacity + 4096))
        capacity = -(-wanted // GRAIN) * GRAIN
        keys = [None if old is None else _padded(old, capacity) for old in self.keys]
        values = [None if old is None else _padded(old, capacity) for old in self.values]
        try:
            mx.eval(keys, values)
        except RuntimeError as error:
            raise RowError(f"there is no memory for {capacity} positions: {error}") from None
        self.keys, self.values, self.capacity = keys, values, capacity

    def write(self, layer: int, keys: mx.array, values: mx.array, at: mx.array) -> None:
        """Write [slots, heads, tokens, size] at positions `at` [slots, tokens] of each slot."""
        for buffers, new in ((self.keys, keys), (self.values, values)):
            buffer = buffers[layer]
            if buffer is None:
                shape = (self.count, new.shape[1], self.capacity, new.shape[3])
                buffer = mx.zeros(shape, new.dtype)
            index = mx.broadcast_to(at[:, None, :, None], new.shape)
            buffers[layer] = mx.put_along_axis(buffer, index, new, axis=2)

    def append(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Write a run of tokens [1, heads, tokens, size] at the end of a single slot."""
        start = self.lengths[0]
        for buffers, new in ((self.keys, keys), (self.values, values)):
            buffer = buffers[layer]
            if buffer is None:
                buffer = mx.zeros((1, new.shape[1], self.capacity, new.shape[3]), new.dtype)
            buffer[:, :, start : start + new.shape[2]] = new
            buffers[layer] = buffer

    def place(self, slot: int, row: "RowSlots") -> None:
        """Copy a single row's valid tokens into a slot."""
        length = row.lengths[0]
        self.reserve(row.capacity)  # before anything changes: it may raise
        self.lengths[slot] = length
        for buffers, sources in ((self.keys, row.keys), (self.values, row.values)):
            for layer, source in enumerate(sources):
                assert source is not None, "a row is placed only after its prompt is read"
                buffer = buffers[layer]
                if buffer is None:
                    shape = (self.count, source.shape[1], self.capacity, source.shape[3])
                    buffer = mx.zeros(shape, source.dtype)
                buffer[slot : slot + 1, :, :length] = source[:, :, :length]
                buffers[layer] = buffer
        mx.eval(self.keys, self.values)

    def extract(self, slot: int) -> "RowSlots":
        """Return a copy of one slot as a row of its own."""
        row = RowSlots(1, len(self.keys))
        length = self.lengths[slot]
        row.lengths[0] = length
        row.reserve(length + 1)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            assert keys is not None
            assert values is not None
            row.keys[layer] = _padded(keys[slot : slot + 1, :, :length], row.capacity)
            row.values[layer] = _padded(values[slot : slot + 1, :, :length], row.capacity)
        mx.eval(row.keys, row.values)
        return row

    def clear(self) -> None:
        """Drop every buffer; the slots are empty."""
        self.lengths = [0] * self.count
        self.capacity = 0
        self.keys = [None] * len(self.keys)
        self.values = [None] * len(self.values)


class SlotMaker:
    """Makes the buffers of a model with so many layers."""

    def __init__(self, layers: int) -> None:
        self._layers = layers

    def new_row(self) -> RowSlots:
        """Return empty keys and values for one row."""
        return RowSlots(1, self._layers)

    def new_slots(self, count: int) -> RowSlots:
        """Return empty keys and values for `count` rows side by side."""
        return RowSlots(count, self._layers)


class StepCache:
    """One layer's view of all slots for a pass that adds `tokens` positions to each of them.

    It is what mlx-lm's attention calls a cache: `offset`, `make_mask`, `update_and_fetch`.
    """

    def __init__(self, slots: RowSlots, layer: int, frame: "Frame") -> None:
        self._slots = slots
        self._layer = layer
        self._frame = frame

    @property
    def offset(self) -> mx.array:
        """Where each slot's new tokens begin, int32 [slots]."""
        return self._frame.offset

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Return which positions each new token may see, bool [slots, 1, tokens, span]."""
        if window_size is None:
            return self._frame.mask
        seen = mx.arange(self._frame.span)[None, None, None, :]
        return self._frame.mask & (seen > self._frame.at[:, None, :, None] - window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write the new keys and values and return all up to the longest slot's end."""
        self._slots.write(self._layer, keys, values, self._frame.at)
        all_keys, all_values = self._slots.keys[self._layer], self._slots.values[self._layer]
        assert all_keys is not None
        assert all_values is not None
        span = self._frame.span
        return all_keys[:, :, :span], all_values[:, :, :span]

    @property
    def state(self) -> tuple[Any, Any]:
        """The layer's buffers, for evaluation."""
        return self._slots.keys[self._layer], self._slots.values[self._layer]


class Frame:
    """What all layers of one pass share: offsets, write positions, mask; built once a pass."""

    def __init__(self, lengths: Sequence[int], tokens: int, grain: int) -> None:
        self.span = -(-(max(lengths) + tokens) // grain) * grain
        self.offset = mx.array(list(lengths), dtype=mx.int32)
        self.at = self.offset[:, None] + mx.arange(tokens, dtype=mx.int32)
        seen = mx.arange(self.span, dtype=mx.int32)[None, None, None, :]
        self.mask = seen <= self.at[:, None, :, None]


def _padded(buffer: mx.array, capacity: int) -> mx.array:
    rows, heads, length, size = buffer.shape
    tail = mx.zeros((rows, heads, capacity - length, size), buffer.dtype)
    return mx.concatenate([buffer, tail], axis=2)
