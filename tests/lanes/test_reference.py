"""Rebuilt layers against mlx-lm's own: every rotary embedding, and what is not known stays."""

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import internlm2, llama, qwen3_moe
from mlx_lm.models.cache import make_prompt_cache
from tests.lanes.tiny import CARD, LLAMA, VOCAB, tiny_llama

from paceline.lanes import lockstep, reference, rotation
from paceline.lanes.install import Installed, Wanted, install
from paceline.lanes.known import unsupported
from paceline.lanes.reference import Reference, compare, own_logits, routed
from paceline.lanes.stock import StockTrunk
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.errors import LaneRefused
from paceline.runtime.model import LoadedModel
from paceline.runtime.modes import Mode

_TRAINED = {"original_max_position_embeddings": 64}
_ROPES: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "linear": {"type": "linear", "factor": 4.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, **_TRAINED},
    "yarn": {"type": "yarn", "factor": 16.0, **_TRAINED},
    "yarn with mscales": {
        "type": "yarn",
        "factor": 16.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        **_TRAINED,
    },
    "deepseek yarn": {"type": "deepseek_yarn", "factor": 40.0, "mscale": 0.7, **_TRAINED},
    "longrope": {
        "rope_type": "longrope",
        "short_factor": [1.0] * 8,
        "long_factor": [1.0 + i for i in range(8)],
        **_TRAINED,
    },
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0},
}


def _sharp(net: nn.Module) -> nn.Module:
    """Make attention matter: random weights hardly tell keys apart."""
    for layer in net.layers:
        layer.self_attn.q_proj.weight *= 6
        layer.self_attn.k_proj.weight *= 6
    mx.eval(net.parameters())
    return net


def _installed(net: nn.Module, mode: Mode = Mode.SERIAL) -> Installed:
    return install(LoadedModel(net, CARD), Wanted(mode))


def _greedy(found: Installed, prompt: tuple[int, ...], count: int) -> list[int]:
    lane = found.lanes[0]
    row = lane.open("r", RowContext(prompt, Sampling(temperature=0), 0, count, frozenset()))
    lane.prefill(row, len(prompt))
    while row.left:
        lane.step([row], [0])
    return row.generated


def _agreed(found: Installed) -> str:
    (check,) = (c for c in found.lanes[0].receipt.checks if c.name == "against mlx-lm")
    assert check.passed
    return check.found


@pytest.mark.parametrize("name", _ROPES)
def test_every_rotary_embedding_gives_mlx_lms_tokens(name: str) -> None:
    """Beyond the length a model was trained at, too, tokens are those of mlx-lm's own loop."""
    net = _sharp(tiny_llama(rope_scaling=_ROPES[name]))
    prompt = tuple(map(int, np.random.default_rng(3).integers(0, VOCAB, 90)))
    expected = [int(token) for token, _ in generate_step(mx.array(prompt), net, max_tokens=20)]
    found = _installed(net)
    assert found.arithmetic == "constant-shape"
    assert "largest logit difference" in _agreed(found)
    assert _greedy(found, prompt, 20) == expected


def test_a_rotary_embedding_that_is_not_known_keeps_mlx_lms_layers() -> None:
    """One that goes by the length, and one that pairs neighbours, are not rebuilt."""
    for changes in (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {"rope_traditional": True},
    ):
        net = tiny_llama(**changes)
        assert "does not know" in (unsupported(net) or "")
        prompt = tuple(map(int, np.random.default_rng(3).integers(0, VOCAB, 60)))
        steps = generate_step(mx.array(prompt), net, max_tokens=9)
        expected = [int(token) for token, _ in steps]
        found = _installed(net)
        assert found.arithmetic == "stock"
        assert _greedy(found, prompt, 9) == expected


class _Attention(llama.Attention):
    """Another arithmetic under a name that `isinstance` would take."""


def _with(path: str, value: object) -> nn.Module:
    net = tiny_llama()
    holder: Any = net
    *way, last = path.split(".")
    for name in way:
        holder = holder[int(name)] if name.isdigit() else getattr(holder, name)
    setattr(holder, last, value)
    return net


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("layers.1.self_attn", _Attention(llama.ModelArgs.from_dict(LLAMA))),
        ("layers.1.self_attn.q_norm", nn.RMSNorm(16)),
        ("layers.0.self_attn.sinks", mx.zeros(4)),
        ("layers.0.self_attn.logit_softcap", 30.0),
        ("layers.0.residual_multiplier", 0.2),
        ("layers.0.input_layernorm", nn.LayerNorm(64)),
        ("layers.1.mlp.down_proj", nn.Identity()),
        ("model.embedding_multiplier", 12.0),
        ("logit_scale", 0.06),
        ("args.attention_multiplier", 0.05),
        ("layers.1.self_attn.rope", nn.RoPE(16, base=500.0)),
        ("layers.0.self_attn.q_proj", nn.Linear(64, 64, bias=True)),
    ],
)
def test_what_is_not_known_part_by_part_is_not_rebuilt(path: str, value: object) -> None:
    """A subclass, one attribute more or one layer unlike the others, and nothing is replaced."""
    assert unsupported(_with(path, value)) is not None


def test_a_rebuilt_layer_that_computes_something_else_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A scale that is off by a thousandth keeps mlx-lm's layers, and says why."""
    plain = lockstep._fused
    monkeypatch.setattr(
        lockstep, "_fused", lambda linears, scales: plain(linears, [s * 1.001 for s in scales])
    )
    found = _installed(_sharp(tiny_llama()))
    assert found.arithmetic == "stock"
    assert "a rebuilt layer differs" in found.why


def test_a_dropped_magnitude_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table without YaRN's factor is not the model's own, at any position."""
    plain = rotation.known_turn
    monkeypatch.setattr(
        rotation, "known_turn", lambda rope: (t := plain(rope)) and t._replace(magnitude=1.0)
    )
    assert "turns otherwise" in (unsupported(tiny_llama(rope_scaling=_ROPES["yarn"])) or "")


def test_whole_models_are_compared_whatever_single_layers_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A wrong output product passes every layer's check; the whole model's refuses it by name."""
    plain = lockstep.LockstepTrunk._logits
    monkeypatch.setattr(lockstep.LockstepTrunk, "_logits", lambda *args: plain(*args) * 1.01)
    with pytest.raises(LaneRefused, match="against mlx-lm"):
        _installed(tiny_llama())


def test_damaged_weights_are_refused() -> None:
    """Not a number in mlx-lm's own logits is no reason to serve them."""
    net: Any = tiny_llama()
    net.model.norm.weight = net.model.norm.weight * float("nan")
    with pytest.raises(LaneRefused, match="not finite"):
        _installed(net)


def test_a_family_that_cannot_lie_side_by_side_is_refused_in_one_line() -> None:
    """Whatever its code raises on wide passes is the reason; alone it gives mlx-lm's tokens."""
    asked = {**LLAMA, "model_type": "internlm2", "bias": False}
    args = internlm2.ModelArgs.from_dict(
        {**asked, "rope_scaling": {"type": "dynamic", "factor": 2}}
    )
    mx.random.seed(4)
    net = internlm2.Model(args)
    with pytest.raises(LaneRefused, match="runs at all"):
        _installed(net, Mode.AR_BATCH)
    prompt = tuple(range(5, 30))
    expected = [int(token) for token, _ in generate_step(mx.array(prompt), net, max_tokens=9)]
    assert _greedy(_installed(net), prompt, 9) == expected


def test_mlx_lms_logits_are_taken_before_anything_is_replaced() -> None:
    """They are those of the model as mlx-lm calls it, position by position."""
    net = tiny_llama()
    for found in own_logits(net, VOCAB):
        every = [*found.prompt, *found.tokens]
        plain = np.array(net(mx.array([every]))[0])[len(found.prompt) - 1 :]
        assert np.abs(found.logits - plain).max() < 1e-4


class _Masked(nn.Module):
    """A model that masks tokens it never says, as phi3small does."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.layers = net.layers
        self.shift = 0

    def __call__(self, x: mx.array, cache: Any = None) -> mx.array:
        net: Any = self.net
        logits: mx.array = net(x, cache=cache)
        logits[..., VOCAB - 12 + self.shift :] = -float("inf")
        return logits


def test_masked_tokens_are_no_damage() -> None:
    """A model that gives -inf to some tokens installs wide, drafts none of them and is compared."""
    net = _Masked(tiny_llama())
    found = _installed(net, Mode.AR_BATCH)
    assert found.arithmetic == "stock"
    assert "largest logit difference" in _agreed(found)
    assert all(token < VOCAB - 12 for token in _greedy(found, tuple(range(5, 30)), 9))


def test_other_tokens_masked_are_another_model() -> None:
    """Where one side has a number and the other none, nothing agrees."""
    net = _Masked(tiny_llama())
    own = own_logits(net, VOCAB)
    assert compare(StockTrunk(net, VOCAB), own, 1.0).passed
    net.shift = 1
    assert not compare(StockTrunk(net, VOCAB), own, 1.0).passed


def _experts() -> nn.Module:
    shape = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "head_dim": 16,
        "rope_theta": 1e4,
        "tie_word_embeddings": False,
    }
    mx.random.seed(5)
    args = qwen3_moe.ModelArgs.from_dict({**LLAMA, "model_type": "qwen3_moe", **shape})
    return qwen3_moe.Model(args)


def test_experts_that_rounding_chooses_are_reported_and_not_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A model with routers is served however far one token's logits are off; NaN is refused."""
    assert routed(_experts())
    assert not routed(tiny_llama())
    plain = reference._seen
    for off, taken in ((50.0, True), (float("nan"), False), (float("inf"), False)):
        monkeypatch.setattr(
            reference, "_seen", lambda *args, off=off: plain(*args) + np.float32(off)
        )
        if taken:
            assert "other experts" in _agreed(_installed(_experts()))
        else:
            with pytest.raises(LaneRefused, match="against mlx-lm"):
                _installed(_experts())
        with pytest.raises(LaneRefused, match="against mlx-lm"):
            _installed(tiny_llama(rope_traditional=True))  # mlx-lm's layers, no experts


def test_how_far_mlx_lm_moves_is_the_most_of_several_ways() -> None:
    """The longest in one piece, cut in the middle and before its end, against what was kept."""
    net = _sharp(tiny_llama())
    own = own_logits(net, VOCAB)
    longest = max(own, key=lambda found: len(found.prompt))
    every = [*longest.prompt, *longest.tokens]
    for cut in (0, len(longest.prompt) // 2, len(longest.prompt) - 1):
        caches, pieces = make_prompt_cache(net), [every[:cut], every[cut:]]
        rows = [np.array(net(mx.array([p]), cache=caches)[0]) for p in pieces if p]
        for found in own:
            begin = len(found.prompt) - 1
            seen = np.concatenate(rows)[begin : begin + len(found.logits)]
            assert np.abs(seen - found.logits).max() <= found.moved


def test_small_logits_are_compared_by_their_own_spread() -> None:
    """Where all logits lie within a hundredth, an error of a two-thousandth is none of rounding."""
    net: Any = tiny_llama()
    net.model.norm.weight = net.model.norm.weight * 0.01
    own = own_logits(net, VOCAB)
    spread = float(np.std([found.logits for found in own]))
    assert spread < 0.05
    trunk: Any = StockTrunk(net, VOCAB)
    trunk.arithmetic = "constant-shape"
    assert compare(trunk, own, 1.0).passed
    off = [
        Reference(found.prompt, found.tokens, found.logits + np.float32(0.02 * spread), found.moved)
        for found in own
    ]
    assert not compare(trunk, off, 1.0).passed
