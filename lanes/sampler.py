"""From logits to a token, on the host: filters, penalties, Gumbel-max choice, log probabilities.

The choice at a position is argmax(filtered logits / T + gumbel(seed, position, token)), which
samples the filtered softmax exactly (Gumbel 1954; Maddison et al. 2014) and is the same
whoever runs it. No pass sorts the vocabulary: candidates come from chunk maxima, and noise is
only worked out for tokens that can still win.

One rule orders tokens wherever two are equal, at the edge of a filter as between two scores: the
higher logit comes first, then the lower token id. So top_k keeps exactly k tokens. Sums and scores
are float64. device.py follows the same rule and leaves to this file what its float32 cannot tell.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..runtime import noise
from ..runtime.context import Sampling, TokenLogprob
from ..runtime.errors import FormError, RowError
from ..runtime.exits import Ids
from .base import Row

_CHUNKS: Final = 192  # parts of a vocabulary whose maxima stand for them
_CANDIDATES: Final = 64  # first guess at how many tokens a filter keeps
_COLD: Final = 1e-20  # a temperature below which float32 quotients may overflow

NOT_FINITE: Final = "the model produced no finite logit; the row cannot go on"

Logits = NDArray[np.float32]


def choose(logits: Logits, row: Row) -> tuple[int, TokenLogprob | None]:
    """Choose a row's next token.

    Args:
        logits: The model's own, [vocabulary]; not changed.

    Returns:
        The token and, when the row asks for it, its log probability.

    Raises:
        RowError: When the logits are not finite where it matters.
    """
    context = row.context
    key = noise.stream_key(context.seed, row.position)
    while True:  # what a form refuses near the budget's end is not allowed any more
        mine, ids = prepared(logits, row)
        token = pick(mine, context.sampling, key, ids)
        if row.fits(token):
            break
    return token, report(logits, token, context.sampling)


def prepared(logits: Logits, row: Row) -> tuple[Logits, Ids | None]:
    """Return the adjusted logits of what a row may say next, and the tokens they are of.

    Raises:
        RowError: When there are none, or the largest is no number.
    """
    ids = row.allowed()
    if ids is not None and not ids.size:
        raise FormError("no token is allowed here by the answer's form")
    mine = logits if ids is None else logits[ids]
    return finite(row.adjuster.apply(mine, row.counts, ids)), ids


def report(logits: Logits, token: int, sampling: Sampling) -> TokenLogprob | None:
    """Return a committed token's log probability when its row asks for it."""
    return None if sampling.logprobs is None else logprob_of(logits, token, sampling.logprobs)


def finite(logits: Logits) -> Logits:
    """Return logits whose largest is a number.

    Raises:
        RowError: When it is not.
    """
    if not np.isfinite(float(logits.max())):
        raise RowError(NOT_FINITE)
    return logits


def pick(logits: Logits, sampling: Sampling, key: tuple[int, int], ids: Ids | None = None) -> int:
    """Choose a token of adjusted logits with the noise named by `key`.

    Args:
        ids: The tokens the logits are of; None for the whole vocabulary.
    """
    if sampling.temperature == 0:
        at = int(logits.argmax())
    elif sampling.filtered:
        kept = filter_tokens(logits, sampling)  # in the order of the rule: the first one wins
        at = int(kept[np.argmax(_scores(logits, kept, sampling.temperature, key, ids))])
    else:
        at = _pick_unfiltered(logits, sampling.temperature, key, ids)
    return at if ids is None else int(ids[at])


def best(
    logits: Logits, sampling: Sampling, key: tuple[int, int], ids: Ids | None, count: int
) -> tuple[list[int], NDArray[np.float64]]:
    """Return the tokens with the highest scores under the noise named by `key`, best first.

    The first is what `pick` chooses.

    Args:
        ids: The tokens the logits are of; None for the whole vocabulary.
        count: How many, unless the filters keep fewer.

    Returns:
        The tokens, and their scores times the temperature, in units of logits.
    """
    temperature = sampling.temperature
    if temperature == 0:
        pool = top_tokens(logits, count)[:count]
        scores = logits[pool].astype(np.float64)
    elif sampling.filtered:
        pool = filter_tokens(logits, sampling)
        scores = temperature * _scores(logits, pool, temperature, key, ids)
    else:
        pool = _pool(logits, temperature, key, ids, count)
        scores = temperature * _scores(logits, pool, temperature, key, ids)
    order = np.argsort(-scores, kind="stable")[:count]
    found = pool[order] if ids is None else ids[pool[order]]
    return found.tolist(), scores[order]


def filter_tokens(logits: Logits, sampling: Sampling) -> Ids:
    """Return the indices that top_k, top_p and min_p keep, most likely first."""
    wanted = max(sampling.top_k, _CANDIDATES)
    while True:
        top = top_tokens(logits, wanted)
        kept = _kept(logits, top, sampling)
        if kept is not None:
            return kept
        wanted *= 8


def top_tokens(logits: Logits, count: int) -> Ids:
    """Return at least the `count` most likely indices, complete down to the last one's logit.

    Sorted by logit, then by index, so ties fall the same way everywhere.
    """
    size = logits.shape[0]
    chunk = max(1, size // _CHUNKS)
    chunks = size // chunk
    if count >= min(size, chunks):
        found = np.arange(size)
    else:
        peaks = logits[: chunks * chunk].reshape(chunks, chunk).max(axis=1)
        floor = np.partition(peaks, chunks - count)[chunks - count]
        found = np.flatnonzero(logits >= floor)
    order = np.lexsort((found, -logits[found]))
    return found[order]


def logprob_of(logits: Logits, token: int, alternatives: int) -> TokenLogprob:
    """Return a token's log probability and the likeliest alternatives under plain softmax.

    Raises:
        RowError: When any logit is NaN, or the largest is no number.
    """
    peak = float(finite(logits).max())  # of all: a form may have left out what is no number
    normaliser = peak + float(np.log(np.exp(logits - peak, dtype=np.float64).sum()))
    top = top_tokens(logits, alternatives)[:alternatives] if alternatives else ()
    return TokenLogprob(
        token,
        float(logits[token]) - normaliser,
        tuple((int(t), float(logits[t]) - normaliser) for t in top),
    )


def _kept(logits: Logits, top: Ids, sampling: Sampling) -> Ids | None:
    """Apply the filters to the likeliest tokens; None when they may keep more than these."""
    size = logits.shape[0]
    largest = float(logits[top[0]])
    weights = np.exp((logits[top].astype(np.float64) - largest) / sampling.temperature)
    if 0 < sampling.top_k < size:
        top, weights = top[: sampling.top_k], weights[: sampling.top_k]
        complete = True
    else:
        complete = len(top) == size
    end = len(top)
    if sampling.top_p < 1:
        mass = weights.sum() if complete else _total_weight(logits, sampling.temperature)
        reached = np.cumsum(weights) >= sampling.top_p * mass
        if not reached.any() and not complete:
            return None
        end = int(reached.argmax()) + 1 if reached.any() else end
        complete = True
    if sampling.min_p > 0:
        likely = int((weights[:end] >= sampling.min_p).sum())
        if likely == end and not complete:
            return None
        end = max(1, likely)
    return top[:end]


def _total_weight(logits: Logits, temperature: float) -> float:
    """Return the sum of all weights, where the largest is 1; right to some millionths.

    The largest logit goes off before the division: a quotient of thousands, as low temperatures
    give, has no digits left in float32 for its difference from another.
    """
    below = logits - logits.max()
    if temperature < _COLD:
        return float(np.exp(below.astype(np.float64) / temperature).sum())
    return float(np.exp(below / np.float32(temperature)).sum(dtype=np.float64))


def _pick_unfiltered(
    logits: Logits, temperature: float, key: tuple[int, int], ids: Ids | None
) -> int:
    pool = _pool(logits, temperature, key, ids, 1)
    return int(pool[np.argmax(_scores(logits, pool, temperature, key, ids))])


def _pool(
    logits: Logits, temperature: float, key: tuple[int, int], ids: Ids | None, count: int
) -> Ids:
    """Return tokens among which the `count` best lie: the likeliest, and those with much noise.

    They are sorted by logit, then by index.
    """
    top = top_tokens(logits, max(_CANDIDATES, count))
    if len(top) == logits.shape[0]:
        return top
    scores = _scores(logits, top, temperature, key, ids)
    good = np.argpartition(-scores, count - 1)[:count]
    # Everything else lies at or below the last candidate: to be among them it needs this much.
    needed = float(scores[good].min()) - float(logits[top[-1]]) / temperature
    if not needed <= noise.GUMBEL_MAX:  # no number where fewer than `count` logits are finite
        best: Ids = top[scores >= scores[good].min()]  # those equal to the last one, too
        return best
    every = _all_tokens(logits.shape[0]) if ids is None else ids.astype(np.uint32)
    bits = noise.token_bits(key, every)
    rivals = np.flatnonzero(bits >= np.uint32(noise.bits_at_least(needed)))
    pool = np.union1d(rivals, top[scores >= scores[good].min()])
    ordered: Ids = pool[np.lexsort((pool, -logits[pool]))]
    return ordered


def _scores(
    logits: Logits, at: Ids, temperature: float, key: tuple[int, int], ids: Ids | None
) -> NDArray[np.float64]:
    tokens = at if ids is None else ids[at]
    bits = noise.token_bits(key, tokens.astype(np.uint32))
    return logits[at].astype(np.float64) / temperature + noise.gumbel(bits)


def _all_tokens(size: int) -> NDArray[np.uint32]:
    return np.arange(size, dtype=np.uint32)
