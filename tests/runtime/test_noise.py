"""Noise: pinned values, the right distribution, and no dependence on who asks."""

import numpy as np

from paceline.runtime import noise


def test_values_never_change() -> None:
    """The noise is part of what users reproduce runs by, so its values are pinned."""
    key = noise.stream_key(42, 7)
    bits = noise.token_bits(key, np.arange(4, dtype=np.uint32))
    assert key == (3242505623, 2431356136)
    assert bits.tolist() == [3470219978, 264641912, 1940624090, 4234224965]


def test_a_subset_of_tokens_sees_the_same_noise() -> None:
    """A token's noise does not depend on which other tokens are asked for."""
    key = noise.stream_key(3, 11)
    everything = noise.token_bits(key, np.arange(1000, dtype=np.uint32))
    some = np.array([5, 999, 17], dtype=np.uint32)
    assert np.array_equal(noise.token_bits(key, some), everything[some])


def test_seed_position_and_purpose_each_change_the_noise() -> None:
    """Streams of different names share nothing visible."""
    tokens = np.arange(4096, dtype=np.uint32)
    names = [(1, 1, 0), (2, 1, 0), (1, 2, 0), (1, 1, 1), (2**63, 1, 0)]
    streams = [noise.token_bits(noise.stream_key(*name), tokens) for name in names]
    for i, a in enumerate(streams):
        for b in streams[i + 1 :]:
            assert (a == b).sum() <= 1
            correlation = np.corrcoef(a.astype(float), b.astype(float))[0, 1]
            assert abs(correlation) < 0.08


def test_bits_are_uniform_over_tokens_and_over_positions() -> None:
    """Chi-square over 64 bins, along both axes that sampling walks."""
    tokens = np.arange(1 << 16, dtype=np.uint32)
    across_tokens = noise.token_bits(noise.stream_key(9, 9), tokens)
    one = np.array([123], dtype=np.uint32)
    across_positions = np.array(
        [noise.token_bits(noise.stream_key(9, p), one)[0] for p in range(1 << 14)]
    )
    for bits in (across_tokens, across_positions):
        counts = np.bincount(bits >> 26, minlength=64)
        expected = len(bits) / 64
        chi_square = ((counts - expected) ** 2 / expected).sum()
        assert 30 < chi_square < 110  # 63 degrees of freedom: 5 sigma either way


def test_gumbel_has_its_mean_variance_and_bounds() -> None:
    """Standard Gumbel noise: mean 0.5772, variance pi^2 / 6, and never above its bound."""
    bits = noise.token_bits(noise.stream_key(1, 1), np.arange(1 << 18, dtype=np.uint32))
    values = noise.gumbel(bits)
    assert abs(values.mean() - 0.5772) < 0.01
    assert abs(values.var() - np.pi**2 / 6) < 0.03
    extreme = noise.gumbel(np.array([0, 2**32 - 1], dtype=np.uint32))
    assert extreme[1] <= noise.GUMBEL_MAX + 1e-6
    assert np.isfinite(extreme).all()


def test_bits_at_least_is_a_safe_lower_bound() -> None:
    """No bits below the bound reach the threshold, and bits well above it do."""
    for threshold in (-2.0, 0.0, 1.0, 5.0, 12.0, 20.0):
        bound = noise.bits_at_least(threshold)
        if bound > 0:
            below = noise.gumbel(np.array([bound - 1], dtype=np.uint32))[0]
            assert below < threshold
