"""Choosing tokens: the fast paths against plain definitions, and the distribution itself."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from paceline.lanes import sampler
from paceline.lanes.base import Row
from paceline.runtime import noise
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.errors import RowError

_RNG = np.random.default_rng(5)


def _logits(size: int, spread: float, seed: int) -> NDArray[np.float32]:
    return (np.random.default_rng(seed).standard_normal(size) * spread).astype(np.float32)


def _plain_filter(logits: NDArray[np.float32], s: Sampling) -> set[int]:
    """Apply top_k, top_p and min_p by sorting everything."""
    order = np.lexsort((np.arange(len(logits)), -logits))
    weights = np.exp((logits[order].astype(np.float64) - logits.max()) / s.temperature)
    if s.top_k:
        order, weights = order[: s.top_k], weights[: s.top_k]
    if s.top_p < 1:
        keep = int((np.cumsum(weights) < s.top_p * weights.sum()).sum()) + 1
        order, weights = order[:keep], weights[:keep]
    if s.min_p:
        order = order[weights >= s.min_p]
    return set(map(int, order))


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([40, 700, 49_152]),
    st.sampled_from([0.5, 3.0, 8.0]),
    st.integers(0, 2**32),
    st.sampled_from([0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 7, 300]),
    st.sampled_from([1.0, 0.999, 0.9, 0.1]),
    st.sampled_from([0.0, 0.02, 0.5]),
)
def test_filters_keep_what_a_full_sort_keeps(
    size: int, spread: float, seed: int, temperature: float, k: int, p: float, min_p: float
) -> None:
    """top_k, top_p and min_p keep the same tokens as sorting the whole vocabulary would."""
    logits = _logits(size, spread, seed)
    asked = Sampling(temperature=temperature, top_k=min(k, size), top_p=p, min_p=min_p)
    if asked.top_k == 0 and p == 1 and min_p == 0:
        return
    kept = sampler.filter_tokens(logits, asked)
    plain = _plain_filter(logits, asked)
    # Sums in another order may fall on the other side of top_p at its very edge.
    assert len(set(map(int, kept)) ^ plain) <= (1 if p < 1 else 0)
    assert int(kept[0]) == int(logits.argmax())


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**63), st.sampled_from([0.2, 0.7, 1.0, 1.3, 5.0]))
def test_the_lazy_draw_equals_noise_for_every_token(seed: int, temperature: float) -> None:
    """Skipping tokens that cannot win never changes who wins."""
    logits = _logits(49_152, 4.0, seed % 1000)
    key = noise.stream_key(seed, 3)
    bits = noise.token_bits(key, np.arange(len(logits), dtype=np.uint32))
    scores = logits.astype(np.float64) / temperature + noise.gumbel(bits)
    drawn = sampler.pick(logits, Sampling(temperature=temperature), key)
    assert drawn == int(scores.argmax())


@pytest.mark.parametrize(
    "asked",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.6),
        Sampling(temperature=1.5, top_p=0.8),
        Sampling(temperature=1.0, top_k=5),
        Sampling(temperature=1.2, min_p=0.1),
    ],
)
def test_draws_follow_the_filtered_softmax(asked: Sampling) -> None:
    """Chi-square of 20,000 draws over positions against the exact distribution."""
    logits = _logits(24, 1.5, 11)
    kept = sorted(_plain_filter(logits, asked))
    weights = np.exp(logits[kept].astype(np.float64) / asked.temperature)
    expected = weights / weights.sum() * 20_000
    draws = [sampler.pick(logits, asked, noise.stream_key(77, p)) for p in range(20_000)]
    counts = np.bincount(draws, minlength=24)
    assert counts.sum() == counts[kept].sum(), "a filtered token was drawn"
    chi_square = ((counts[kept] - expected) ** 2 / expected).sum()
    freedom = len(kept) - 1
    assert chi_square < freedom + 5 * np.sqrt(2 * max(freedom, 1))


def _row(asked: Sampling, prompt: tuple[int, ...] = (1, 2), seed: int = 4) -> Row:
    context = RowContext(prompt, asked, seed, 10, frozenset())
    return Row("r", context, None)  # type: ignore[arg-type]


def test_penalties_and_bias_change_logits_by_their_definition() -> None:
    """Repetition scales prompt and answer tokens; presence and frequency count the answer's."""
    asked = Sampling(
        repetition_penalty=2.0,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        logit_bias=((4, 3.0),),
    )
    row = _row(asked, prompt=(0, 1))
    for token in (2, 2, 3):
        row.commit(token)
    logits = np.array([1.0, -1.0, 2.0, 4.0, 0.0, 5.0], np.float32)
    out = sampler.adjust(logits, asked, row.prompt_set, row.counts)
    assert out.tolist() == [0.5, -2.0, 1.0 - 1.0, 2.0 - 0.75, 3.0, 5.0]
    assert logits[2] == 2.0, "the model's own logits are not touched"


def test_greedy_takes_the_best_and_the_lowest_id_among_equals() -> None:
    """Temperature 0 is argmax, with ties falling the same way everywhere."""
    logits = np.array([0.0, 3.0, 3.0, 1.0], np.float32)
    assert sampler.choose(logits, _row(Sampling(temperature=0)))[0] == 1


def test_logprobs_are_the_models_own_and_sorted() -> None:
    """Reported log probabilities ignore temperature and filters, and sum to one at most."""
    logits = _logits(500, 2.0, 3)
    asked = Sampling(temperature=0.3, top_k=1, logprobs=5)
    token, report = sampler.choose(logits, _row(asked))
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum())
    assert report is not None
    assert report.logprob == pytest.approx(float(exact[token]), abs=1e-5)
    assert [t for t, _ in report.top] == list(np.argsort(-logits, kind="stable")[:5])
    assert report.top[0][1] >= report.top[-1][1]


def test_logits_that_are_not_finite_fail_the_row() -> None:
    """NaN or all minus infinity is that row's error, not a token."""
    for value in (np.nan, -np.inf):
        with pytest.raises(RowError):
            sampler.choose(np.full(8, value, np.float32), _row(Sampling()))
