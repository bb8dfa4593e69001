"""The Qwen3-Next family of MTP heads: one decoder layer behind a joint of embedding and hidden.

For position t the head reads the model's last hidden state (after its norm) of t and the
embedding of token t + 1, each normed, joined and projected; one layer of the model's own kind and
a norm follow. Its output gives the draft of token t + 2 through the model's output product, and
stands in for the hidden state when the head drafts on (Qwen3-Next technical notes, 2025;
DeepSeek-V3 report, 2024, section 2.2). Qwen3.5 names its tensors alike.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3_5, qwen3_next

from ...runtime.errors import HeadRefused, NoHead
from .source import HeadSource

# The layer a head of each family's models has; theirs is a layer with full attention.
_LAYERS: Final[dict[type, Callable[[Any], nn.Module]]] = {
    llama.Model: lambda args: llama.TransformerBlock(args),
    qwen3_next.Model: lambda args: qwen3_next.Qwen3NextDecoderLayer(
        args, args.full_attention_interval - 1
    ),
    qwen3_5.TextModel: lambda args: qwen3_5.DecoderLayer(args, args.full_attention_interval - 1),
}
_EXPERTS: Final = ("gate_proj", "up_proj", "down_proj")


class HeadParts(nn.Module):
    """The modules of a head, named as its tensors are.

    Args:
        args: The model's own arguments.
        layer: The decoder layer, still with weights of its own making.
    """

    def __init__(self, args: Any, layer: nn.Module) -> None:
        super().__init__()
        size, eps = args.hidden_size, args.rms_norm_eps
        self.pre_fc_norm_embedding = nn.RMSNorm(size, eps)
        self.pre_fc_norm_hidden = nn.RMSNorm(size, eps)
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = [layer]
        self.norm = nn.RMSNorm(size, eps)

    def joint(self, embedded: mx.array, hidden: mx.array) -> mx.array:
        """Return what `fc` multiplies."""
        normed = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        return mx.concatenate(normed, axis=-1)


def build_head(source: HeadSource, net: nn.Module, dtype: mx.Dtype) -> HeadParts:
    """Build a head for a model, in the type the model computes in.

    Args:
        net: The part of the model that has its arguments and layers.

    Raises:
        NoHead: When the family has no head here.
        HeadRefused: When a tensor is missing, unknown or of another shape.
    """
    args: Any = net.args
    layer = _LAYERS.get(type(net))
    if layer is None:
        raise NoHead(f"{source.origin}: no head is known for {type(net).__module__}")
    parts = HeadParts(args, layer(_with_head_width(args, source)))
    tensors = _stacked(source.tensors)
    _compare(source.origin, dict(tree_flatten(parts.parameters())), tensors)
    shifted = {
        name: array + source.norm_offset if "norm" in name else array
        for name, array in tensors.items()
    }
    parts.load_weights([(name, array.astype(dtype)) for name, array in shifted.items()])
    mx.eval(parts.parameters())
    return parts


def _with_head_width(args: Any, source: HeadSource) -> Any:
    """Let a plain feed-forward layer be as wide as the head's own."""
    gate = source.tensors.get("layers.0.mlp.gate_proj.weight")
    if gate is None:
        return args
    return replace(args, intermediate_size=gate.shape[0])


def _stacked(tensors: dict[str, mx.array]) -> dict[str, mx.array]:
    """Stack experts as mlx-lm holds them; checkpoints have one tensor an expert, or two for all."""
    out = dict(tensors)
    experts = "layers.0.mlp.experts."
    if f"{experts}gate_up_proj" in out:
        gate, up = mx.split(out.pop(f"{experts}gate_up_proj"), 2, axis=-2)
        down = out.pop(f"{experts}down_proj")
        for name, array in zip(_EXPERTS, (gate, up, down), strict=True):
            out[f"layers.0.mlp.switch_mlp.{name}.weight"] = array
    for name in _EXPERTS:
        apart: list[mx.array] = []
        while (key := f"{experts}{len(apart)}.{name}.weight") in out:
            apart.append(out.pop(key))
        if apart:
            out[f"layers.0.mlp.switch_mlp.{name}.weight"] = mx.stack(apart)
    return out


def _compare(origin: str, expected: dict[str, mx.array], found: dict[str, mx.array]) -> None:
    for name, array in expected.items():
        if name not in found:
            raise HeadRefused(f"{origin}: tensor mtp.{name} is missing")
        if found[name].shape != array.shape:
            raise HeadRefused(
                f"{origin}: tensor mtp.{name} has shape {found[name].shape}, "
                f"this model needs {array.shape}"
            )
    for name in found:
        if name not in expected:
            raise HeadRefused(f"{origin}: tensor mtp.{name} belongs to no part of a known head")
