"""Constant-shape arithmetic: a row's bits cannot depend on its neighbours, width or padding.

A BLAS picks its kernels, and so the order of its sums, by the shape of a product. Here no
product's shape depends on who else is there: rows pass through the weights in tiles of fixed
size, and attention runs over key blocks of fixed length whose results are added in order, so
that masked padding adds exact zeros. B1, B3 and B8 then give the same bits, at any length.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import llama
from numpy.typing import NDArray

from ..runtime.errors import ModelError
from .ragged import RowSlots, SlotMaker
from .stock import host_logits

BLOCK: Final = 64  # keys of one attention product; divides every buffer's capacity
_NEVER: Final = float("-inf")


class LockstepTrunk(SlotMaker):
    """A Llama-family model whose layers are rebuilt for constant-shape arithmetic.

    Args:
        net: The loaded model; its layers are replaced in place by ones that take over their
            weights.
        tile: Rows that every product of a step is padded to.
        lone_tile: The same for a row that steps alone; with another tile than the others its
            bits differ from theirs by rounding.

    Raises:
        ModelError: When the model is not built of plain Llama layers.
    """

    arithmetic = "constant-shape"
    prefill_tile = 64

    def __init__(self, net: nn.Module, tile: int, lone_tile: int, vocab_size: int) -> None:
        why_not = unsupported(net)
        if why_not is not None:
            raise ModelError(why_not)
        self._net: Any = net
        super().__init__(len(self._net.layers))
        angles = _inverse_frequencies(self._net.layers[0].self_attn.rope)
        assert angles is not None, "unsupported() looks at every layer's rope"
        self._angles = angles
        self._tile = tile
        self._lone_tile = lone_tile
        self.vocab_size = vocab_size
        self._net.model.layers = [LockstepBlock(layer) for layer in self._net.layers]
        mx.eval(self._net.parameters())

    def tile_for(self, rows: int) -> int:
        """Return the rows that products of a step of `rows` rows are padded to."""
        return self._lone_tile if rows == 1 else self._tile

    def prefill(
        self, slots: RowSlots, tokens: Sequence[int], *, want: str
    ) -> NDArray[np.float32] | None:
        """Read one tile of a single row; see `Trunk.prefill`."""
        start = slots.lengths[0]
        slots.reserve(start + len(tokens))
        frame = PrefillFrame(slots, self._table(np.arange(start, start + len(tokens))))
        hidden = self._net.model(mx.array([list(tokens)]), layer_caches(frame))
        slots.lengths[0] += len(tokens)
        if want == "none":
            mx.eval(slots.keys, slots.values)
            return None
        picked = hidden[0] if want == "all" else hidden[0, -1:]
        return host_logits(self._head(picked), slots)

    def step(self, slots: RowSlots, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run one token a slot; see `Trunk.step`."""
        slots.reserve(max(slots.lengths) + 1)
        tile = self.tile_for(slots.count)
        frame = StepFrame(slots, self._table(np.array(slots.lengths)), tile)
        hidden = self._net.model(mx.array(list(tokens))[:, None], layer_caches(frame))
        return host_logits(self._head(hidden[:, 0]), slots)

    def _head(self, hidden: mx.array) -> mx.array:
        """Return logits for [rows, hidden]."""
        tied = self._net.args.tie_word_embeddings
        head = self._net.model.embed_tokens.as_linear if tied else self._net.lm_head
        return tiled(head, hidden, -hidden.shape[0] % self.tile_for(hidden.shape[0]))

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
    """One new token a slot: where to write, what to see, and the fixed-shape arithmetic."""

    def __init__(self, slots: RowSlots, table: tuple[mx.array, mx.array], tile: int) -> None:
        self.slots = slots
        self.table = table
        self._padding = -slots.count % tile
        # A narrow step is short enough for Python to matter: the device starts on a layer while
        # the next is still being described (B3 3 to 4 % faster, B8 slower; docs/performance.md).
        self.eager = self._padding > 0
        self.blocks = -(-(max(slots.lengths) + 1) // BLOCK)
        lengths = np.array(slots.lengths)
        self.at = mx.array(lengths.astype(np.int32)[:, None])
        seen = np.arange(self.blocks * BLOCK).reshape(1, 1, self.blocks, 1, BLOCK)
        hidden = seen > lengths.reshape(-1, 1, 1, 1, 1)
        self.mask = mx.array(np.where(hidden, _NEVER, 0.0).astype(np.float32))

    def product(self, linear: nn.Linear, x: mx.array) -> mx.array:
        """Multiply [rows, width], padded to whole tiles; return the real rows."""
        return tiled(linear, x, self._padding)

    def attend(self, layer: int, queries: mx.array, keys: mx.array, values: mx.array) -> mx.array:
        """Attend with [rows, heads, size] inputs; return [rows, heads * size].

        Scores and sums run over blocks of BLOCK keys, so no product knows the span.
        """
        rows, heads, groups = self.slots.count, queries.shape[1], keys.shape[1]
        size = keys.shape[2]
        per_group = heads // groups
        self.slots.write(layer, keys[:, :, None], values[:, :, None], self.at)
        key_blocks = self._blocks(self.slots.keys[layer])
        value_blocks = self._blocks(self.slots.values[layer])
        grouped = queries.reshape(rows, groups, 1, per_group, size)
        scores = grouped @ key_blocks.swapaxes(-1, -2) + self.mask
        flat = scores.transpose(0, 1, 3, 2, 4).reshape(rows, groups, per_group, -1)
        weights = mx.softmax(flat, axis=-1)
        weights = weights.reshape(rows, groups, per_group, self.blocks, BLOCK)
        parts = weights.transpose(0, 1, 3, 2, 4) @ value_blocks
        return mx.sum(parts, axis=2).reshape(rows, heads * size)

    def _blocks(self, buffer: mx.array | None) -> mx.array:
        """View [slots, groups, capacity, size] as [slots, groups, blocks, BLOCK, size]."""
        assert buffer is not None
        rows, groups, capacity, size = buffer.shape
        return buffer.reshape(rows, groups, capacity // BLOCK, BLOCK, size)[:, :, : self.blocks]


class PrefillFrame:
    """A run of one row's own prompt tokens; its shapes depend on that prompt alone."""

    eager = False

    def __init__(self, slots: RowSlots, table: tuple[mx.array, mx.array]) -> None:
        self.slots = slots
        self.table = table

    def product(self, linear: nn.Linear, x: mx.array) -> mx.array:
        """Multiply [tokens, width] as it is."""
        out: mx.array = linear(x)
        return out

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


Frame = StepFrame | PrefillFrame


def tiled(linear: Callable[[mx.array], mx.array], x: mx.array, padding: int) -> mx.array:
    """Multiply rows with `padding` rows below them that are cut off again.

    What the padding holds does not matter, so a single row repeats itself, without a copy.
    """
    rows = x.shape[0]
    if padding and rows == 1:
        x = mx.broadcast_to(x, (1 + padding, x.shape[1]))
    elif padding:
        x = mx.concatenate([x, _zeros(padding, x.shape[1])])
    out = linear(x)
    return out[:rows] if padding else out


@cache
def _zeros(rows: int, width: int) -> mx.array:
    """Return rows to pad with; made once, since making them is an operation of its own."""
    zeros = mx.zeros((rows, width), mx.float32)
    mx.eval(zeros)
    return zeros


def layer_caches(frame: Frame) -> list["FrameCache"]:
    """Return what the model hands to each layer of a pass."""
    return [FrameCache(frame, layer) for layer in range(len(frame.slots.keys))]


class FrameCache:
    """One layer's handle on a frame; mlx-lm asks it for a mask, which the frame has already."""

    def __init__(self, frame: "Frame", layer: int) -> None:
        self.frame = frame
        self.layer = layer

    def make_mask(self, tokens: int, **_: Any) -> None:
        """Return nothing: the frame masks on its own."""
        return


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
        frame: Frame = cache.frame
        if frame.eager:
            mx.async_eval(x)
        h = x.reshape(-1, x.shape[-1])
        h = h + self._attend(self.input_layernorm(h), frame, cache.layer)
        fused = frame.product(self.gate_up, self.post_attention_layernorm(h))
        gate, up = mx.split(fused, 2, axis=-1)
        h = h + frame.product(self.down_proj, nn.silu(gate) * up)
        return h.reshape(x.shape)

    def _attend(self, h: mx.array, frame: "Frame", layer: int) -> mx.array:
        heads = frame.product(self.qkv, h).reshape(
            h.shape[0], self.n_heads + 2 * self.n_kv_heads, -1
        )
        turning = self.n_heads + self.n_kv_heads
        turned = _rotate(heads[:, :turning], *frame.table)
        out = frame.attend(
            layer, turned[:, : self.n_heads], turned[:, self.n_heads :], heads[:, turning:]
        )
        return frame.product(self.o_proj, out)


def _fused(linears: Sequence[Any], scales: Sequence[float]) -> nn.Linear:
    """Stack linears of one input into one, each times its scale."""
    pairs = list(zip(linears, scales, strict=True))
    fused = nn.Linear(1, 1, bias="bias" in linears[0])
    fused.weight = mx.concatenate([linear.weight * scale for linear, scale in pairs])
    if "bias" in linears[0]:
        fused.bias = mx.concatenate([linear.bias * scale for linear, scale in pairs])
    return fused


def _rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Turn [rows, heads, size] by half-split rotary embedding."""
    low, high = mx.split(x, 2, axis=-1)
    return x * cos + mx.concatenate([high, low], axis=-1) * sin
