"""Choosing on the device: a step meets the host once, with the tokens and nothing else.

The noise has the same bits as on the host (runtime/noise.py), its floats are 32 bits wide. What a
device does badly stays on the host, row by row and for the whole life of a row: penalties, biases,
grammars and log probabilities.

The rule is the host's (sampler.py), ties included. With each token the device says whether 32 bits
were enough to be sure of it: whether no other token comes within their rounding, of its score or of
a filter's edge. Where they were not, about once in some thousand positions, the host chooses.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

import mlx.core as mx

from ..runtime import noise
from ..runtime.context import RowContext, Sampling
from ..runtime.exits import Ids
from . import sampler
from .base import Row, RowDelta
from .choosing import Column, HostChooser, Span, choosing_failed, known, on_host
from .ragged import Pass
from .verify import Choice, Coupled, Draft, follow

# What 32 bits may be off by. Scores: a perturbed logit that can win lies within 30 of the best, and
# its noise within 23. Shares: weights are added up in runs of _RUN, each sum's error below 5e-5.
_SCORE_SLACK: Final = 2e-4
_SHARE_SLACK: Final = 2e-4
_RUN: Final = 512
_COLDEST: Final = 1e-3  # below this temperature even 64 bits lose the noise beside the logits

_TRIES: Final = 3
_CLEARLY: Final = 1.5  # times faster the device must be; a draw would let restarts differ


class DeviceChooser:
    """Chooses on the device, by coupled acceptance."""

    name = "device"

    def __init__(self) -> None:
        self._host = HostChooser(Coupled())

    def draft(
        self,
        logits: mx.array,
        rows: Sequence[Row],
        before: Sequence[Sequence[Draft | None]],
        ids: Ids | None,
    ) -> Column:
        """See `Chooser.draft`; rows that stay on the host make the device wait for them."""
        at = [row.position + len(earlier) for row, earlier in zip(rows, before, strict=True)]
        tokens = pick(logits, rows, at, ids).tokens  # unsure or not: it is only a draft
        drafts: list[Draft | None] = [None] * len(rows)
        if not all(stays_on_device(row.context) for row in rows):
            host, found = on_host(logits), _ints(tokens)
            for i, row in enumerate(rows):
                if not stays_on_device(row.context):
                    draft = self._host.draft_one(host[i], row, before[i], ids)
                    drafts[i], found[i] = draft, draft.token
            tokens = mx.array(found, mx.uint32)
        mx.async_eval(tokens)  # the device drafts while the next pass is being described
        return Column(tokens, drafts)

    def verify(
        self, passed: Pass, spans: Sequence[Span], columns: Sequence[mx.array]
    ) -> list[RowDelta]:
        """See `Chooser.verify`."""
        assert passed.logits is not None
        rows = [span.row for span in spans for _ in range(len(span.drafts) + 1)]
        at = [span.row.position + i for span in spans for i in range(len(span.drafts) + 1)]
        picks = pick(passed.logits, rows, at, None)
        passed.settle(*picks, *columns)
        drafted = [_ints(column) for column in columns]
        found = list(zip(_ints(picks.tokens), picks.sure.tolist(), strict=True))  # type: ignore[arg-type]
        resolve(spans, drafted)
        deltas = []
        for span in spans:
            mine = found[span.first : span.first + 1 + len(span.drafts)]
            if stays_on_device(span.row.context) and all(sure for _, sure in mine):
                deltas.append(_followed(span, ((token, None) for token, _ in mine)))
            else:
                deltas.append(self._host.verify_one(passed.host(), span))
        return deltas


def _followed(span: Span, choices: Iterable[Choice]) -> RowDelta:
    """Commit a row's choices; what goes wrong in here is that row's alone."""
    try:
        return span.delta(follow(span.row, choices, known(span.drafts)))
    except Exception as error:
        return choosing_failed(span.row, error)


def resolve(spans: Sequence[Span], columns: Sequence[Sequence[int]]) -> None:
    """Fill in the drafts that only the device knew; a column has the rows that went so deep."""
    for depth, tokens in enumerate(columns):
        deep = [span for span in spans if len(span.drafts) > depth]
        for span, token in zip(deep, tokens, strict=True):
            if span.drafts[depth] is None:
                span.drafts[depth] = Draft(token)


def stays_on_device(context: RowContext) -> bool:
    """Whether a row's tokens are chosen on the device."""
    sampling = context.sampling
    adjusted = sampling.penalised or sampling.logit_bias or context.grammar is not None
    return not (adjusted or sampling.logprobs is not None)


def device_is_faster(vocab_size: int) -> bool:
    """Measure which side chooses eight rows' tokens sooner, logits on the device to begin with."""
    logits = mx.random.normal((8, vocab_size), key=mx.random.key(1))
    sampling = Sampling(temperature=0.7)
    keys = [noise.stream_key(row, 1) for row in range(8)]

    def host() -> None:
        for row, key in zip(on_host(logits + 0), keys, strict=True):
            sampler.pick(row, sampling, key)

    def device() -> None:
        mx.eval(*pick_keyed(logits + 0, [sampling] * 8, keys, None))

    return _CLEARLY * _best_of(device) < _best_of(host)


class Picks(NamedTuple):
    """What was chosen; computed when read.

    Args:
        tokens: uint32 [rows].
        sure: Whether the host is certain to choose the same, bool [rows]; never where a row's
            largest logit is no number.
    """

    tokens: mx.array
    sure: mx.array


def pick(logits: mx.array, rows: Sequence[Row], positions: Sequence[int], ids: Ids | None) -> Picks:
    """Choose a token for each of the rows' positions."""
    samplings = [row.context.sampling for row in rows]
    keys = [
        noise.stream_key(row.context.seed, position)
        for row, position in zip(rows, positions, strict=True)
    ]
    return pick_keyed(logits, samplings, keys, ids)


def pick_keyed(
    logits: mx.array,
    samplings: Sequence[Sampling],
    keys: Sequence[tuple[int, int]],
    ids: Ids | None,
) -> Picks:
    """Choose a token a row.

    Args:
        logits: [rows, tokens].
        keys: The noise of each row.
        ids: The tokens the logits are of; None for the whole vocabulary.
    """
    plain = logits.astype(mx.float32)
    peaks = mx.max(plain, axis=-1, keepdims=True)
    sound = mx.isfinite(peaks[:, 0]) & ~mx.any(mx.isnan(plain), axis=-1)
    drafted = None if ids is None else mx.array(ids, mx.uint32)
    if not any(s.temperature > 0 for s in samplings):
        at = _first(plain >= peaks)
        return Picks(at if drafted is None else drafted[at], sound)
    temperatures = mx.array([s.temperature or 1.0 for s in samplings], mx.float32)[:, None]
    hot = mx.array([s.temperature > 0 for s in samplings])[:, None]
    scaled = (plain - peaks) / temperatures
    tokens = mx.arange(logits.shape[1], dtype=mx.uint32) if drafted is None else drafted
    scores = scaled + gumbel(token_bits(mx.array(list(keys), mx.uint32), tokens))
    surely = mx.array(logits.shape[1])
    if any(s.temperature > 0 and s.filtered for s in samplings):
        ordered = -mx.sort(-plain, axis=-1)
        surely, possibly = _kept(ordered, temperatures, samplings)
        scores = mx.where(_among_first(plain, ordered, possibly), scores, float("-inf"))
    best = mx.max(scores, axis=-1, keepdims=True)
    at = _first(mx.where(hot, scores >= best, plain >= peaks))
    rivals = mx.sum(scores >= best - _SCORE_SLACK, axis=-1)
    alone = (rivals == 1) & (_rank(plain, at) < surely.reshape(-1))
    told = mx.array([s.temperature >= _COLDEST for s in samplings])
    sure = sound & ((alone & told) | ~hot[:, 0])
    return Picks(at if drafted is None else drafted[at], sure)


def token_bits(keys: mx.array, tokens: mx.array) -> mx.array:
    """Return what `noise.token_bits` does, for uint32 keys [rows, 2] and tokens: [rows, tokens]."""
    bits = _mixed(tokens[None] * mx.array(noise.TOKEN_STEP, mx.uint32) + keys[:, :1])
    return _mixed(bits ^ keys[:, 1:])


def gumbel(bits: mx.array) -> mx.array:
    """Return standard Gumbel noise, float32; exact at both ends, where 32 bits are not."""
    low = (bits.astype(mx.float32) + 0.5) * 2.0**-32
    high = ((~bits).astype(mx.float32) + 0.5) * 2.0**-32
    return -mx.log(mx.where(low < 0.5, -mx.log(low), -mx.log1p(-high)))


def _mixed(x: mx.array) -> mx.array:
    """The finaliser of runtime/noise.py."""
    x = (x ^ (x >> 16)) * mx.array(noise.MIXERS[0], mx.uint32)
    x = (x ^ (x >> 15)) * mx.array(noise.MIXERS[1], mx.uint32)
    return x ^ (x >> 16)


def _kept(
    ordered: mx.array, temperatures: mx.array, samplings: Sequence[Sampling]
) -> tuple[mx.array, mx.array]:
    """Return how many of the likeliest tokens the filters keep, surely and possibly, [rows, 1].

    Filters apply in the order of `Sampling`.

    Args:
        ordered: Logits, largest first, [rows, tokens].
    """
    size = ordered.shape[1]
    top_k = mx.array([min(s.top_k or size, size) for s in samplings])[:, None]
    top_p = mx.array([s.top_p for s in samplings], mx.float32)[:, None]
    min_p = mx.array([s.min_p for s in samplings], mx.float32)[:, None]
    # Asked of the numbers as they were sent: in 32 bits a top_p just below 1 is 1.
    any_share = mx.array([s.top_p >= 1 for s in samplings])[:, None]
    any_weight = mx.array([s.min_p <= 0 for s in samplings])[:, None]
    weights = mx.exp((ordered - ordered[:, :1]) / temperatures)
    weights = mx.where(mx.arange(size)[None] < top_k, weights, 0)
    below = _sums_before(weights)
    total = below[:, -1:] + weights[:, -1:]
    kept = []
    for slack in (-_SHARE_SLACK, _SHARE_SLACK):
        likely = any_weight | (weights >= min_p * (1 - slack))
        early = any_share | (below < (top_p + slack) * total)
        count = mx.sum(likely & early, axis=-1, keepdims=True)
        kept.append(mx.clip(mx.minimum(count, top_k), 1, size))
    return kept[0], kept[1]


def _sums_before(weights: mx.array) -> mx.array:
    """Return for each weight the sum of those before it; [rows, tokens].

    Added up run by run: one long sum in 32 bits rounds the same way each time where many weights
    are equal, and is then off by more than any slack.
    """
    rows, size = weights.shape
    runs = -(-size // _RUN)
    padded = mx.pad(weights, [(0, 0), (0, runs * _RUN - size)]).reshape(rows, runs, _RUN)
    within = mx.cumsum(padded, axis=-1)
    ends = within[:, :, -1]
    before = mx.cumsum(ends, axis=-1) - ends
    return (before[:, :, None] + within - padded).reshape(rows, -1)[:, :size]


def _among_first(logits: mx.array, ordered: mx.array, count: mx.array) -> mx.array:
    """Return which tokens are among the first `count` [rows, 1] by logit, then by index."""
    edge = mx.take_along_axis(ordered, count - 1, axis=-1)
    equal = logits == edge
    room = count - mx.sum(logits > edge, axis=-1, keepdims=True)
    return (logits > edge) | (equal & (mx.cumsum(equal.astype(mx.int32), axis=-1) <= room))


def _rank(logits: mx.array, at: mx.array) -> mx.array:
    """Return how many tokens come before the one at `at` [rows], by logit, then by index."""
    mine = mx.take_along_axis(logits, at[:, None], axis=-1)
    lower = mx.arange(logits.shape[1])[None] < at[:, None]
    return mx.sum((logits > mine) | ((logits == mine) & lower), axis=-1)


def _first(marked: mx.array) -> mx.array:
    """Return the lowest marked index of each row, uint32; the last index where none is marked."""
    size = marked.shape[1]
    return mx.min(mx.where(marked, mx.arange(size, dtype=mx.uint32)[None], size - 1), axis=-1)


def _ints(tokens: mx.array) -> list[int]:
    found: list[int] = tokens.tolist()  # type: ignore[assignment]
    return found


def _best_of(run: Callable[[], None]) -> float:
    seen = []
    for _ in range(_TRIES + 1):  # the first pays for warming up
        began = time.perf_counter()
        run()
        seen.append(time.perf_counter() - began)
    return min(seen[1:])
