"""Choosing on the device: the same noise, the same filters, the same tokens as on the host."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.lanes import device, sampler
from paceline.runtime import noise
from paceline.runtime.context import Sampling


@given(st.integers(0, 2**64 - 1), st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
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
@settings(max_examples=40, deadline=None)
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
    found = device.pick_keyed(mx.array(logits), asked, keys, ids).tolist()
    expected = [
        sampler.pick(row, sampling, key, ids)
        for row, sampling, key in zip(logits, asked, keys, strict=True)
    ]
    assert found == expected


def test_where_to_choose_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device is taken only when it is clearly faster."""
    for times, taken in (((1.0, 2.0), True), ((1.0, 1.2), False), ((2.0, 1.0), False)):
        left = iter(times)
        monkeypatch.setattr(device, "_best_of", lambda run, left=left: next(left))
        assert device.device_is_faster(64) is taken
