"""Keys and values of one row's branches, beside the row until one branch is kept.

The row's own buffers hold what all branches share, once. A node of the tree is one position that
sees the row and the nodes on its own way, each at the place it would have were its branch the
only one; so every node has the very logits that plain decoding gives along its branch.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from .ragged import RowSlots
from .tree import Reach


class Fork:
    """The branches of a single row.

    Args:
        slots: The row's own buffers, which have one slot.
        start: Position of the first node.
    """

    def __init__(self, slots: RowSlots, start: int) -> None:
        self.slots = slots
        self.start = start
        self._new: dict[int, tuple[mx.array, mx.array]] = {}

    def add(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add nodes [nodes, heads, size] to a layer and return all that it has."""
        if layer in self._new:
            old_keys, old_values = self._new[layer]
            keys, values = mx.concatenate([old_keys, keys]), mx.concatenate([old_values, values])
        self._new[layer] = keys, values
        return keys, values

    def keep(self, path: Sequence[int]) -> None:
        """Write the nodes of one branch behind the row, from its start on; drop all others."""
        at = mx.array(list(path))
        for layer, (keys, values) in self._new.items():
            self.slots.append(
                layer,
                slice(0, 1),
                self.start,
                keys[at].swapaxes(0, 1)[None],
                values[at].swapaxes(0, 1)[None],
            )

    def in_place(self, layer: int, first: int, last: int, paths: mx.array) -> list[mx.array]:
        """Return keys and values of positions `first` to `last` as each node sees them.

        Args:
            paths: Of each node the nodes on its way (`Reach.paths`).

        Returns:
            Two arrays [nodes, heads, last - first, size]; behind a node's own position is filling.
        """
        nodes, most = paths.shape
        before = self.start - first
        out = []
        for buffer, new in zip(self.slots.held(layer), self._new[layer], strict=True):
            whole = mx.broadcast_to(
                buffer[:, :, first:last], (nodes, buffer.shape[1], last - first, buffer.shape[3])
            )
            own = new[paths].swapaxes(1, 2)
            parts = [whole[:, :, :before], own, whole[:, :, before + most :]]
            out.append(mx.concatenate(parts, axis=2))
        return out


class ForkCache:
    """One layer's view of a fork for mlx-lm's own attention: every node is a row of one position.

    Args:
        span: Positions of the row that are looked at, no fewer than come before the fork.
    """

    def __init__(self, fork: Fork, layer: int, reach: Reach, span: int) -> None:
        self._fork = fork
        self._layer = layer
        self._depths = reach.depths
        self._paths = mx.array(reach.paths)
        self._span = span

    @property
    def offset(self) -> mx.array:
        """Each node's position, int32 [nodes]."""
        return mx.array((self._fork.start + self._depths).astype(np.int32))

    def make_mask(
        self, tokens: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        """Return what each node may see, bool [nodes, 1, 1, span]."""
        at = self._fork.start + self._depths[:, None]
        seen = np.arange(self._span)[None]
        mask = seen <= at
        if window_size is not None:
            mask &= seen > at - window_size
        return mx.array(mask[:, None, None])

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Add the nodes and return what each of them sees, [nodes, heads, span, size]."""
        self._fork.add(self._layer, keys[:, :, 0], values[:, :, 0])
        seen = self._fork.in_place(self._layer, 0, self._span, self._paths)
        return seen[0], seen[1]

    @property
    def state(self) -> tuple[Any, Any]:
        """Nothing that lasts."""
        return (), ()
