"""From a Llama GGUF file to an mlx-lm model directory, bit for bit.

MLX reads Q4_1 and Q8_0 blocks as its own quantized layout, so no weight is rounded: only the
row order of the query and key projections, which llama.cpp permutes for its interleaved rotary
embedding, is put back. The tokenizer is rebuilt from the file's vocabulary and merges.
"""

import json
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
from rich.console import Console
from rich.progress import track
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from .errors import ModelError

_BLOCK_NAMES: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_GROUP: Final = 32  # values a Q4_1 or Q8_0 block holds
_CONTROL: Final = 3  # GGUF token type of special tokens


def convert(source: Path, target: Path, name: str, console: Console) -> None:
    """Write `config.json`, `model.safetensors` and the tokenizer files into a new folder.

    Raises:
        ModelError: When the file is not a Llama model in Q4_1 with a Q8_0 embedding.
    """
    with mx.stream(mx.cpu):
        loaded: Any = mx.load(str(source), return_metadata=True)
        tensors: dict[str, mx.array] = loaded[0]
        meta: dict[str, Any] = loaded[1]
        if meta.get("general.architecture") != "llama" or "token_embd.scales" not in tensors:
            raise ModelError(f"{source.name}: not a quantized Llama GGUF file")
        heads = (_number(meta, "attention.head_count"), _number(meta, "attention.head_count_kv"))
        weights = {}
        names: list[str] = sorted(tensors)
        for key in track(names, "converting", console=console):
            weights[_renamed(key)] = _unpermuted(key, tensors[key], *heads)
        target.mkdir()
        mx.save_safetensors(str(target / "model.safetensors"), weights, {"format": "mlx"})
    _write(target / "config.json", _config(meta, name))
    _write_tokenizer(target, meta)


def _number(meta: dict[str, Any], key: str) -> int:
    return int(meta[f"llama.{key}"].item())


def _renamed(key: str) -> str:
    parts = key.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]] + (
        f".{parts[1]}"
    )


def _unpermuted(key: str, tensor: mx.array, heads: int, kv_heads: int) -> mx.array:
    """Undo llama.cpp's interleaving of query and key rows; packed columns are left as they are."""
    kind = key.split(".")[2] if key.startswith("blk.") else ""
    if kind not in ("attn_q", "attn_k"):
        return tensor
    count = heads if kind == "attn_q" else kv_heads
    rows = tensor.shape[0]
    split = tensor.reshape(count, rows // count // 2, 2, *tensor.shape[1:])
    return mx.contiguous(split.swapaxes(1, 2).reshape(tensor.shape))


def _config(meta: dict[str, Any], name: str) -> dict[str, Any]:
    return {
        "_name_or_path": name,
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _number(meta, "embedding_length"),
        "num_hidden_layers": _number(meta, "block_count"),
        "intermediate_size": _number(meta, "feed_forward_length"),
        "num_attention_heads": _number(meta, "attention.head_count"),
        "num_key_value_heads": _number(meta, "attention.head_count_kv"),
        "max_position_embeddings": _number(meta, "context_length"),
        "vocab_size": _number(meta, "vocab_size"),
        "rms_norm_eps": float(meta["llama.attention.layer_norm_rms_epsilon"].item()),
        "rope_theta": float(meta["llama.rope.freq_base"].item()),
        "tie_word_embeddings": True,
        "bos_token_id": int(meta["tokenizer.ggml.bos_token_id"].item()),
        "eos_token_id": int(meta["tokenizer.ggml.eos_token_id"].item()),
        "quantization": {
            "group_size": _GROUP,
            "bits": 4,
            "model.embed_tokens": {"group_size": _GROUP, "bits": 8},
        },
    }


def _write_tokenizer(target: Path, meta: dict[str, Any]) -> None:
    if meta["tokenizer.ggml.pre"] != "smollm":
        raise ModelError(f"pre-tokenizer {meta['tokenizer.ggml.pre']!r} is not known here")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({t: i for i, t in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = meta["tokenizer.ggml.token_type"].tolist()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    tokenizer.save(str(target / "tokenizer.json"))
    named = {
        f"{role}_token": tokens[int(meta[f"tokenizer.ggml.{key}_token_id"].item())]
        for role, key in (
            ("bos", "bos"),
            ("eos", "eos"),
            ("unk", "unknown"),
            ("pad", "padding"),
        )
    }
    _write(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": _number(meta, "context_length"),
            "clean_up_tokenization_spaces": False,
            "chat_template": meta["tokenizer.chat_template"],
            **named,
        },
    )


def _write(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False), encoding="utf-8")
