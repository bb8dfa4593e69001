"""Keys and values of rows side by side, each with its own length.

Rows are left-aligned: position p of a row lies at index p of its slot. Taking tokens back is
changing a length; what lies beyond it is masked and later overwritten. Masking hides numbers
only: 0 x NaN is NaN. So a slot that a row leaves is wiped (`RowSlots.wipe`) beyond what the row
kept, where a refused draft may have left what is no number, and as a whole when the row failed;
and filler is zero, never another row's. One object satisfies mlx-lm's cache
protocol a layer, so its model classes run unmodified on it.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..runtime.errors import RowError

GRAIN: Final = 256  # positions capacity grows by at least; growing copies, so it also doubles


class RowSlots:
    """Buffers [slots, heads, capacity, head size] for keys and values of every layer.

    Args:
        count: Slots side by side.
        layers: Layers of the model.

    `lengths` are host integers: the tokens of each slot that are valid. An MTP head's layers lie
    behind the model's own and have lengths of their own, `drafted`, since a head is behind the
    model by the positions whose next token is not known yet.
    """

    def __init__(self, count: int, layers: int) -> None:
        self.count = count
        self.lengths = [0] * count
        self.drafted = [0] * count
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
        """Write [slots, heads, tokens, size] at positions `at` [slots, 1, tokens, 1]."""
        for buffers, new in ((self.keys, keys), (self.values, values)):
            buffer = self._buffer(buffers[layer], new)
            buffers[layer] = mx.put_along_axis(buffer, at, new, axis=2)

    def append(self, layer: int, row: slice, start: int, keys: mx.array, values: mx.array) -> None:
        """Write a run of tokens [1, heads, tokens, size] into the one slot of `row`."""
        for buffers, new in ((self.keys, keys), (self.values, values)):
            buffer = self._buffer(buffers[layer], new)
            buffer[row, :, start : start + new.shape[2]] = new
            buffers[layer] = buffer

    def held(self, layer: int) -> tuple[mx.array, mx.array]:
        """Return keys and values of a layer that something was written to."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None
        assert values is not None
        return keys, values

    def advance(self, slot: int, kept: int) -> None:
        """Keep the first `kept` of the positions the last pass wrote; the rest is forgotten."""
        self.lengths[slot] += kept

    def retract(self, slot: int) -> bool:
        """Forget all the last pass wrote for a slot, and wipe what lies beyond its length.

        Returns:
            Whether a pass from there may find other numbers than the last one did.
        """
        self.wipe(slot, self.lengths[slot])
        return True

    def wipe(self, slot: int, start: int) -> None:
        """Write zeros over a slot from a position on, in every layer."""
        for buffers in (self.keys, self.values):
            for layer, buffer in enumerate(buffers):
                if buffer is not None and start < self.capacity:
                    buffer[slot, :, start:] = 0
                    buffers[layer] = buffer

    def spoil(self) -> None:
        """Make every entry not a number, to see what comes of it (selfcheck.py)."""
        self.keys = [
            None if k is None else mx.full(k.shape, float("nan"), k.dtype) for k in self.keys
        ]
        self.values = [
            None if v is None else mx.full(v.shape, float("nan"), v.dtype) for v in self.values
        ]

    def vacate(self, slot: int, *, spoilt: bool) -> None:
        """Empty a slot and wipe what may be no number, which a mask would not hide.

        Args:
            spoilt: Whether that may be entries the row kept, too, and not only refused drafts'.
        """
        self.wipe(slot, 0 if spoilt else self.drafted[slot] or self.lengths[slot])
        self.lengths[slot] = 0
        self.drafted[slot] = 0

    def place(self, slot: int, row: "RowSlots") -> None:
        """Copy a single row's valid tokens into a slot, or change nothing.

        Raises:
            RowError: When there is no memory for them.
            RuntimeError: When the row's own keys and values cannot be computed.
        """
        length = row.lengths[0]
        self.reserve(row.capacity)
        # All that may raise is computed apart: the buffers are the neighbours', too, and are
        # written in place, since a copy of them would take the memory of all rows once more.
        mx.eval(row.keys, row.values)
        pairs = ((self.keys, row.keys), (self.values, row.values))
        fresh = [
            (buffers, layer, self._buffer(None, source))
            for buffers, sources in pairs
            for layer, source in enumerate(sources)
            if source is not None and buffers[layer] is None
        ]
        mx.eval([buffer for _, _, buffer in fresh])
        for buffers, layer, buffer in fresh:
            buffers[layer] = buffer
        for buffers, sources in pairs:
            for layer, source in enumerate(sources):
                held = buffers[layer]
                if source is not None and held is not None:  # a head may have read nothing yet
                    held[slot : slot + 1, :, :length] = source[:, :, :length]
        self.lengths[slot], self.drafted[slot] = length, row.drafted[0]
        mx.eval(self.keys, self.values)

    def copy(self) -> "RowSlots":
        """Return a copy of a single row."""
        return self.extract(0)

    def extract(self, slot: int) -> "RowSlots":
        """Return a copy of one slot as a row of its own.

        Raises:
            RowError: When there is no memory for it; nothing has changed then.
        """
        row = RowSlots(1, len(self.keys))
        length = self.lengths[slot]
        row.lengths[0] = length
        row.drafted[0] = self.drafted[slot]
        row.reserve(length + 1)
        for layer, (keys, values) in enumerate(zip(self.keys, self.values, strict=True)):
            if keys is None or values is None:
                continue
            row.keys[layer] = _padded(keys[slot : slot + 1, :, :length], row.capacity)
            row.values[layer] = _padded(values[slot : slot + 1, :, :length], row.capacity)
        try:
            mx.eval(row.keys, row.values)
        except RuntimeError as error:
            raise RowError(f"there is no memory to move {length} positions: {error}") from None
        return row

    def _buffer(self, buffer: mx.array | None, like: mx.array) -> mx.array:
        """Return a layer's buffer, an empty one where nothing was written yet."""
        if buffer is not None:
            return buffer
        return mx.zeros((self.count, like.shape[1], self.capacity, like.shape[3]), like.dtype)

    def clear(self) -> None:
        """Drop every buffer; the slots are empty."""
        self.lengths = [0] * self.count
        self.drafted = [0] * self.count
        self.capacity = 0
        self.keys = [None] * len(self.keys)
        self.values = [None] * len(self.values)


class SlotMaker:
    """Makes the buffers of a model with so many layers, and of a head behind them."""

    def __init__(self, layers: int) -> None:
        self.layers = layers
        self.head_layers = 0

    def add_head_layer(self) -> int:
        """Let rows hold one more layer, for a head; return its index."""
        self.head_layers += 1
        return self.layers + self.head_layers - 1

    def new_row(self) -> RowSlots:
        """Return empty keys and values for one row."""
        return self.new_slots(1)

    def new_slots(self, count: int) -> RowSlots:
        """Return empty keys and values for `count` rows side by side."""
        return RowSlots(count, self.layers + self.head_layers)


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
        self._slots.write(self._layer, keys, values, self._frame.write_at)
        all_keys, all_values = self._slots.held(self._layer)
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
        self.write_at = self.at[:, None, :, None]
        seen = mx.arange(self.span, dtype=mx.int32)[None, None, None, :]
        self.mask = seen <= self.at[:, None, :, None]


class Layout:
    """Which new positions of which slots a pass computes, packed one slot after another.

    Args:
        counts: New positions of each slot; 0 for a slot that takes no part.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.most = max(counts)
        ends = np.cumsum(counts)
        self.total = int(ends[-1])
        self.first = tuple(int(end) - count for end, count in zip(ends, counts, strict=True))
        # Rows as a rectangle [slots, most]: where there is nothing, a zero behind all rows stands
        # in. Another row's entries would do too, if they were sure to be numbers.
        offsets = np.arange(self.most)
        real = offsets < np.array(counts)[:, None]
        self.packed = self.total == real.size  # the rectangle is full: nothing to move
        places = np.where(real, np.array(self.first)[:, None] + offsets, self.total)
        self.from_packed = places.ravel()
        self.from_rectangle = np.flatnonzero(real)
        self._fillers: dict[tuple[tuple[int, ...], mx.Dtype], mx.array] = {}

    @property
    def last(self) -> list[int]:
        """Packed index of the last position of each slot that takes part."""
        return [
            first + count - 1 for first, count in zip(self.first, self.counts, strict=True) if count
        ]

    def spread(self, packed: mx.array) -> mx.array:
        """Turn [total, ...] into [slots, most, ...]; filler is zero."""
        if not self.packed:
            packed = mx.concatenate([packed, self._filler(packed)])[mx.array(self.from_packed)]
        return packed.reshape(len(self.counts), self.most, *packed.shape[1:])

    def pack(self, rectangle: mx.array) -> mx.array:
        """Turn [slots, most, ...] into [total, ...]."""
        flat = rectangle.reshape(-1, *rectangle.shape[2:])
        return flat if self.packed else flat[mx.array(self.from_rectangle)]

    def _filler(self, like: mx.array) -> mx.array:
        """Return one zero row; made once a pass for all layers."""
        kind = like.shape[1:], like.dtype
        if kind not in self._fillers:
            self._fillers[kind] = mx.zeros((1, *kind[0]), kind[1])
        return self._fillers[kind]


class Pass:
    """What a forward pass gives, packed as its layout says; nothing is computed until it is read.

    Args:
        hidden: After the model's last norm, [positions, hidden size]; None for a family whose
            hidden states are out of reach.
        logits: [positions, vocabulary] as the model gives them; None when nobody asked.
    """

    def __init__(
        self, slots: RowSlots, layout: Layout, hidden: mx.array | None, logits: mx.array | None
    ) -> None:
        self.layout = layout
        self.hidden = hidden
        self.logits = logits
        self._slots = slots

    def settle(self, *more: mx.array) -> None:
        """Compute everything, keys and values included, and whatever else is given."""
        mx.eval(self.hidden, self.logits, self._slots.keys, self._slots.values, *more)

    def host(self) -> NDArray[np.float32]:
        """Return the logits on the host, without a copy where memory is shared."""
        assert self.logits is not None
        out = self.logits.astype(mx.float32)
        mx.eval(out, self.hidden, self._slots.keys, self._slots.values)
        return np.array(out, copy=False)

    def finite(self, position: int) -> bool:
        """Whether the largest logit of a packed position is a number."""
        assert self.logits is not None
        return bool(mx.isfinite(mx.max(self.logits[position])).item())


def _padded(buffer: mx.array, capacity: int) -> mx.array:
    rows, heads, length, size = buffer.shape
    tail = mx.zeros((rows, heads, capacity - length, size), buffer.dtype)
    return mx.concatenate([buffer, tail], axis=2)
