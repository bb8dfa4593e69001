"""Choosing on the device: the same noise, the same filters, the same tokens as on the host."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.lanes import device, sampler
from paceline.lanes.base import Row
from paceline.lanes.choosing import HostChooser, Span
from paceline.lanes.verify import Coupled, Draft
from paceline.runtime import noise
from paceline.runtime.context import RowContext, Sampling


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
@settings(max_examples=30)
def test_noise_has_the_hosts_bits(seed: int, position: int) -> None:
    """Integer mixing gives the same 32 bits a token in MLX as in numpy."""
    key = noise.stream_key(seed, position)
    tokens = np.arange(0, 49_152, 17, dtype=np.uint32)
    found = device.token_bits(mx.array([key], mx.uint32), mx.array(tokens))
    assert np.array_equal(np.array(found)[0], noise.token_bits(key, tokens))


def test_gumbel_noise_is_right_at_both_ends() -> None:
    """32-bit floats round 1 - 2^-33 to 1, whose noise would be infinite; here it is not."""
    bits = np.array([0, 1, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1], np.uint32)
    found = np.array(device.gumbel(mx.array(bits)))
    assert np.isfinite(found).all()
    assert np.allclose(found, noise.gumbel(bits), rtol=1e-5)


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(0, 2**32),
    st.sampled_from([1.0, 3.0, 7.0]),
    st.lists(
        st.builds(
            Sampling,
            temperature=st.sampled_from([0.0, 0.4, 1.0, 1.6]),
            top_k=st.sampled_from([0, 1, 30]),
            top_p=st.sampled_from([1.0, 0.9, 0.3]),
            min_p=st.sampled_from([0.0, 0.1]),
        ),
        min_size=1,
        max_size=5,
    ),
    st.booleans(),
)
def test_the_device_chooses_what_the_host_chooses(
    seed: int, spread: float, asked: list[Sampling], trimmed: bool
) -> None:
    """Rows with any mix of samplers, over the whole vocabulary and over a draft vocabulary."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(20_000)[:4_000]).astype(np.int64) if trimmed else None
    size = 4_000 if trimmed else 20_000
    logits = (rng.standard_normal((len(asked), size)) * spread).astype(np.float32)
    keys = [noise.stream_key(seed, row) for row in range(len(asked))]
    found = device.pick_keyed(mx.array(logits), asked, keys, ids).tokens.tolist()
    expected = [
        sampler.pick(row, sampling, key, ids)
        for row, sampling, key in zip(logits, asked, keys, strict=True)
    ]
    assert found == expected


def _by_the_rule(logits: NDArray[np.float32], s: Sampling, key: tuple[int, int]) -> int:
    """Choose with everything sorted and added in float64: logit first, then token id."""
    if s.temperature == 0:
        return int(logits.argmax())
    order = np.lexsort((np.arange(len(logits)), -logits))
    scaled = logits[order].astype(np.float64) / s.temperature
    weights = np.exp(scaled - scaled[0])
    if s.top_k:
        order, scaled, weights = order[: s.top_k], scaled[: s.top_k], weights[: s.top_k]
    if s.top_p < 1:
        end = int((np.cumsum(weights) >= s.top_p * weights.sum()).argmax()) + 1
        order, scaled, weights = order[:end], scaled[:end], weights[:end]
    likely = max(1, int((weights >= s.min_p).sum()))
    order, scaled = order[:likely], scaled[:likely]
    scores = scaled + noise.gumbel(noise.token_bits(key, order.astype(np.uint32)))
    return int(order[scores.argmax()])


_SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-20, 0.001, 0.002, 0.01, 0.05, 0.4, 1.0, 1.6]),
    top_k=st.sampled_from([0, 1, 2, 5, 30]),
    top_p=st.sampled_from([1.0, 1 - 1e-9, 0.9, 0.5, 0.3, 0.0]),
    min_p=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.sampled_from([0.0, 1.0, 3.0]),
    st.sampled_from([1.0, 0.25, None]),
    st.sampled_from([7, 600, 3000]),
    st.lists(_SAMPLINGS, min_size=1, max_size=4),
)
def test_host_and_device_follow_one_rule_through_ties(
    seed: int, spread: float, grain: float | None, size: int, asked: list[Sampling]
) -> None:
    """On coarse logits, as 16-bit models have, both choose what a plain float64 sort chooses."""
    raw = (np.random.default_rng(seed).standard_normal((len(asked), size)) * spread).astype(
        np.float32
    )
    if grain is None:
        logits = np.array(mx.array(raw).astype(mx.bfloat16).astype(mx.float32))
    else:
        logits = np.round(raw / np.float32(grain)) * np.float32(grain)
    keys = [noise.stream_key(seed, row) for row in range(len(asked))]
    picks = device.pick_keyed(mx.array(logits), asked, keys, None)
    found = zip(np.array(picks.tokens).tolist(), np.array(picks.sure).tolist(), strict=True)
    for row, sampling, key, (token, sure) in zip(logits, asked, keys, found, strict=True):
        expected = _by_the_rule(row, sampling, key)
        assert sampler.pick(row, sampling, key) == expected
        assert token == expected or not sure


@pytest.mark.parametrize("peak", [0.0, 90.0, -90.0])
@pytest.mark.parametrize("temperature", [0.001, 0.002, 0.01, 0.05])
def test_filters_are_right_at_low_temperatures(temperature: float, peak: float) -> None:
    """Close leaders far from 0, and a top_p near a sum of theirs: host and device by the rule."""
    rng = np.random.default_rng(3)
    for at in range(60):
        logits = (rng.standard_normal(4000) * 0.5).astype(np.float32) + np.float32(peak - 5)
        leaders = rng.random(3).astype(np.float32) * np.float32(temperature)
        logits[:3] = np.float32(peak) - leaders
        sums = np.cumsum(
            np.exp(np.sort((logits[:3] - peak).astype(np.float64))[::-1] / temperature)
        )
        top_p = float(sums[rng.integers(2)] / sums[2] * (1 + rng.choice([-1, 1]) * 3e-4))
        sampling, key = Sampling(temperature=temperature, top_p=top_p), noise.stream_key(at, 1)
        expected = _by_the_rule(logits, sampling, key)
        assert sampler.pick(logits, sampling, key) == expected
        picks = device.pick_keyed(mx.array(logits[None]), [sampling], [key], None)
        assert picks.tokens.tolist() == [expected] or picks.sure.tolist() == [False]


class _Logits:
    """A pass that is nothing but its logits."""

    def __init__(self, logits: NDArray[np.float32]) -> None:
        self.logits = mx.array(logits)
        self._host = logits

    def settle(self, *more: mx.array) -> None:
        mx.eval(*more)

    def host(self) -> NDArray[np.float32]:
        return self._host


@settings(max_examples=25)
@given(st.integers(0, 2**32), st.lists(_SAMPLINGS, min_size=1, max_size=3), st.integers(0, 2))
def test_a_row_commits_the_same_wherever_it_is_chosen(
    seed: int, asked: list[Sampling], depth: int
) -> None:
    """Verifying drafts beside others, both choosers commit the same tokens, ties or none."""
    rng = np.random.default_rng(seed)
    count = len(asked) * (depth + 1)
    passed: Any = _Logits(np.round(rng.standard_normal((count, 300)) * 2).astype(np.float32))
    seen = []
    for chooser in (HostChooser(Coupled()), device.DeviceChooser()):
        spans, columns = [], [mx.zeros(len(asked), mx.uint32) for _ in range(depth)]
        for at, sampling in enumerate(asked):
            context = RowContext((1,), sampling, seed + at, 9, frozenset())
            row = Row(str(at), context, None)  # type: ignore[arg-type]
            drafts: list[Draft | None] = [
                Draft(sampler.pick(passed.host()[at * (depth + 1) + d], sampling, key))
                for d in range(depth)
                for key in [noise.stream_key(row.context.seed, row.position + d)]
            ]
            spans.append(Span(row, at * (depth + 1), drafts))
        seen.append([delta.tokens for delta in chooser.verify(passed, spans, columns)])
    assert seen[0] == seen[1]
    assert all(len(tokens) == depth + 1 for tokens in seen[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_finite_logits_fails_alone(bad: float, temperature: float) -> None:
    """One bad logit among good ones, or none but bad ones: that row ends, its neighbour goes on."""
    logits = np.random.default_rng(1).standard_normal((2, 50)).astype(np.float32)
    logits[0, 3 if bad != -np.inf else slice(None)] = bad
    for sampling in (Sampling(temperature=temperature), Sampling(temperature=temperature, top_k=5)):
        rows = [
            Row(str(at), RowContext((1,), sampling, at, 9, frozenset()), None)  # type: ignore[arg-type]
            for at in range(2)
        ]
        spans = [Span(row, at, []) for at, row in enumerate(rows)]
        passed: Any = _Logits(logits)
        first, second = device.DeviceChooser().verify(passed, spans, [])
        assert first.error is not None
        assert second.error is None
        assert len(second.tokens) == 1


def test_where_to_choose_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is taken only when it is clearly faster."""
    for times, taken in (((1.0, 2.0), True), ((1.0, 1.2), False), ((2.0, 1.0), False)):
        left = iter(times)
        monkeypatch.setattr(device, "_best_of", lambda run, left=left: next(left))
        assert device.device_is_faster(64) is taken
