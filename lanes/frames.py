"""What all layers of one constant-shape pass share: positions, masks, and products of fixed shape.

Attention runs over key blocks of fixed length whose results are added in order, so that masked
padding adds exact zeros; its queries pass in pieces of one tile, however many positions a step has.
"""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .ragged import Layout, RowSlots
from .tiles import Tiles, tiled

BLOCK: Final = 64  # keys of one attention product; divides every buffer's capacity
_NEVER: Final = float("-inf")

# A narrow step is short enough for Python to matter: the device starts on a layer while the next
# is still being described (B3 3 to 4 % faster, B8 slower; docs/performance.md).
_EAGER_SLOTS: Final = 3

Table = tuple[mx.array, mx.array]  # rotary cosines and signed sines [positions, 1, head size]


class StepFrame:
    """A few new tokens a slot: where to write, what to see, and the fixed-shape arithmetic.

    Args:
        last_only: Go on behind the attention with each slot's last position alone; the others
            have left their keys and values, and nobody asks for more.
    """

    def __init__(
        self,
        slots: RowSlots,
        lengths: list[int],
        layout: Layout,
        table: Table,
        tiles: Tiles,
        last_only: bool = False,
    ) -> None:
        self.slots = slots
        self.table = table
        self._last = mx.array(layout.last) if last_only and layout.most > 1 else None
        self._layout = layout
        self._tiles = tiles
        self.eager = slots.count <= _EAGER_SLOTS
        self._blocks = -(-(max(lengths) + layout.most) // BLOCK)
        self._at = np.array(lengths, np.int32)[:, None] + np.arange(layout.most, dtype=np.int32)
        self._write_at = mx.array(self._at[:, None, :, None])
        self._masks: dict[int, mx.array] = {}

    def product(self, linear: nn.Linear, x: mx.array) -> mx.array:
        """Multiply [positions, width] in whole tiles."""
        return tiled(linear, x, self._tiles)

    def going_on(self, x: mx.array) -> mx.array:
        """Return the positions [positions, width] that go on behind the attention."""
        return x if self._last is None else x[self._last]

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Attend with [positions, heads, size] inputs; return [positions, heads * size].

        Scores and sums run over blocks of BLOCK keys, so no product knows the span.
        """
        spread = self._layout.spread
        slots, most = len(self._layout.counts), self._layout.most
        heads, (groups, size) = queries.shape[1], keys.shape[1:]
        self.slots.write(
            layer,
            spread(keys).swapaxes(1, 2),
            spread(values).swapaxes(1, 2),
            self._write_at,
        )
        # Queries of one slot and group are rows of one product, [slots, groups, rows, size].
        rows = most * (heads // groups)
        grouped = spread(queries).reshape(slots, most, groups, -1, size).swapaxes(1, 2)
        scores = self._in_pieces(grouped.reshape(slots, groups, rows, size))[:, :, :, None]
        scores = scores @ self._in_blocks(self.slots.keys[layer]).swapaxes(-1, -2)
        # Only real rows go through the softmax: what is not a product is slow on this device.
        flat = scores.swapaxes(3, 4).reshape(slots, groups, -1, self._blocks * BLOCK)[:, :, :rows]
        weights = self._in_pieces(mx.softmax(flat + self._mask(rows), axis=-1))
        weights = weights.reshape(*weights.shape[:-1], self._blocks, BLOCK).swapaxes(3, 4)
        parts = weights @ self._in_blocks(self.slots.values[layer])
        out = mx.sum(parts, axis=3).reshape(slots, groups, -1, size)[:, :, :rows]
        out = out.reshape(slots, groups, most, -1, size).swapaxes(1, 2)
        return self._layout.pack(out.reshape(slots, most, heads * size))

    def _in_pieces(self, x: mx.array) -> mx.array:
        """Cut [slots, groups, rows, width] into [slots, groups, pieces, tile, width]."""
        slots, groups, rows, width = x.shape
        tile = self._tiles.tile_for(self._layout.total)
        pieces, tile = (1, rows) if tile == 1 else (-(-rows // tile), tile)
        if pieces * tile > rows:
            x = mx.pad(x, [(0, 0), (0, 0), (0, pieces * tile - rows), (0, 0)])
        return x.reshape(slots, groups, pieces, tile, width)

    def _mask(self, rows: int) -> mx.array:
        """Return 0 where a query may look and -inf elsewhere, [slots, 1, rows, span]."""
        if rows not in self._masks:
            at = np.repeat(self._at, rows // self._layout.most, axis=1)[:, None, :, None]
            hidden = np.arange(self._blocks * BLOCK) > at
            self._masks[rows] = mx.array(np.where(hidden, _NEVER, 0).astype(np.float32))
        return self._masks[rows]

    def _in_blocks(self, buffer: mx.array | None) -> mx.array:
        """View [slots, groups, capacity, size] as [slots, groups, 1, blocks, BLOCK, size]."""
        assert buffer is not None
        rows, groups, capacity, size = buffer.shape
        blocks = buffer.reshape(rows, groups, 1, capacity // BLOCK, BLOCK, size)
        return blocks[:, :, :, : self._blocks]


class PrefillFrame:
    """A run of one row's own tokens; its shapes depend on that row alone."""

    eager = False

    def __init__(self, slots: RowSlots, slot: int, start: int, table: Table) -> None:
        self.slots = slots
        self.table = table
        self._start = start
        self._slot = slot

    def product(self, linear: nn.Linear, x: mx.array) -> mx.array:
        """Multiply [tokens, width] as it is."""
        out: mx.array = linear(x)
        return out

    def going_on(self, x: mx.array) -> mx.array:
        """Return everything: all of a run goes through the layer."""
        return x

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Attend causally with [tokens, heads, size] inputs; return [tokens, heads * size]."""
        tokens, heads, size = queries.shape
        end = self._start + tokens
        row = slice(self._slot, self._slot + 1)
        self.slots.append(
            layer, row, self._start, keys.swapaxes(0, 1)[None], values.swapaxes(0, 1)[None]
        )
        all_keys, all_values = self.slots.keys[layer], self.slots.values[layer]
        assert all_keys is not None
        assert all_values is not None
        out = mx.fast.scaled_dot_product_attention(
            queries.swapaxes(0, 1)[None],
            all_keys[row, :, :end],
            all_values[row, :, :end],
            scale=1.0,
            mask="causal",
        )
        return out[0].swapaxes(0, 1).reshape(tokens, heads * size)


LockstepFrame = StepFrame | PrefillFrame


class FrameCache:
    """One layer's handle on a frame; mlx-lm asks it for a mask, which the frame has already."""

    def __init__(self, frame: LockstepFrame, layer: int) -> None:
        self.frame = frame
        self.layer = layer

    def make_mask(self, tokens: int, **_: Any) -> None:
        """Return nothing: the frame masks on its own."""
        return
