"""The prefix bank: keys and values of prompts that were read, found again by their tokens.

A trie of whole tiles: a node holds what one tile of a prompt added to its row, and the way to it
from the root is the tokens that came before. Only what reading a prompt computed is kept, tile by
tile, so a row that takes tiles from here has the very bits it would have computed itself, and the
same tokens follow. Tokens are compared one by one; no hash stands for them.
"""

from collections import OrderedDict
from collections.abc import Sequence

import mlx.core as mx

from .base import Hidden, Row
from .ragged import RowSlots

Tile = tuple[int, ...]
Entries = list[mx.array | None]  # of each layer [1, heads, positions, size]


class _Node:
    """What one tile added: entries of the model's layers, and of a head's behind them.

    Args:
        hidden: The model's hidden state of the tile's last position, which a head has still to
            read, [1, hidden size]; None without a head.
    """

    def __init__(
        self,
        parent: "_Node | None",
        tile: Tile,
        keys: Entries,
        values: Entries,
        hidden: mx.array | None,
    ) -> None:
        self.parent = parent
        self.tile = tile
        self.keys = keys
        self.values = values
        self.hidden = hidden
        self.children: dict[Tile, _Node] = {}
        kept = (*keys, *values, hidden)
        self.nbytes = sum(array.nbytes for array in kept if array is not None)


class PrefixBank:
    """Tiles of prompts under a budget; the one unused for longest goes first.

    Args:
        limit: Bytes that may be kept; 0 keeps nothing.
        tile: Prompt tokens of one forward pass.
        layers: Layers of the model; those of a head lie behind them.
    """

    def __init__(self, limit: int, tile: int, layers: int) -> None:
        self._limit = limit
        self._tile = tile
        self._layers = layers
        self._root = _Node(None, (), [], [], None)
        self._used: OrderedDict[_Node, None] = OrderedDict()  # longest unused first
        self.nbytes = 0

    def give(self, row: Row) -> int:
        """Let a row take the tiles of its prompt that follow what it has read; return its tokens.

        The tile with the prompt's last token is never taken: its logits are asked for.

        Raises:
            RowError: When there is no memory for them; nothing has changed then.
        """
        if row.context.score_prompt or row.read % self._tile:
            return 0
        found = self._following(row)
        if not found:
            return 0
        begin, end = row.read, row.read + len(found) * self._tile
        row.slots.reserve(end)
        self._copy(found, row.slots, begin)
        row.read = row.slots.lengths[0] = end
        if found[-1].hidden is not None and row.drafts:
            row.slots.drafted[0] = end - 1
            row.unheard = [Hidden(found[-1].hidden, 0, 1)]
        for node in reversed(found):  # parents count as used after their children
            self._used.move_to_end(node)
        return end - begin

    def keep(self, row: Row) -> None:
        """Keep the tile that a row has just read, when it is a whole one and all numbers."""
        begin, end = row.read - self._tile, row.read
        if begin < 0 or row.read % self._tile or self._limit == 0:
            return
        parent = self._node_at(row.context.prompt[:begin])
        tile = row.context.prompt[begin:end]
        if parent is None or tile in parent.children:
            return
        node = self._cut(parent, tile, row, begin, end)
        if node is None:
            return
        parent.children[tile] = node
        self._used[node] = None
        self.nbytes += node.nbytes
        self._shrink()

    def _following(self, row: Row) -> list[_Node]:
        prompt, begin = row.context.prompt, row.read
        node = self._node_at(prompt[:begin])
        found: list[_Node] = []
        while node is not None and begin + self._tile < len(prompt):
            node = node.children.get(prompt[begin : begin + self._tile])
            if node is not None:
                found.append(node)
                begin += self._tile
        return found

    def _node_at(self, tokens: Tile) -> _Node | None:
        node: _Node | None = self._root
        for at in range(0, len(tokens), self._tile):
            if node is None:
                return None
            node = node.children.get(tokens[at : at + self._tile])
        return node

    def _cut(self, parent: _Node, tile: Tile, row: Row, begin: int, end: int) -> _Node | None:
        """Copy what a tile added out of a row's buffers; None when not all of it are numbers."""
        last = row.unheard[-1] if row.unheard else None
        hidden = None
        if last is not None:
            at = last.start + last.length
            hidden = mx.contiguous(last.states[at - 1 : at])
        keys, values = (
            [self._part(buffer, layer, begin, end) for layer, buffer in enumerate(buffers)]
            for buffers in (row.slots.keys, row.slots.values)
        )
        every = [array for array in (*keys, *values, hidden) if array is not None]
        # x - x is 0 for numbers and NaN for all else; two operations an array.
        finite = mx.isfinite(mx.stack([mx.sum(array - array) for array in every])).all()
        mx.eval(finite, every)
        if not finite.item():
            return None
        return _Node(parent, tile, keys, values, hidden)

    def _part(self, buffer: mx.array | None, layer: int, begin: int, end: int) -> mx.array | None:
        if buffer is None:
            return None
        first, stop = self._span(layer, begin, end)
        return mx.contiguous(buffer[:, :, first:stop])

    def _span(self, layer: int, begin: int, end: int) -> tuple[int, int]:
        """Return which positions a tile adds to a layer; a head is one position behind."""
        return (begin, end) if layer < self._layers else (max(0, begin - 1), end - 1)

    def _copy(self, found: Sequence[_Node], slots: RowSlots, begin: int) -> None:
        end = begin + len(found) * self._tile
        for layer in range(len(slots.keys)):
            keys = [node.keys[layer] for node in found]
            values = [node.values[layer] for node in found]
            first, _ = self._span(layer, begin, end)
            there = [k for k in keys if k is not None], [v for v in values if v is not None]
            if there[0]:
                slots.append(
                    layer,
                    slice(0, 1),
                    first,
                    mx.concatenate(there[0], axis=2),
                    mx.concatenate(there[1], axis=2),
                )
        mx.eval(slots.keys, slots.values)

    def _shrink(self) -> None:
        """Give up tiles that nothing stands behind, the longest unused first."""
        while self.nbytes > self._limit:
            node = next(node for node in self._used if not node.children)
            assert node.parent is not None
            del node.parent.children[node.tile]
            del self._used[node]
            self.nbytes -= node.nbytes
