"""Choosing tokens: the fast paths against plain definitions, and the distribution itself."""

from collections.abc import Iterable
from typing import Any

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


@settings(max_examples=150)
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


@settings(max_examples=60)
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
    out = row.adjuster.apply(logits, row.counts)
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


_SPARSE = ((4, 3.0), (60, -2.5), (399, 0.25))
_ADJUSTED = [
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.8, logit_bias=_SPARSE),
    Sampling(presence_penalty=0.5, frequency_penalty=0.25),
    Sampling(logit_bias=tuple((token, token / 7 - 20) for token in range(399, -1, -1))),
]


def _adjusted_plainly(
    logits: NDArray[np.float32], s: Sampling, prompt: tuple[int, ...], counts: dict[int, int]
) -> NDArray[np.float32]:
    """Go through the vocabulary token by token."""
    out = logits.copy()
    bias = dict(s.logit_bias)
    for token in range(len(out)):
        if token in prompt or token in counts:
            factor = np.float32(s.repetition_penalty)
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
        if token in counts:
            times = np.float32(counts[token])
            out[token] -= np.float32(s.presence_penalty + s.frequency_penalty * times)
        out[token] += np.float32(bias.get(token, 0.0))
    return out


@pytest.mark.parametrize("asked", _ADJUSTED)
@pytest.mark.parametrize("some", [False, True])
def test_what_is_made_once_adjusts_every_position_alike(asked: Sampling, some: bool) -> None:
    """Position after position, the arrays that are kept give the bits of a plain loop."""
    prompt = tuple(map(int, _RNG.integers(0, 200, 50)))
    row = _row(asked, prompt=prompt)
    for token in (7, 7, 399, int(prompt[0]), 250):
        logits = _logits(400, 3.0, token)
        ids = np.sort(_RNG.permutation(400)[:90]).astype(np.int64) if some else None
        expected = _adjusted_plainly(logits, asked, prompt, row.counts)
        mine = logits if ids is None else logits[ids]
        found = row.adjuster.apply(mine, row.counts, ids)
        assert np.array_equal(found, expected if ids is None else expected[ids])
        row.commit(token)


def test_bias_and_prompt_are_read_once_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full bias and a long prompt are not gone through again at the next position."""
    made = []
    plain = np.fromiter

    def fromiter(values: Iterable[float], *rest: Any) -> Any:
        array = plain(values, *rest)
        made.append(len(array))
        return array

    monkeypatch.setattr(np, "fromiter", fromiter)
    asked = Sampling(
        repetition_penalty=1.1, logit_bias=tuple((token, 0.5) for token in range(1000))
    )
    row = _row(asked, prompt=tuple(range(900)))
    for token in (3, 4):
        sampler.choose(_logits(1000, 1.0, token), row)
        row.commit(token)
    del made[:]
    sampler.choose(_logits(1000, 1.0, 9), row)
    assert max(made) <= len(row.counts)


@given(st.integers(0, 2**32), st.integers(1, 9), st.sampled_from([40, 5000]))
@settings(max_examples=60)
def test_equal_logits_keep_exactly_k_and_the_lowest_ids(seed: int, k: int, size: int) -> None:
    """Ties at the edge of top_k fall by token id, and equal scores by logit, then by id."""
    logits = np.round(_logits(size, 1.0, seed))
    kept = sampler.filter_tokens(logits, Sampling(top_k=k))
    assert kept.tolist() == np.lexsort((np.arange(size), -logits))[:k].tolist()
    # So cold that float64 loses the noise beside the logits: every best token has one score.
    cold = sampler.pick(logits, Sampling(temperature=1e-20), noise.stream_key(seed, 1))
    assert cold == int(logits.argmax())


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_log_probability_is_a_number_or_none_at_all(bad: float) -> None:
    """What a form leaves out counts in the softmax: without a number there, the row ends."""
    logits = _logits(50, 1.0, 1)
    logits[40] = bad
    with pytest.raises(RowError, match="no finite logit"):
        sampler.logprob_of(logits, 3, 2)
    logits[40] = -np.inf
    assert np.isfinite(sampler.logprob_of(logits, 3, 2).logprob or 0.0)
