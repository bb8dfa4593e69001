"""Which models' layers may be rebuilt: those whose every part and attribute is known.

The list names what mlx-lm's Llama is made of, attribute by attribute. A subclass, another module
in a layer's place or an attribute that nobody here has read may stand for arithmetic that the
rebuilt layers do not do; such a model runs on mlx-lm's own layers.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from . import rotation

_ATTRIBUTES: Final[dict[type, frozenset[str]]] = {
    # `sanitize` is wrapped by runtime/model.py and done with once weights are loaded.
    llama.Model: frozenset({"args", "model_type", "model", "lm_head", "sanitize"}),
    llama.LlamaModel: frozenset(
        {"args", "vocab_size", "num_hidden_layers", "layer_types", "sliding_window"}
        | {"embed_tokens", "layers", "norm", "fa_idx", "swa_idx"}
    ),
    llama.TransformerBlock: frozenset(
        {"num_attention_heads", "hidden_size", "use_sliding", "self_attn", "mlp", "args"}
        | {"input_layernorm", "post_attention_layernorm"}
    ),
    llama.Attention: frozenset(
        {"n_heads", "n_kv_heads", "head_dim", "scale", "rope"}
        | {"q_proj", "k_proj", "v_proj", "o_proj"}
    ),
    llama.MLP: frozenset({"gate_proj", "down_proj", "up_proj"}),
    nn.RMSNorm: frozenset({"weight", "eps"}),
    nn.Linear: frozenset({"weight", "bias"}),
    nn.Embedding: frozenset({"weight"}),
    **rotation.ATTRIBUTES,
}
_ARGUMENTS: Final = frozenset(
    {"model_type", "hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size"}
    | {"num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"}
    | {"attention_bias", "mlp_bias", "tie_word_embeddings", "max_position_embeddings"}
    | {"rope_theta", "rope_traditional", "rope_scaling", "layer_types", "sliding_window"}
)
_OF_EVERY_MODULE: Final = frozenset({"_no_grad", "_training"})
_FAR: Final = 8192  # positions a model is tried at that names no bounds of its own


def unsupported(net: nn.Module) -> str | None:
    """Say why a model cannot run in constant-shape arithmetic, or None when it can."""
    if type(net) is not llama.Model:
        return f"constant-shape arithmetic is built for Llama layers, not {type(net).__module__}"
    args: Any = net.args
    if unknown := sorted(vars(args).keys() - _ARGUMENTS):
        return f"constant-shape arithmetic does not know the argument {unknown[0]!r}"
    if any(layer.use_sliding for layer in net.layers):
        return "constant-shape arithmetic has no sliding window"
    if (reason := _unknown_part(net)) is not None:
        return f"constant-shape arithmetic {reason}"
    arrays: dict[str, mx.array] = dict(tree_flatten(net.parameters()))
    if any(array.dtype != mx.float32 for array in arrays.values()):
        return "constant-shape arithmetic needs every weight in float32"
    if (reason := _uneven(net.layers)) is not None:
        return f"constant-shape arithmetic {reason}"
    attention = net.layers[0].self_attn
    size = attention.q_proj.weight.shape[0] // attention.n_heads
    reason = rotation.why_rotated_otherwise(attention.rope, size, _far(args))
    return None if reason is None else f"constant-shape arithmetic {reason}"


def _unknown_part(net: nn.Module) -> str | None:
    """Name the first part that is of no known type or has an attribute that is not known."""
    for name, module in net.named_modules():
        kind = type(module)
        if kind in (nn.QuantizedLinear, nn.QuantizedEmbedding):
            return "needs unpacked weights"
        if kind not in _ATTRIBUTES:
            return f"does not know {kind.__name__} ({name})"
        held = {*module, *vars(module)} - _OF_EVERY_MODULE
        if unknown := sorted(held - _ATTRIBUTES[kind]):
            return f"does not know {kind.__name__}.{unknown[0]} ({name})"
    return None


def _uneven(layers: Sequence[Any]) -> str | None:
    """Say which layers cannot be rebuilt alike: one table of angles serves all of them."""
    first = rotation.known_turn(layers[0].self_attn.rope)
    for at, layer in enumerate(layers):
        attention, mlp = layer.self_attn, layer.mlp
        for fused in (
            (attention.q_proj, attention.k_proj, attention.v_proj),
            (mlp.gate_proj, mlp.up_proj),
        ):
            if len({"bias" in linear for linear in fused}) > 1:
                return f"needs a bias in all or none of the products of an input (layer {at})"
        turn = rotation.known_turn(attention.rope)
        if first is None or turn is None:
            return f"does not know {type(attention.rope).__name__}, or its pairing of halves"
        same = np.array_equal(turn.angles, first.angles) and turn.magnitude == first.magnitude
        if not same:
            return f"needs one rotary embedding for all layers (layer {at} has another)"
    return None


def _far(args: Any) -> list[int]:
    """Return positions behind which a rotary embedding may go other ways, and the last one."""
    longest = args.max_position_embeddings or _FAR
    trained = (args.rope_scaling or {}).get("original_max_position_embeddings") or longest
    return [int(trained) - 1, int(trained), int(trained) + 1, int(longest) - 1]
