"""Installing lanes: what is checked, what is refused, and that a refusal names its reason."""

from collections.abc import Sequence

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import gemma3_text, qwen2
from tests.lanes.tiny import CARD, VOCAB, tiny_llama

from paceline.lanes.base import Trunk
from paceline.lanes.fork import Fork
from paceline.lanes.install import NEEDS, Installed, Wanted, install
from paceline.lanes.known import unsupported
from paceline.lanes.lockstep import LockstepTrunk
from paceline.lanes.ragged import Layout, Pass, RowSlots
from paceline.lanes.selfcheck import LaneChecker
from paceline.lanes.stock import StockTrunk
from paceline.lanes.tiles import Tiles
from paceline.lanes.tree import Reach
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.errors import LaneRefused, ModelError
from paceline.runtime.model import LoadedModel
from paceline.runtime.modes import ONE_AT_A_TIME, Mode


class _Leaky:
    """A trunk in which a row sees a trace of the row beside it."""

    arithmetic, prefill_tile, vocab_size = "leaky", 64, VOCAB

    def __init__(self, inner: Trunk, leak: float, bias: float) -> None:
        self._inner = inner
        self.halves = inner.halves
        self._leak = leak
        self._bias = bias

    def tile_for(self, rows: int) -> int:
        return 1

    def add_head_layer(self) -> int:
        return self._inner.add_head_layer()

    def new_row(self) -> RowSlots:
        return self._inner.new_row()

    def new_slots(self, count: int) -> RowSlots:
        return self._inner.new_slots(count)

    def prefill(self, slots: RowSlots, tokens: Sequence[int], *, want: str) -> Pass:
        return self._inner.prefill(slots, tokens, want=want)

    def step(self, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        passed = self._inner.step(slots, layout, tokens)
        if layout.total > 1:
            assert passed.logits is not None
            if self._leak:  # even zero times a neighbour that is NaN would be NaN
                passed.logits += self._leak * mx.roll(passed.logits, 1, 0)
            passed.logits += self._bias
        return passed

    def branch(self, fork: Fork, reach: Reach, tokens: mx.array) -> Pass:
        return self._inner.branch(fork, reach, tokens)


def _stock() -> StockTrunk:
    return StockTrunk(tiny_llama(), VOCAB)


def test_every_mode_gets_the_geometries_it_needs(installed: Installed) -> None:
    """The batch mode has all three widths, each with its receipt."""
    assert [lane.spec.name for lane in installed.lanes] == ["ar-b1", "ar-b3", "ar-b8"]
    for lane in installed.lanes:
        assert all(check.passed for check in lane.receipt.checks)
        assert {check.name for check in lane.receipt.checks} >= {"row isolation", "against B1"}


def test_the_starter_model_has_the_same_bits_at_every_width(installed: Installed) -> None:
    """On a CPU in float32 the receipts say zero, not merely little."""
    assert installed.arithmetic == "constant-shape"
    assert [lane.receipt.max_logit_difference for lane in installed.lanes] == [0.0, 0.0, 0.0]
    assert len({lane.spec.tile for lane in installed.lanes}) == 1


def test_a_lane_whose_rows_leak_is_refused() -> None:
    """A trace of one row in another fails isolation, and the refusal names the check."""
    with pytest.raises(LaneRefused, match="row isolation") as refused:
        LaneChecker(_Leaky(_stock(), 1e-6, 0.0), 2e-3, 3).check("ar-b3", 3)
    assert refused.value.lane == "ar-b3"


def test_a_lane_far_from_b1_is_refused() -> None:
    """A wide lane whose logits differ by more than rounding is refused."""
    with pytest.raises(LaneRefused, match="against B1"):
        LaneChecker(_Leaky(_stock(), 0.0, 0.1), 2e-3, 8).check("ar-b8", 8)


def test_a_lane_that_is_not_finite_is_refused() -> None:
    """NaN in any step fails the lane."""
    with pytest.raises(LaneRefused, match="finite"):
        LaneChecker(_Leaky(_stock(), 0.0, float("nan")), 2e-3, 8).check("ar-b8", 8)


def test_stock_lanes_pass_their_checks_on_another_family() -> None:
    """A family without constant-shape layers runs on mlx-lm's own, within the type's bound."""
    mx.random.seed(2)
    net = qwen2.Model(
        qwen2.ModelArgs(
            model_type="qwen2",
            hidden_size=64,
            num_hidden_layers=2,
            intermediate_size=96,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-5,
            vocab_size=VOCAB,
        )
    )
    found = install(LoadedModel(net, CARD), Wanted(Mode.AR_BATCH))
    assert found.arithmetic == "stock"
    assert "Llama" in found.why
    assert found.lanes[2].receipt.max_logit_difference < 2e-3


def test_a_lone_row_may_trade_its_bits_for_speed() -> None:
    """Without exact_widths B1 pads nothing, and differs from wider lanes by rounding at most."""
    model = LoadedModel(tiny_llama(), CARD)
    lanes = install(model, Wanted(Mode.AR_BATCH, exact_widths=False)).lanes
    assert lanes[0].spec.tile == 1
    assert all(lane.receipt.max_logit_difference < 1e-4 for lane in lanes)


def test_narrow_settings_install_no_wide_lane() -> None:
    """With decode_batch_max 2 there is no B8 to check."""
    found = install(LoadedModel(tiny_llama(), CARD), Wanted(Mode.AR_BATCH, 2))
    assert [lane.spec.geometry for lane in found.lanes] == [1, 3]


def _sliding() -> nn.Module:
    mx.random.seed(3)
    return gemma3_text.Model(
        gemma3_text.ModelArgs(
            model_type="gemma3_text",
            hidden_size=32,
            num_hidden_layers=2,
            intermediate_size=32,
            num_attention_heads=2,
            head_dim=16,
            vocab_size=VOCAB,
            num_key_value_heads=1,
            sliding_window=8,
            sliding_window_pattern=2,
        )
    )


def test_a_model_with_other_caches_is_refused_where_rows_lie_side_by_side() -> None:
    """A sliding-window cache has no wide lane; the message names it and the modes that work."""
    with pytest.raises(ModelError, match=r"RotatingKVCache.*serial or cooperative"):
        install(LoadedModel(_sliding(), CARD), Wanted(Mode.AR_BATCH))


def test_a_model_with_other_caches_runs_alone() -> None:
    """At B1 any family runs on its own caches, and gives what mlx-lm gives past its window."""
    net = _sliding()
    (lane,) = install(LoadedModel(net, CARD), Wanted(Mode.SERIAL)).lanes
    prompt = tuple(range(3, 33))
    row = lane.open("r", RowContext(prompt, Sampling(temperature=0), 0, 20, frozenset()))
    lane.prefill(row, 1000)
    for _ in range(19):
        lane.step([row], [0])
    steps = generate_step(mx.array(prompt), net, max_tokens=20)
    assert row.generated == [int(token) for token, _ in steps]


def test_every_mode_has_lanes() -> None:
    """None is only a name: B1 alone where one row steps at a time, all geometries elsewhere."""
    assert set(NEEDS) == set(Mode)
    alone = {mode for mode, geometries in NEEDS.items() if geometries == (1,)}
    assert alone == ONE_AT_A_TIME | {Mode.COOPERATIVE}


def test_constant_shape_says_why_it_cannot() -> None:
    """Packed weights and sliding windows are named as the reason."""
    packed = tiny_llama()
    nn.quantize(packed, group_size=32, bits=4)
    assert "unpacked" in (unsupported(packed) or "")
    sliding = tiny_llama(layer_types=["full_attention", "sliding_attention"], sliding_window=4)
    assert "sliding" in (unsupported(sliding) or "")
    assert unsupported(tiny_llama()) is None


@pytest.mark.parametrize("bias", [False, True])
def test_the_rebuilt_layers_compute_what_llama_computes(bias: bool) -> None:
    """Fused, tiled and blocked, a random model's logits equal mlx-lm's within rounding."""
    plain = tiny_llama(attention_bias=bias, mlp_bias=bias, tie_word_embeddings=False)
    tokens = list(range(1, 150))
    expected = np.array(plain(mx.array([tokens]))[0])
    trunk = LockstepTrunk(tiny_llama_like(plain, bias), Tiles(8, 16, 8), VOCAB)
    slots = trunk.new_row()
    for start in range(0, 128, 64):
        trunk.prefill(slots, tokens[start : start + 64], want="none")
    at = 128
    while at < 149:
        count = min(1 + at % 5, 149 - at)
        found = trunk.step(slots, Layout([count]), mx.array(tokens[at : at + count])).host()
        slots.advance(0, count)
        assert np.abs(found - expected[at : at + count]).max() < 1e-4
        at += count


def tiny_llama_like(plain: nn.Module, bias: bool) -> nn.Module:
    """Return a second model with the same weights, since a trunk takes its model over."""
    twin = tiny_llama(attention_bias=bias, mlp_bias=bias, tie_word_embeddings=False)
    twin.update(plain.parameters())
    return twin
