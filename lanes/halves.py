"""A model as its two halves: the body that ends in the last norm, and the output product.

mlx-lm's models give logits and keep the hidden states behind them; a head needs both, and a long
prompt needs the logits of one position only.
"""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import llama, qwen2, qwen3, qwen3_5, qwen3_5_moe, qwen3_next

# Families whose logits are the output product of `model`'s result and nothing else.
_PLAIN = (llama.Model, qwen2.Model, qwen3.Model, qwen3_next.Model, qwen3_5.TextModel)
_WRAPPED = (qwen3_5.Model, qwen3_5_moe.Model)


class Halves:
    """The body and the output product of a model, and its embedding.

    Args:
        net: A model whose family `halves` knows.
    """

    def __init__(self, net: Any) -> None:
        self.net = net
        self._tied = bool(net.args.tie_word_embeddings)

    def body(self, tokens: mx.array, caches: list[Any]) -> mx.array:
        """Return hidden states after the last norm, for tokens [rows, positions]."""
        out: mx.array = self.net.model(tokens, caches)
        return out

    def output(self, hidden: mx.array) -> mx.array:
        """Return logits."""
        product = self._output.as_linear if self._tied else self._output
        out: mx.array = product(hidden)
        return out

    def embed(self, tokens: mx.array) -> mx.array:
        """Return the embeddings of tokens."""
        out: mx.array = self.net.model.embed_tokens(tokens)
        return out

    def output_rows(self, tokens: mx.array) -> mx.array:
        """Return the output matrix's rows of some tokens as a plain matrix."""
        return plain_rows(self._output, tokens)

    @property
    def output_weight(self) -> mx.array:
        """The output matrix as it is stored."""
        weight: mx.array = self._output.weight
        return weight

    @property
    def _output(self) -> Any:
        return self.net.model.embed_tokens if self._tied else self.net.lm_head


def plain_rows(module: Any, rows: mx.array) -> mx.array:
    """Return some rows of an embedding's or a linear's weight, unpacked where it is packed."""
    weight: mx.array = module.weight[rows]
    if not isinstance(module, nn.QuantizedLinear | nn.QuantizedEmbedding):
        return weight
    biases = module.get("biases")
    return mx.dequantize(
        weight,
        module.scales[rows],
        None if biases is None else biases[rows],
        group_size=module.group_size,
        bits=module.bits,
        mode=module.mode,
    )


def halves(net: nn.Module) -> Halves | None:
    """Take a model apart, or None when its family is not known to be so simple."""
    if type(net) in _WRAPPED:
        return Halves(net["language_model"])
    return Halves(net) if type(net) in _PLAIN else None
