"""Running an MTP head: reading what the model has committed, and drafting from there.

A head keeps one entry of keys and values for each position whose next token is known, made from
the model's own hidden states, in a layer behind the model's in the same row (ragged.py). Entries
made while drafting lie behind `drafted` and are written over by the next read.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import mlx.core as mx
import numpy as np

from ..runtime.exits import Ids
from .base import Trunk
from .fork import Fork
from .frames import FrameCache, LockstepFrame
from .halves import Halves
from .heads.qwen3_next import HeadParts
from .lockstep import LockstepBlock, LockstepTrunk, fork_frame, prefill_frame, step_frame
from .ragged import Frame, Layout, RowSlots, StepCache
from .rotation import Rotation
from .stock import SPAN_GRAIN, fork_caches
from .tiles import tiled
from .tree import Reach

LONG: Final = 16  # positions to read from which a row is read alone, as a prompt is


class Head(Protocol):
    """A head on one model."""

    ids: Ids | None  # the tokens it drafts, ascending; None for the whole vocabulary

    def read(self, slots: RowSlots, slot: int, hidden: mx.array, tokens: Sequence[int]) -> None:
        """Read positions of a single row, of which no draft is wanted.

        Args:
            hidden: The model's hidden states of the positions, [positions, hidden size].
            tokens: The token after each of them.
        """
        ...

    def step(
        self,
        slots: RowSlots,
        lengths: Sequence[int],
        layout: Layout,
        hidden: mx.array,
        tokens: mx.array,
    ) -> mx.array:
        """Run a few positions a slot behind `lengths`; return each slot's last hidden state.

        Args:
            hidden: Packed as the layout says, [positions, hidden size].
            tokens: The token after each position, [positions].

        Returns:
            The head's own hidden states, [slots that take part, hidden size].
        """
        ...

    def branch(self, fork: Fork, reach: Reach, hidden: mx.array, tokens: mx.array) -> mx.array:
        """Run drafts of a tree, new ones behind those the fork has already.

        Args:
            hidden: The head's hidden states each was drafted from, [drafts, hidden size].
            tokens: The drafts, [drafts].

        Returns:
            The head's hidden states of the drafts, [drafts, hidden size].
        """
        ...

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the drafts' logits [positions, tokens] of the head's hidden states."""
        ...


class _Drafting:
    """What heads of both kinds of arithmetic share: embedding, joint and output rows."""

    def __init__(self, trunk: Trunk, parts: HeadParts, draft_ids: Ids | None) -> None:
        halves = trunk.halves
        assert halves is not None, "a head is built only for families whose halves are known"
        self.halves: Halves = halves
        self.parts = parts
        self.layer = trunk.add_head_layer()
        self.ids = None if draft_ids is None else np.sort(draft_ids)
        self._rows: mx.array | None = None
        if self.ids is not None:
            self._rows = mx.contiguous(halves.output_rows(mx.array(self.ids)))
            mx.eval(self._rows)

    def output(self, hidden: mx.array) -> mx.array:
        """Multiply with the output rows of the drafted tokens."""
        return self.halves.output(hidden) if self._rows is None else hidden @ self._rows.T

    def joint(self, hidden: mx.array, tokens: mx.array) -> mx.array:
        """Return what the head's first product takes."""
        return self.parts.joint(self.halves.embed(tokens), hidden)


class LockstepHead(_Drafting):
    """A head of one Llama layer in constant-shape arithmetic."""

    def __init__(self, trunk: LockstepTrunk, parts: HeadParts, draft_ids: Ids | None) -> None:
        super().__init__(trunk, parts, draft_ids)
        self._tiles = trunk.tiles
        layer: Any = parts.layers[0]
        self._turns = Rotation(layer.self_attn.rope)
        self._block = LockstepBlock(layer)
        mx.eval(self._block.parameters())

    def read(self, slots: RowSlots, slot: int, hidden: mx.array, tokens: Sequence[int]) -> None:
        """See `Head.read`."""
        frame = prefill_frame(slots, slot, slots.drafted[slot], len(tokens), self._turns)
        self._run(frame, hidden, mx.array(list(tokens)))
        slots.drafted[slot] += len(tokens)

    def step(
        self,
        slots: RowSlots,
        lengths: Sequence[int],
        layout: Layout,
        hidden: mx.array,
        tokens: mx.array,
    ) -> mx.array:
        """See `Head.step`."""
        frame = step_frame(slots, lengths, layout, self._turns, self._tiles, last_only=True)
        return self._run(frame, hidden, tokens)

    def branch(self, fork: Fork, reach: Reach, hidden: mx.array, tokens: mx.array) -> mx.array:
        """See `Head.branch`."""
        return self._run(fork_frame(fork, reach, self._turns, self._tiles), hidden, tokens)

    def logits(self, hidden: mx.array) -> mx.array:
        """See `Head.logits`."""
        return tiled(self.output, hidden, self._tiles)

    def _run(self, frame: LockstepFrame, hidden: mx.array, tokens: mx.array) -> mx.array:
        x = frame.product(self.parts.fc, self.joint(hidden, tokens))
        out: mx.array = self.parts.norm(self._block(x, None, FrameCache(frame, self.layer)))
        return out


class StockHead(_Drafting):
    """A head through mlx-lm's own layer."""

    def read(self, slots: RowSlots, slot: int, hidden: mx.array, tokens: Sequence[int]) -> None:
        """See `Head.read`."""
        counts = [0] * slots.count
        counts[slot] = len(tokens)
        self.step(slots, slots.drafted, Layout(counts), hidden, mx.array(list(tokens)))
        slots.drafted[slot] += len(tokens)

    def step(
        self,
        slots: RowSlots,
        lengths: Sequence[int],
        layout: Layout,
        hidden: mx.array,
        tokens: mx.array,
    ) -> mx.array:
        """See `Head.step`."""
        slots.reserve(max(lengths) + layout.most)
        frame = Frame(lengths, layout.most, SPAN_GRAIN)
        x = layout.spread(self.parts.fc(self.joint(hidden, tokens)))
        layer: Any = self.parts.layers[0]
        out: mx.array = layer(x, frame.mask, StepCache(slots, self.layer, frame))
        packed = layout.pack(out)
        if layout.most > 1:
            packed = packed[mx.array(layout.last)]
        normed: mx.array = self.parts.norm(packed)
        return normed

    def branch(self, fork: Fork, reach: Reach, hidden: mx.array, tokens: mx.array) -> mx.array:
        """See `Head.branch`."""
        (cache,) = fork_caches(fork, reach, [self.layer])
        x = self.parts.fc(self.joint(hidden, tokens))[:, None]
        layer: Any = self.parts.layers[0]
        normed: mx.array = self.parts.norm(layer(x, cache.make_mask(1), cache)[:, 0])
        return normed

    def logits(self, hidden: mx.array) -> mx.array:
        """See `Head.logits`."""
        return self.output(hidden)
