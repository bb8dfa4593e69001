"""Constant-shape arithmetic: a row's bits cannot depend on its neighbours, width or padding.

A BLAS picks its kernels, and so the order of its sums, by the shape of a product. Here no
product's shape depends on who else is there: rows pass through the weights in tiles of fixed
size, and attention runs over key blocks of fixed length whose results are added in order, so
that masked padding adds exact zeros. B1, B3 and B8 then give the same bits, at any length.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from numpy.typing import NDArray

from ..runtime.errors import ModelError
from .ragged import RowSlots
from .stock import host_logits

BLOCK: Final = 64  # keys of one attention product; divides every buffer's capacity
_NEVER: Final = float("-inf")


class LockstepTrunk:
    """A Llama-family model whose layers are rebuilt for constant-shape arithmetic.

    Args:
        net: The loaded model; its attention and MLP modules are replaced in place, sharing or
            taking over their weights.
        tile: Rows that every product of a step is padded to.

    Raises:
        ModelError: When the model is not built of plain Llama layers.
    """

    arithmetic = "constant-shape"
    prefill_tile = 64

    def __init__(self, net: nn.Module, tile: int, vocab_size: int) -> None:
        why_not = unsupported(net)
        if why_not is not None:
            raise ModelError(why_not)
        self._net: Any = net
        self._layers = len(self._net.layers)
        self._angles = _inverse_frequencies(self._net.layers[0].self_attn.rope)
        self.tile = tile
        self.vocab_size = vocab_size
        for layer in self._net.layers:
            layer.self_attn = LockstepAttention(layer.self_attn)
            layer.mlp = LockstepMLP(layer.mlp)
        mx.eval(self._net.parameters())

    def new_row(self) -> RowSlots:
        """Return empty keys and values for one row."""
        return self.new_slots(1)

    def new_slots(self, count: int) -> RowSlots:
        """Return empty keys and values for `count` rows."""
        return RowSlots(count, self._layers)

    def prefill(
        self, slots: RowSlots, tokens: Sequence[int], *, want: str
    ) -> NDArray[np.float32] | None:
        """Read one tile of a single row; see `Trunk.prefill`."""
        start = slots.lengths[0]
        slots.reserve(start + len(tokens))
        frame = PrefillFrame(slots, self._table(np.arange(start, start + len(tokens))))
        hidden = self._net.model(mx.array([list(tokens)]), frame.caches())
        slots.lengths[0] += len(tokens)
        if want == "none":
            mx.eval(slots.keys, slots.values)
            return None
        picked = hidden[0] if want == "all" else hidden[0, -1:]
        return host_logits(self._head(picked)[: picked.shape[0]], slots)

    def step(self, slots: RowSlots, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run one token a slot; see `Trunk.step`."""
        rows = slots.count
        padding = -rows % self.tile
        slots.reserve(max(slots.lengths) + 1)
        table = self._table(np.array([*slots.lengths, *[0] * padding]))
        frame = StepFrame(slots, table, padding)
        inputs = mx.array([*tokens, *[0] * padding])[:, None]
        hidden = self._net.model(inputs, frame.caches())
        return host_logits(self._head(hidden[:, 0])[:rows], slots)

    def _head(self, hidden: mx.array) -> mx.array:
        """Return logits for [rows, hidden], rows padded to whole tiles."""
        padding = -hidden.shape[0] % self.tile
        if padding:
            hidden = mx.concatenate([hidden, mx.zeros((padding, hidden.shape[1]), hidden.dtype)])
        if self._net.args.tie_word_embeddings:
            logits: mx.array = self._net.model.embed_tokens.as_linear(hidden)
        else:
            logits = self._net.lm_head(hidden)
        return logits

    def _table(self, positions: NDArray[np.int64]) -> tuple[mx.array, mx.array]:
        """Return rotary cosines and signed sines [rows, 1, head size] (Su et al. 2021)."""
        angles = positions[:, None] * self._angles
        cos, sin = np.cos(angles), np.sin(angles)
        table = np.stack([np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)])
        both = mx.array(table.astype(np.float32))[:, :, None]
        return both[0], both[1]


def unsupported(net: nn.Module) -> str | None:
    """Say why a model cannot run in constant-shape arithmetic, or None when it can."""
    if type(net) is not llama.Model:
        return f"constant-shape arithmetic is built for Llama layers, not {type(net).__module__}"
    for layer in net.layers:
        attention = layer.self_attn
        if layer.use_sliding:
            return "constant-shape arithmetic has no sliding window"
        plain = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        if any(type(linear) is not nn.Linear for linear in (*plain, layer.mlp.down_proj)):
            return "constant-shape arithmetic needs unpacked weights"
        if _inverse_frequencies(attention.rope) is None:
            return f"constant-shape arithmetic does not know {type(attention.rope).__name__}"
    return None


def _inverse_frequencies(rope: Any) -> NDArray[np.float64] | None:
    if type(rope) is nn.RoPE and not rope.traditional:
        half = rope.dims // 2
        return float(rope.scale) * float(rope.base) ** (-np.arange(half) / half)
    wavelengths = getattr(rope, "_freqs", None)
    if wavelengths is not None and not getattr(rope, "traditional", False):
        return 1.0 / np.array(wavelengths.astype(mx.float32), dtype=np.float64)
    return None


class StepFrame:
    """One new token a slot: where to write, what to see, and the fixed-shape attention."""

    def __init__(
        self, slots: RowSlots, table: tuple[mx.array, mx.array], padding: int
    ) -> None:
        self.slots = slots
        self.table = table
        self.padding = padding
        self.blocks = -(-(max(slots.lengths) + 1) // BLOCK)
        lengths = np.array(slots.lengths)
        self.at = mx.array(lengths.astype(np.int32)[:, None])
        seen = np.arange(self.blocks * BLOCK).reshape(1, 1, self.blocks, 1, BLOCK)
        hidden = seen > lengths.reshape(-1, 1, 1, 1, 1)
        self.mask = mx.array(np.where(hidden, _NEVER, 0.0).astype(np.float32))

    def caches(self) -> list["FrameCache"]:
        """Return what the model hands to each layer."""
        return [FrameCache(self, layer) for layer in range(len(self.slots.keys))]

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Attend with [tile, heads, size] inputs; return [tile, heads * size].

        Scores and sums run over blocks of BLOCK keys, so no product knows the span.
        """
        rows, heads, groups = self.slots.count, queries.shape[1], keys.shape[1]
        size = keys.shape[2]
        per_group = heads // groups
        self.slots.write(layer, keys[:rows, :, None], values[:rows, :, None], self.at)
        key_blocks = self._blocks(self.slots.keys[layer])
        value_blocks = self._blocks(self.slots.values[layer])
        grouped = queries[:rows].reshape(rows, groups, 1, per_group, size)
        scores = grouped @ key_blocks.swapaxes(-1, -2) + self.mask
        flat = scores.transpose(0, 1, 3, 2, 4).reshape(rows, groups, per_group, -1)
        weights = mx.softmax(flat, axis=-1)
        weights = weights.reshape(rows, groups, per_group, self.blocks, BLOCK)
        parts = weights.transpose(0, 1, 3, 2, 4) @ value_blocks
        out = mx.sum(parts, axis=2).reshape(rows, heads * size)
        if self.padding:
            out = mx.concatenate([out, mx.zeros((self.padding, heads * size), out.dtype)])
        return out

    def _blocks(self, buffer: mx.array | None) -> mx.array:
        """View [slots, groups, capacity, size] as [slots, groups, blocks, BLOCK, size]."""
        assert buffer is not None
        rows, groups, capacity, size = buffer.shape
        return buffer.reshape(rows, groups, capacity // BLOCK, BLOCK, size)[:, :, : self.blocks]


class PrefillFrame:
    """A run of one row's own prompt tokens; its shapes depend on that prompt alone."""

    def __init__(self, slots: RowSlots, table: tuple[mx.array, mx.array]) -> None:
        self.slots = slots
        self.table = table

    def caches(self) -> list["FrameCache"]:
        """Return what the model hands to each layer."""
        return [FrameCache(self, layer) for layer in range(len(self.slots.keys))]

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Attend causally with [tokens, heads, size] inputs; return [tokens, heads * size]."""
        tokens, heads, size = queries.shape
        end = self.slots.lengths[0] + tokens
        self.slots.append(layer, keys.swapaxes(0, 1)[None], values.swapaxes(0, 1)[None])
        all_keys, all_values = self.slots.keys[layer], self.slots.values[layer]
        assert all_keys is not None
        assert all_values is not None
        out = mx.fast.scaled_dot_product_attention(
            queries.swapaxes(0, 1)[None],
            all_keys[:, :, :end],
            all_values[:, :, :end],
            scale=1.0,
            mask="causal",
        )
        return out[0].swapaxes(0, 1).reshape(tokens, heads * size)


class FrameCache:
    """One layer's handle on a frame; mlx-lm asks it for a mask, which the frame has already."""

    def __init__(self, frame: StepFrame | PrefillFrame, layer: int) -> None:
        self.frame = frame
        self.layer = layer

    def make_mask(self, tokens: int, **_: Any) -> None:
        """Return nothing: the frame masks on its own."""
        return


class LockstepAttention(nn.Module):  # type: ignore[misc]
    """Llama attention with one fused product for queries, keys and values."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        projections = (plain.q_proj, plain.k_proj, plain.v_proj)
        # The scores' scale goes into the query weights once instead of into every step.
        scales = (plain.scale, 1.0, 1.0)
        pairs = list(zip(projections, scales, strict=True))
        self.fused = mx.concatenate([p.weight * scale for p, scale in pairs])
        if "bias" in plain.q_proj:
            self.fused_bias = mx.concatenate([p.bias * scale for p, scale in pairs])
        self.o_proj = plain.o_proj
        self.n_heads = plain.n_heads
        self.n_kv_heads = plain.n_kv_heads

    def __call__(self, x: mx.array, mask: None = None, cache: Any = None) -> mx.array:
        """Attend within the cache's frame; x is [rows, tokens, hidden]."""
        frame = cache.frame
        rows = x.shape[0] * x.shape[1]
        fused = x.reshape(rows, -1) @ self.fused.T
        if "fused_bias" in self:
            fused = fused + self.fused_bias
        heads = fused.reshape(rows, self.n_heads + 2 * self.n_kv_heads, -1)
        turning = self.n_heads + self.n_kv_heads
        turned = _rotate(heads[:, :turning], *frame.table)
        out = frame.attend(
            cache.layer,
            turned[:, : self.n_heads],
            turned[:, self.n_heads :],
            heads[:, turning:],
        )
        return self.o_proj(out).reshape(x.shape)


class LockstepMLP(nn.Module):  # type: ignore[misc]
    """Llama's gated MLP with one fused product for gate and up."""

    def __init__(self, plain: Any) -> None:
        super().__init__()
        self.fused = mx.concatenate([plain.gate_proj.weight, plain.up_proj.weight])
        if "bias" in plain.gate_proj:
            self.fused_bias = mx.concatenate([plain.gate_proj.bias, plain.up_proj.bias])
        self.down_proj = plain.down_proj

    def __call__(self, x: mx.array) -> mx.array:
        """Return down(silu(gate(x)) * up(x))."""
        fused = x @ self.fused.T
        if "fused_bias" in self:
            fused = fused + self.fused_bias
        gate, up = mx.split(fused, 2, axis=-1)
        out: mx.array = self.down_proj(nn.silu(gate) * up)
        return out


def _rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Turn [rows, heads, size] by half-split rotary embedding."""
    low, high = mx.split(x, 2, axis=-1)
    return x * cos + mx.concatenate([high, low], axis=-1) * sin
