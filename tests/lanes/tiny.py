"""Tiny random models and heads, for what does not need a model that makes sense."""

from functools import lru_cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.models import llama
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paceline.lanes.heads.qwen3_next import HeadParts
from paceline.runtime.grammar import Grammars
from paceline.runtime.model import ModelCard
from paceline.runtime.pieces import byte_level_table

VOCAB = 512
END = VOCAB - 1  # of the tiny tokenizer
_WORDS = ["red", "blue", "green", "yellow", "violet"]
CARD = ModelCard("tiny", Path(), "llama", "float32", "test", "cpu", 512, 1, VOCAB, (), 0)


LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
}


def tiny_llama(**changes: object) -> nn.Module:
    mx.random.seed(1)
    return llama.Model(llama.ModelArgs.from_dict({**LLAMA, **changes}))


def tiny_head(net: Any) -> HeadParts:
    """Return a head with random weights: a bad one, whose drafts are mostly refused."""
    mx.random.seed(2)
    parts = HeadParts(net.args, llama.TransformerBlock(net.args))
    mx.eval(parts.parameters())
    return parts


def tensors_of(parts: HeadParts) -> dict[str, mx.array]:
    """Return a head's tensors by name."""
    return dict(tree_flatten(parts.parameters()))


def some_ids(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return a draft vocabulary."""
    return np.random.default_rng(4).permutation(VOCAB)[:count].astype(np.int64)


@lru_cache(maxsize=1)
def tiny_tokenizer() -> Tokenizer:
    """Return a byte-level tokenizer of the tiny vocabulary, whose last token ends an answer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    lines = [f'{{"colour": "{w}", "size": [{n}, {n + 7}]}}' for n, w in enumerate(_WORDS * 20)]
    tokenizer.train_from_iterator(lines, trainer)
    tokenizer.add_special_tokens([f"<spare {n}>" for n in range(END - tokenizer.get_vocab_size())])
    tokenizer.add_special_tokens(["<end>"])
    assert tokenizer.token_to_id("<end>") == END
    return tokenizer


@lru_cache(maxsize=1)
def tiny_grammars() -> Grammars:
    """Return what compiles grammars for the tiny vocabulary."""
    tokenizer = tiny_tokenizer()
    pieces = [tokenizer.id_to_token(token) or "" for token in range(VOCAB)]
    bytes_of = byte_level_table()
    special = [i for i, piece in enumerate(pieces) if piece.startswith("<") and len(piece) > 1]
    tokens = [
        piece.encode() if i in special else bytes(bytes_of[c] for c in piece)
        for i, piece in enumerate(pieces)
    ]
    return Grammars(tokenizer.to_str(), tokens, special, [END])
