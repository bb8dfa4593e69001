"""MTP heads: where they come from, what is refused and why, and what they compute."""

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import llama, qwen3_next
from tests.lanes.tiny import CARD, LLAMA, VOCAB, tensors_of, tiny_head, tiny_llama

from paceline.lanes.heads.qwen3_next import HeadParts, build_head
from paceline.lanes.heads.source import HeadSource, find_head
from paceline.lanes.install import Installed, Wanted, install
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.errors import HeadRefused, LaneRefused, ModelError, NoHead
from paceline.runtime.model import LoadedModel, load
from paceline.runtime.modes import Mode


def _source(tensors: dict[str, mx.array]) -> HeadSource:
    return HeadSource(tensors, "a test", 0.0, None, None)


def saved(folder: Path, net: nn.Module, config: dict[str, Any], head: dict[str, mx.array]) -> Path:
    """Write a checkpoint with a head in it, as makers publish them."""
    weights = dict(tree_flatten(net.parameters()))
    weights |= {f"mtp.{name}": array for name, array in head.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


QWEN = {
    "model_type": "qwen3_next",
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "decoder_sparse_step": 1,
    "shared_expert_intermediate_size": 32,
    "mlp_only_layers": [],
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}


@pytest.mark.slow
def test_the_starters_head_matches_its_golden_values(drafting: Installed) -> None:
    """Hidden states of recursive drafts, as its trainer recorded them, to rounding in float32."""
    for lane in drafting.lanes:
        (golden,) = [check for check in lane.receipt.checks if check.name == "golden head"]
        assert golden.passed
        assert float(golden.found.split()[0]) < 2e-4
    assert drafting.head == "smollm2-135m-instruct"


@pytest.mark.slow
def test_a_head_that_computes_something_else_is_refused(
    starter_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One weight off, and the golden check names itself."""
    plain = HeadParts.joint

    def joint(self: HeadParts, embedded: mx.array, hidden: mx.array) -> mx.array:
        return plain(self, embedded, hidden) * 1.01

    monkeypatch.setattr(HeadParts, "joint", joint)
    model = load(starter_path, "auto", "cpu", 0, "")
    with pytest.raises(LaneRefused, match="golden head"):
        install(model, Wanted(Mode.SERIAL))


@pytest.mark.slow
def test_the_starters_head_is_refused_on_another_trunk(starter_path: Path) -> None:
    """The same shapes with other weights are another trunk, and serial goes on without a head."""
    model = load(starter_path, "auto", "cpu", 0, "")
    layer: Any = model.net.layers[15]
    layer.mlp.down_proj.weight = layer.mlp.down_proj.weight * 1.1
    with pytest.raises(NoHead, match=r"down_proj.* has other weights"):
        find_head(model)
    with pytest.raises(HeadRefused, match="mtp_batch' needs an MTP head"):
        install(model, Wanted(Mode.MTP_BATCH))
    with pytest.raises(HeadRefused, match="speculative_depth 2 needs an MTP head"):
        install(model, Wanted(Mode.SERIAL, depth=2))
    installed = install(model, Wanted(Mode.SERIAL))
    assert [lane.spec.name for lane in installed.lanes] == ["ar-b1"]
    assert "other weights" in installed.head


def test_a_model_without_a_head_says_what_is_missing() -> None:
    """Neither its own tensors nor one that paceline carries."""
    with pytest.raises(NoHead, match=r"no mtp\.\* weights.*SmolLM2.*512"):
        find_head(LoadedModel(tiny_llama(), CARD))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda t: t.pop("fc.weight"), r"mtp\.fc\.weight is missing"),
        (
            lambda t: t.update({"fc.weight": mx.zeros((64, 64))}),
            r"shape \(64, 64\), .* \(64, 128\)",
        ),
        (
            lambda t: t.update({"extra.weight": mx.zeros(3)}),
            r"mtp\.extra\.weight belongs to no part",
        ),
    ],
)
def test_a_damaged_head_is_refused_with_the_reason(
    change: Any, reason: str, tmp_path: Path
) -> None:
    """A model's own head is used or the server does not start: it is never left out silently."""
    net = tiny_llama()
    tensors = tensors_of(tiny_head(net))
    change(tensors)
    with pytest.raises(HeadRefused, match=reason):
        build_head(_source(tensors), net, mx.float32)
    model = load(saved(tmp_path, net, LLAMA, tensors), "auto", "cpu", 0, "")
    with pytest.raises(HeadRefused, match=f"{reason}.*with mtp off"):
        install(model, Wanted(Mode.SERIAL))
    assert install(model, Wanted(Mode.SERIAL, mtp=False)).lanes[0].spec.kind == "ar"


def test_a_head_of_an_unknown_family_is_no_head() -> None:
    """The message names the family, and serial goes on without."""
    with pytest.raises(NoHead, match=r"no head is known for mlx_lm\.models\.qwen2"):
        build_head(_source({}), _qwen2(), mx.float32)


def _qwen2() -> nn.Module:
    from mlx_lm.models import qwen2

    return qwen2.Model(qwen2.ModelArgs.from_dict({**LLAMA, "model_type": "qwen2"}))


def test_a_checkpoints_own_head_is_read_and_used(tmp_path: Path) -> None:
    """mtp.* tensors beside the model's own, on every width, with plain decoding's tokens."""
    net = tiny_llama()
    folder = saved(tmp_path, net, LLAMA, tensors_of(tiny_head(net)))
    drafting = install(load(folder, "auto", "cpu", 0, ""), Wanted(Mode.MTP_BATCH))
    plain = install(load(folder, "auto", "cpu", 0, ""), Wanted(Mode.SERIAL, mtp=False))
    assert drafting.head.startswith("mtp.* of ")
    assert _decoded(drafting, 2, 3) == _decoded(plain, 0, 0)


def _published(net: Any) -> dict[str, mx.array]:
    """Return a Qwen3-Next head as it is published: one tensor an expert, norms around zero."""
    mx.random.seed(3)
    layer = qwen3_next.Qwen3NextDecoderLayer(net.args, 3)
    tensors = tensors_of(HeadParts(net.args, layer))
    out = {}
    for name, array in tensors.items():
        if ".switch_mlp." in name:
            for expert, one in enumerate(array):
                out[name.replace("switch_mlp", f"experts.{expert}")] = one
        else:
            out[name] = array - 1.0 if "norm" in name else array
    return out


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_hybrid_model_drafts_alone_and_takes_wrong_drafts_back(
    tmp_path: Path, temperature: float
) -> None:
    """Qwen3-Next: a recurrent state goes back to its checkpoint; tokens stay plain decoding's."""
    mx.random.seed(5)
    net = qwen3_next.Model(qwen3_next.ModelArgs.from_dict(QWEN))
    weights = dict(tree_flatten(net.parameters()))
    # As published: convolutions are not transposed, which is how such a file is told.
    published = {
        name: array.moveaxis(2, 1) if "conv1d" in name else array for name, array in weights.items()
    }
    published |= {f"mtp.{name}": array for name, array in _published(net).items()}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), published)
    source = find_head(LoadedModel(net, _card_at(tmp_path)))
    assert source.norm_offset == 1.0
    model = LoadedModel(net, _card_at(tmp_path))
    drafting = install(model, Wanted(Mode.SERIAL))
    plain = install(model, Wanted(Mode.SERIAL, mtp=False))
    assert drafting.lanes[0].spec.name == "mtp-b1"
    assert "ArraysCache" in drafting.why
    expected = _decoded(plain, 0, 0, temperature)
    for depth in (0, 1, 2, 4):
        assert _decoded(drafting, 0, depth, temperature) == expected
    with pytest.raises(ModelError, match=r"ArraysCache.*branches side by side"):
        install(model, Wanted(Mode.HYPER))


def test_a_state_that_cannot_be_taken_back_has_no_speculative_lane(tmp_path: Path) -> None:
    """A sliding window forgets what a wrong draft pushed out, and is named."""
    changes = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 8}
    net = tiny_llama(**changes)
    folder = saved(tmp_path, net, {**LLAMA, **changes}, tensors_of(tiny_head(net)))
    model = load(folder, "auto", "cpu", 0, "")
    installed = install(model, Wanted(Mode.SERIAL))
    assert installed.lanes[0].spec.kind == "ar"
    assert "RotatingKVCache cannot be taken back" in installed.head


def _card_at(folder: Path) -> Any:
    from msgspec.structs import replace

    return replace(CARD, path=folder, family="qwen3_next")


def _decoded(
    installed: Installed, lane: int, depth: int, temperature: float = 0.8
) -> list[list[int]]:
    chosen = installed.lanes[lane]
    found = []
    for seed in range(3):
        prompt = tuple((seed * 31 + i * 7) % VOCAB for i in range(3 + 9 * seed))
        context = RowContext(prompt, Sampling(temperature=temperature), seed, 24, frozenset())
        row = chosen.open(str(seed), context)
        chosen.prefill(row, 1000)
        while row.left > 0:
            (delta,) = chosen.step([row], [depth])
            assert delta.error is None
        chosen.close(row)
        found.append(row.generated)
    return found


def test_published_norms_get_their_one_back() -> None:
    """A head stored around zero is loaded with 1 added to its norms and to nothing else."""
    net: Any = tiny_llama()
    tensors = tensors_of(tiny_head(net))
    stored = {n: a - 1.0 if "norm" in n else a for n, a in tensors.items()}
    built = build_head(HeadSource(stored, "a test", 1.0, None, None), net, mx.float32)
    for name, array in tensors_of(built).items():
        assert np.allclose(np.array(array), np.array(tensors[name]), atol=1e-6)


def test_a_head_may_be_wider_than_the_models_layers() -> None:
    """The feed-forward part of a head has the width its own tensors say."""
    net: Any = tiny_llama()
    args = llama.ModelArgs.from_dict({**LLAMA, "intermediate_size": 160})
    tensors = tensors_of(HeadParts(net.args, llama.TransformerBlock(args)))
    built: Any = build_head(_source(tensors), net, mx.float32)
    assert built.layers[0].mlp.gate_proj.weight.shape == (160, 64)
