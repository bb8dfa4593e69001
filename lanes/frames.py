"""What all layers of one constant-shape pass share: positions, masks, and products of fixed shape.

Attention runs over key blocks of fixed length whose results are added in order, so that masked
padding adds exact zeros; its queries pass in pieces of one tile, however many positions a step has.
"""

from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from .fork import Fork
from .ragged import Layout, RowSlots
from .tiles import Tiles, tiled
from .tree import Reach

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
        tile = self._tiles.tile_for(self._layout.total)
        blocks = self._in_blocks(self.slots.keys[layer])
        # Only real rows go through the softmax: what is not a product is slow on this device.
        flat = _scores(grouped.reshape(slots, groups, rows, size), blocks, tile)
        weights = mx.softmax(flat + self._mask(rows), axis=-1)
        parts = _sums(weights, self._in_blocks(self.slots.values[layer]), tile)
        out = mx.sum(parts, axis=3).reshape(slots, groups, -1, size)[:, :, :rows]
        out = out.reshape(slots, groups, most, -1, size).swapaxes(1, 2)
        return self._layout.pack(out.reshape(slots, most, heads * size))

    def _mask(self, rows: int) -> mx.array:
        """Return 0 where a query may look and -inf elsewhere, [slots, 1, rows, span]."""
        if rows not in self._masks:
            at = np.repeat(self._at, rows // self._layout.most, axis=1)[:, None, :, None]
            hidden = np.arange(self._blocks * BLOCK) > at
            self._masks[rows] = mx.array(np.where(hidden, _NEVER, 0).astype(np.float32))
        return self._masks[rows]

    def _in_blocks(self, buffer: mx.array | None) -> mx.array:
        return _in_blocks(buffer)[:, :, :, : self._blocks]


class ForkFrame:
    """Nodes of a tree behind one row: what they share is attended to once, each tail by itself.

    The blocks of keys that lie whole before the fork are multiplied with the queries of all
    nodes. The rest, up to two blocks, is put together for each node as it would be if its branch
    were the row; so every product has the operands that a step has, and its bits.
    """

    eager = True

    def __init__(self, fork: Fork, reach: Reach, table: Table, tiles: Tiles) -> None:
        self.table = table
        self._fork = fork
        self._tiles = tiles
        nodes, most = reach.paths.shape
        self._tile = tiles.tile_for(nodes)
        self._paths = mx.array(reach.paths)
        self._shared = fork.start // BLOCK
        self._first = self._shared * BLOCK
        self._last = -(-(fork.start + most) // BLOCK) * BLOCK
        self._at = fork.start + reach.depths
        self._masks: dict[int, mx.array] = {}

    def product(self, linear: nn.Linear, x: mx.array) -> mx.array:
        """Multiply [nodes, width] in whole tiles."""
        return tiled(linear, x, self._tiles)

    def going_on(self, x: mx.array) -> mx.array:
        """Return everything: every node is asked for."""
        return x

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Attend with [nodes, heads, size] inputs; return [nodes, heads * size]."""
        nodes, heads, size = queries.shape
        groups = keys.shape[1]
        each = heads // groups  # queries of one node and group
        self._fork.add(layer, keys, values)
        own_keys, own_values = self._fork.in_place(layer, self._first, self._last, self._paths)
        grouped = queries.reshape(nodes, groups, each, size)
        own = _scores(grouped, _in_blocks(own_keys), self._tile).swapaxes(0, 1)
        scores = [own.reshape(1, groups, nodes * each, -1)]
        if self._shared:
            together = grouped.swapaxes(0, 1).reshape(1, groups, nodes * each, size)
            blocks = self._shared_blocks(self._fork.slots.keys[layer])
            scores.insert(0, _scores(together, blocks, self._tile))
        weights = mx.softmax(mx.concatenate(scores, axis=-1) + self._mask(each), axis=-1)
        own = weights[..., self._first :].reshape(groups, nodes, each, -1).swapaxes(0, 1)
        own = _sums(own, _in_blocks(own_values), self._tile).swapaxes(3, 4)
        own = own.reshape(nodes, groups, -1, *own.shape[4:])[:, :, :each].swapaxes(0, 1)
        parts = [own.reshape(groups, nodes * each, *own.shape[3:])]
        if self._shared:
            blocks = self._shared_blocks(self._fork.slots.values[layer])
            of_all = _sums(weights[..., : self._first], blocks, self._tile).swapaxes(3, 4)
            of_all = of_all.reshape(groups, -1, *of_all.shape[4:])
            parts.insert(0, of_all[:, : nodes * each])
        out = mx.sum(mx.concatenate(parts, axis=2), axis=2)  # block by block, in order
        return out.reshape(groups, nodes, each * size).swapaxes(0, 1).reshape(nodes, heads * size)

    def _shared_blocks(self, buffer: mx.array | None) -> mx.array:
        return _in_blocks(buffer)[:, :, :, : self._shared]

    def _mask(self, each: int) -> mx.array:
        """Return 0 where a query may look and -inf elsewhere, [1, 1, queries, span]."""
        if each not in self._masks:
            hidden = np.arange(self._last) > np.repeat(self._at, each)[:, None]
            self._masks[each] = mx.array(np.where(hidden, _NEVER, 0).astype(np.float32))[None, None]
        return self._masks[each]


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
        all_keys, all_values = self.slots.held(layer)
        out = mx.fast.scaled_dot_product_attention(
            queries.swapaxes(0, 1)[None],
            all_keys[row, :, :end],
            all_values[row, :, :end],
            scale=1.0,
            mask="causal",
        )
        return out[0].swapaxes(0, 1).reshape(tokens, heads * size)


LockstepFrame = StepFrame | PrefillFrame | ForkFrame


class FrameCache:
    """One layer's handle on a frame; mlx-lm asks it for a mask, which the frame has already."""

    def __init__(self, frame: LockstepFrame, layer: int) -> None:
        self.frame = frame
        self.layer = layer

    def make_mask(self, tokens: int, **_: Any) -> None:
        """Return nothing: the frame masks on its own."""
        return


def _in_pieces(x: mx.array, tile: int) -> mx.array:
    """Cut [slots, groups, rows, width] into [slots, groups, pieces, tile, width]."""
    slots, groups, rows, width = x.shape
    pieces, tile = (1, rows) if tile == 1 else (-(-rows // tile), tile)
    if pieces * tile > rows:
        x = mx.pad(x, [(0, 0), (0, 0), (0, pieces * tile - rows), (0, 0)])
    return x.reshape(slots, groups, pieces, tile, width)


def _in_blocks(buffer: mx.array | None) -> mx.array:
    """View [slots, groups, capacity, size] as [slots, groups, 1, blocks, BLOCK, size]."""
    assert buffer is not None
    rows, groups, capacity, size = buffer.shape
    return buffer.reshape(rows, groups, 1, capacity // BLOCK, BLOCK, size)


def _scores(queries: mx.array, blocks: mx.array, tile: int) -> mx.array:
    """Multiply [slots, groups, rows, size] with blocks of keys; return [..., rows, span]."""
    slots, groups, rows, _ = queries.shape
    scores = _in_pieces(queries, tile)[:, :, :, None] @ blocks.swapaxes(-1, -2)
    return scores.swapaxes(3, 4).reshape(slots, groups, -1, blocks.shape[3] * BLOCK)[:, :, :rows]


def _sums(weights: mx.array, blocks: mx.array, tile: int) -> mx.array:
    """Multiply [slots, groups, rows, span] with blocks of values.

    Returns:
        The sum over each block by itself, [slots, groups, pieces, blocks, tile, size].
    """
    pieces = _in_pieces(weights, tile)
    pieces = pieces.reshape(*pieces.shape[:-1], blocks.shape[3], BLOCK).swapaxes(3, 4)
    return pieces @ blocks
