"""Accepting drafts: what is committed follows the model's own distribution, whatever is drafted."""

from collections import Counter
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from paceline.lanes import sampler, verify
from paceline.lanes.base import Row
from paceline.lanes.choosing import HostChooser, Span
from paceline.lanes.penalties import Adjuster
from paceline.lanes.verify import ACCEPTANCE, Coupled, Draft, Rejection, follow, spread
from paceline.runtime import noise
from paceline.runtime.context import RowContext, Sampling

SIZE = 6
LENGTH = 2  # tokens whose joint distribution is tested
_RNG = np.random.default_rng(3)
# What the model and a bad head say after each token; they have little to do with each other.
MODEL = (_RNG.standard_normal((SIZE, SIZE)) * 1.5).astype(np.float32)
HEAD = (_RNG.standard_normal((SIZE, SIZE)) * 1.5).astype(np.float32)
IDS = np.array([0, 1, 2, 4, 5])  # the head drafts no 3, which the model chooses all the same

SAMPLERS = {
    "plain": Sampling(temperature=1.0),
    "hot": Sampling(temperature=1.4),
    "top_p and top_k": Sampling(temperature=0.8, top_p=0.85, top_k=4),
    "min_p": Sampling(temperature=1.2, min_p=0.15),
    "penalties": Sampling(
        temperature=1.0, repetition_penalty=1.6, frequency_penalty=0.7, presence_penalty=0.4
    ),
    "bias": Sampling(temperature=1.0, logit_bias=((2, 1.5), (4, -3.0))),
}


def _row(sampling: Sampling, seed: int) -> Row:
    context = RowContext((1,), sampling, seed, 99, frozenset())
    return Row("r", context, None)  # type: ignore[arg-type]


def _speculate(acceptance: verify.Acceptance, row: Row, depth: int) -> None:
    """Run one step over the tables as a lane runs it over a model."""
    drafts: list[Draft] = []
    last = row.last_token
    logits = [MODEL[last]]
    for _ in range(depth):
        drafts.append(acceptance.draft(HEAD[last][IDS], row, drafts, IDS))
        last = drafts[-1].token
        logits.append(MODEL[last])
    acceptance.verify(np.stack(logits), row, drafts)


def _exact(sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Return the probability of every beginning, by walking all of them."""
    shares = {}
    for tokens in product(range(SIZE), repeat=LENGTH):
        chance, counts, last = 1.0, Counter[int](), 1
        for token in tokens:
            logits = Adjuster(sampling, (1,)).apply(MODEL[last], counts)
            found = spread(logits, sampling, None)
            chance *= dict(zip(found.tokens.tolist(), found.shares.tolist(), strict=True)).get(
                token, 0.0
            )
            counts[token] += 1
            last = token
        shares[tokens] = chance
    return shares


def _chi_square(counts: Counter[tuple[int, ...]], shares: dict[tuple[int, ...], float]) -> float:
    """Return how many standard deviations the statistic lies above its mean."""
    total = sum(counts.values())
    assert all(shares[found] > 0 for found in counts), "a token that cannot be chosen was committed"
    cells = [(counts[key], share * total) for key, share in shares.items() if share > 0]
    large = [cell for cell in cells if cell[1] >= 5]
    rest = (sum(c[0] for c in cells if c[1] < 5), sum(c[1] for c in cells if c[1] < 5))
    kept = [*large, rest] if rest[1] >= 5 else large
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in kept)
    freedom = len(kept) - 1
    return float((statistic - freedom) / np.sqrt(2 * freedom))


def _sample(
    acceptance: verify.Acceptance, sampling: Sampling, depth: int, draws: int
) -> Counter[tuple[int, ...]]:
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(draws):
        row = _row(sampling, seed * 7919)
        while len(row.generated) < LENGTH:
            _speculate(acceptance, row, depth)
        counts[tuple(row.generated[:LENGTH])] += 1
    return counts


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLERS)
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("acceptance", ACCEPTANCE.values(), ids=ACCEPTANCE)
def test_committed_tokens_follow_the_models_distribution(
    acceptance: verify.Acceptance, depth: int, name: str
) -> None:
    """Chi-square of the first tokens' joint distribution, with a head that is mostly wrong."""
    sampling = SAMPLERS[name]
    counts = _sample(acceptance, sampling, depth, 1500)
    assert _chi_square(counts, _exact(sampling)) < 4.5


class _WithoutResidual(Rejection):
    """Draws from the model's whole distribution after a rejection: a well-known mistake."""

    def _decide(self, logits: NDArray[np.float32], row: Row, draft: Draft) -> int:
        token = super()._decide(logits, row, draft)
        if token == draft.token:
            return token
        key = noise.stream_key(row.context.seed, row.position, noise.RESIDUAL)
        return sampler.pick(logits, row.context.sampling, key)


def _one_key(monkeypatch: pytest.MonkeyPatch) -> verify.Acceptance:
    """Let every purpose draw the same noise."""
    plain = noise.stream_key
    monkeypatch.setattr(noise, "stream_key", lambda seed, at, purpose=0: plain(seed, at, 0))
    return Rejection()


def _one_position(monkeypatch: pytest.MonkeyPatch) -> verify.Acceptance:
    """Let every position draw the same noise."""
    plain = noise.stream_key
    monkeypatch.setattr(noise, "stream_key", lambda seed, at, purpose=0: plain(seed, 0, purpose))
    return Coupled()


@pytest.mark.slow
@pytest.mark.parametrize(
    "broken",
    [lambda _: _WithoutResidual(), _one_key, _one_position],
    ids=["residual", "purpose", "position"],
)
def test_the_chi_square_sees_what_is_wrong(
    broken: Callable[[pytest.MonkeyPatch], verify.Acceptance], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing residual or a shared noise key fails the same test by far."""
    sampling = SAMPLERS["plain"]
    counts = _sample(broken(monkeypatch), sampling, 1, 8000)
    assert _chi_square(counts, _exact(sampling)) > 8


@pytest.mark.parametrize("name", SAMPLERS)
def test_coupled_commits_what_plain_decoding_commits(name: str) -> None:
    """The same seed gives the same tokens at every depth."""
    for seed in range(40):
        runs = []
        for depth in range(5):
            row = _row(SAMPLERS[name], seed)
            while len(row.generated) < 12:
                _speculate(ACCEPTANCE["coupled"], row, depth)
            runs.append(row.generated[:12])
        assert all(run == runs[0] for run in runs)


@pytest.mark.parametrize("acceptance", ACCEPTANCE.values(), ids=ACCEPTANCE)
def test_greedy_takes_the_models_best_token_only(acceptance: verify.Acceptance) -> None:
    """At temperature 0 both kinds accept a draft exactly when it is the model's first choice."""
    row = _row(Sampling(temperature=0), 1)
    while len(row.generated) < 20:
        _speculate(acceptance, row, 3)
    best = [1]
    for _ in range(20):
        best.append(int(MODEL[best[-1]].argmax()))
    assert row.generated[:20] == best[1:]


def test_rejection_accepts_more_than_coupled() -> None:
    """That is its one advantage, with a head that is roughly right."""
    accepted = dict.fromkeys(ACCEPTANCE, 0)
    logits = (_RNG.standard_normal((2, 300)) * 1.5).astype(np.float32)
    near = (logits[0] + 0.7 * _RNG.standard_normal(300)).astype(np.float32)
    for name, acceptance in ACCEPTANCE.items():
        for seed in range(1500):
            row = _row(Sampling(temperature=1.0), seed)
            draft = acceptance.draft(near, row, [], None)
            accepted[name] += acceptance.verify(logits, row, [draft]).accepted
    assert accepted["rejection"] > 1.04 * accepted["coupled"]


def test_nothing_is_committed_behind_an_end_token() -> None:
    """An accepted draft that ends the row is the last token, and is counted as accepted."""
    context = RowContext((1,), Sampling(temperature=0), 0, 99, frozenset({2}))
    logits = np.full((3, SIZE), -5.0, np.float32)
    logits[:, 2] = 5
    for acceptance in ACCEPTANCE.values():
        row = Row("r", context, None)  # type: ignore[arg-type]
        one = verify.Spread(np.array([2]), np.array([1.0]))
        verdict = acceptance.verify(logits, row, [Draft(2, one), Draft(2, one)])
        assert (verdict.tokens, verdict.accepted, row.generated) == ([2], 1, [2])


def test_choices_made_elsewhere_are_followed_to_the_first_difference() -> None:
    """A device's choices are committed up to and with the first that was not drafted."""
    row = _row(Sampling(), 0)
    verdict = follow(row, ((token, None) for token in (4, 1, 3)), [Draft(4), Draft(2)])
    assert (verdict.tokens, verdict.accepted, row.generated) == ([4, 1], 1, [4, 1])


def test_log_probabilities_are_the_models_own_at_every_position() -> None:
    """Each committed token reports plain softmax of the logits it was verified against."""
    row = _row(Sampling(temperature=0, logprobs=2), 0)
    drafts = [Draft(int(MODEL[1].argmax())), Draft(0)]
    logits = np.stack([MODEL[1], MODEL[drafts[0].token], MODEL[0]])
    verdict = Coupled().verify(logits, row, drafts)
    assert len(verdict.logprobs) == len(verdict.tokens) >= 2
    for at, entry in enumerate(verdict.logprobs):
        plain = logits[at] - np.log(np.exp(logits[at].astype(np.float64)).sum())
        assert entry.token == verdict.tokens[at]
        assert entry.logprob == pytest.approx(float(plain[entry.token]), abs=1e-5)


def test_a_row_that_fails_leaves_the_others_alone() -> None:
    """Logits without a number end their row with an error and nobody else's."""
    good, bad = _row(Sampling(temperature=0), 0), _row(Sampling(temperature=0), 0)
    logits = np.stack([MODEL[1], np.full(SIZE, np.nan, np.float32)])
    chooser = HostChooser(Coupled())
    first = chooser.verify_one(logits, Span(good, 0, []))
    second = chooser.verify_one(logits, Span(bad, 1, []))
    assert first.error is None
    assert "no finite logit" in (second.error or "")
