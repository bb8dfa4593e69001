"""Constant-shape arithmetic: a row's bits cannot depend on its neighbours, width or padding.

No product's shape depends on who else is there (tiles.py, frames.py), so B1, B3 and B8, one
position or several, give the same bits at any length.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from ..runtime.errors import ModelError
from .fork import Fork
from .frames import ForkFrame, FrameCache, LockstepFrame, PrefillFrame, StepFrame
from .halves import Halves
from .known import unsupported
from .ragged import Layout, Pass, RowSlots, SlotMaker
from .rotation import Rotation, rotate
from .tiles import Tiles, tiled
from .tree import Reach


class LockstepTrunk(SlotMaker):
    """A Llama-family model whose layers are rebuilt for constant-shape arithmetic.

    Args:
        net: The loaded model; its layers are replaced in place by ones that take over their
            weights.
        tiles: The shapes products run in.

    Raises:
        ModelError: When the model is not built of plain Llama layers.
    """

    arithmetic = "constant-shape"
    prefill_tile = 64

    def __init__(self, net: nn.Module, tiles: Tiles, vocab_size: int) -> None:
        why_not = unsupported(net)
        if why_not is not None:
            raise ModelError(why_not)
        self._net: Any = net
        self.halves = Halves(net)
        super().__init__(len(self._net.layers))
        self._turns = Rotation(self._net.layers[0].self_attn.rope)
        self.tiles = tiles
        self.vocab_size = vocab_size
        self._net.model.layers = [LockstepBlock(layer) for layer in self._net.layers]
        mx.eval(self._net.parameters())

    def tile_for(self, rows: int) -> int:
        """Return the rows that products of a step of `rows` rows are padded to."""
        return self.tiles.tile_for(rows)

    def prefill(self, slots: RowSlots, tokens: Sequence[int], *, want: str) -> Pass:
        """Read one tile of a single row; see `Trunk.prefill`."""
        frame = prefill_frame(slots, 0, slots.lengths[0], len(tokens), self._turns)
        layout = Layout([len(tokens)])
        hidden = self._run(mx.array(list(tokens)), frame)
        slots.lengths[0] += len(tokens)
        if want == "none":
            return Pass(slots, layout, hidden, None)
        picked = hidden if want == "all" else hidden[-1:]
        return Pass(slots, layout, hidden, self._logits(picked))

    def step(self, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        """Run a few tokens a slot; see `Trunk.step`."""
        hidden = self._run(
            tokens, step_frame(slots, slots.lengths, layout, self._turns, self.tiles)
        )
        return Pass(slots, layout, hidden, self._logits(hidden))

    def branch(self, fork: Fork, reach: Reach, tokens: mx.array) -> Pass:
        """Run the nodes of a tree; see `Trunk.branch`."""
        hidden = self._run(tokens, fork_frame(fork, reach, self._turns, self.tiles))
        return Pass(fork.slots, Layout([len(reach.depths)]), hidden, self._logits(hidden))

    def _run(self, tokens: mx.array, frame: LockstepFrame) -> mx.array:
        caches = [FrameCache(frame, layer) for layer in range(self.layers)]
        return self.halves.body(tokens[:, None], caches)[:, 0]

    def _logits(self, hidden: mx.array) -> mx.array:
        """Return logits for [positions, hidden]."""
        return tiled(self.halves.output, hidden, self.tiles)


def step_frame(
    slots: RowSlots,
    lengths: Sequence[int],
    layout: Layout,
    turns: Rotation,
    tiles: Tiles,
    last_only: bool = False,
) -> StepFrame:
    """Make room for a pass's new positions and return its frame; see `StepFrame`.

    Raises:
        RowError: When there is no memory for it.
    """
    slots.reserve(max(lengths) + layout.most)
    positions = np.concatenate(
        [np.arange(start, start + n) for start, n in zip(lengths, layout.counts, strict=True)]
    )
    table = turns.table(positions)
    return StepFrame(slots, list(lengths), layout, table, tiles, last_only)


def prefill_frame(
    slots: RowSlots, slot: int, start: int, count: int, turns: Rotation
) -> PrefillFrame:
    """Make room for a run of one slot's new positions and return its frame.

    Raises:
        RowError: When there is no memory for it.
    """
    slots.reserve(start + count)
    return PrefillFrame(slots, slot, start, turns.table(np.arange(start, start + count)))


def fork_frame(fork: Fork, reach: Reach, turns: Rotation, tiles: Tiles) -> ForkFrame:
    """Make room behind a row for the longest of some branches and return their frame.

    Raises:
        RowError: When there is no memory for it.
    """
    fork.slots.reserve(fork.start + reach.paths.shape[1])
    return ForkFrame(fork, reach, turns.table(fork.start + reach.depths), tiles)


def products(layers: Sequence[Any], *others: mx.array) -> list[mx.array]:
    """Return the matrices that rows are multiplied with, one a shape.

    Args:
        layers: Plain Llama layers, each standing for those of its kind.
        others: Matrices outside the layers.
    """
    found = {other.shape: other for other in others}
    for layer in layers:
        block = LockstepBlock(layer)
        for linear in (block.qkv, block.o_proj, block.gate_up, block.down_proj):
            found[linear.weight.shape] = linear.weight
    return list(found.values())


class LockstepBlock(nn.Module):
    """One Llama layer: fused products, each padded to whole tiles; all else on real rows only."""

    use_sliding = False  # mlx-lm's model asks every layer

    def __init__(self, plain: Any) -> None:
        super().__init__()
        attention, mlp = plain.self_attn, plain.mlp
        self.input_layernorm = plain.input_layernorm
        self.post_attention_layernorm = plain.post_attention_layernorm
        # The scores' scale goes into the query weights once instead of into every step.
        self.qkv = _fused(
            (attention.q_proj, attention.k_proj, attention.v_proj), (attention.scale, 1.0, 1.0)
        )
        self.o_proj = attention.o_proj
        self.gate_up = _fused((mlp.gate_proj, mlp.up_proj), (1.0, 1.0))
        self.down_proj = mlp.down_proj
        self.n_heads = attention.n_heads
        self.n_kv_heads = attention.n_kv_heads

    def __call__(self, x: mx.array, mask: None = None, cache: Any = None) -> mx.array:
        """Run the layer within the cache's frame; x is [rows, tokens, hidden]."""
        frame: LockstepFrame = cache.frame
        if frame.eager:
            mx.async_eval(x)
        h = x.reshape(-1, x.shape[-1])
        attended = self._attend(self.input_layernorm(h), frame, cache.layer)
        h = frame.going_on(h) + attended
        fused = frame.product(self.gate_up, self.post_attention_layernorm(h))
        gate, up = mx.split(fused, 2, axis=-1)
        h = h + frame.product(self.down_proj, nn.silu(gate) * up)
        return h.reshape(-1, *x.shape[1:])

    def _attend(self, h: mx.array, frame: LockstepFrame, layer: int) -> mx.array:
        heads = frame.product(self.qkv, h).reshape(
            h.shape[0], self.n_heads + 2 * self.n_kv_heads, -1
        )
        turning = self.n_heads + self.n_kv_heads
        turned = rotate(heads[:, :turning], *frame.table)
        out = frame.attend(
            layer, turned[:, : self.n_heads], turned[:, self.n_heads :], heads[:, turning:]
        )
        return frame.product(self.o_proj, frame.going_on(out))


def _fused(linears: Sequence[Any], scales: Sequence[float]) -> nn.Linear:
    """Stack linears of one input into one, each times its scale."""
    pairs = list(zip(linears, scales, strict=True))
    fused = nn.Linear(1, 1, bias="bias" in linears[0])
    fused.weight = mx.concatenate([linear.weight * scale for linear, scale in pairs])
    if "bias" in linears[0]:
        fused.bias = mx.concatenate([linear.bias * scale for linear, scale in pairs])
    return fused
