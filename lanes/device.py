"""Choosing on the device: a step meets the host once, with the tokens and nothing else.

The noise has the same bits as on the host (runtime/noise.py), its floats are 32 bits wide. What a
device does badly stays on the host, row by row and for the whole life of a row: penalties, biases,
grammars and log probabilities.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import mlx.core as mx

from ..runtime import noise
from ..runtime.context import RowContext, Sampling
from ..runtime.errors import RowError
from ..runtime.exits import Ids
from . import sampler
from .base import Row, RowDelta
from .choosing import Column, HostChooser, Span, choosing_failed, known, on_host
from .ragged import Pass
from .sampler import NOT_FINITE
from .verify import Choice, Coupled, Draft, follow

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
        tokens = pick(logits, rows, at, ids)
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
        picks, peaks = pick(passed.logits, rows, at, None), mx.max(passed.logits, axis=-1)
        passed.settle(picks, peaks, *columns)
        found, drafted = _ints(picks), [_ints(column) for column in columns]
        finite: list[bool] = mx.isfinite(peaks).tolist()  # type: ignore[assignment]
        resolve(spans, drafted)
        deltas = []
        for span in spans:
            if stays_on_device(span.row.context):
                mine = slice(span.first, span.first + 1 + len(span.drafts))
                deltas.append(_followed(span, _checked(found[mine], finite[mine])))
            else:
                deltas.append(self._host.verify_one(passed.host(), span))
        return deltas


def _followed(span: Span, choices: Iterator[Choice]) -> RowDelta:
    """Commit a row's choices; what goes wrong in here is that row's alone."""
    try:
        return span.delta(follow(span.row, choices, known(span.drafts)))
    except Exception as error:
        return choosing_failed(span.row, error)


def _checked(tokens: Sequence[int], finite: Sequence[bool]) -> Iterator[Choice]:
    """Give tokens one by one; one that was chosen from no finite logit ends its row."""
    for token, sound in zip(tokens, finite, strict=True):
        if not sound:
            raise RowError(NOT_FINITE)
        yield token, None


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
        mx.eval(pick_keyed(logits + 0, [sampling] * 8, keys, None))

    return _CLEARLY * _best_of(device) < _best_of(host)


def pick(
    logits: mx.array, rows: Sequence[Row], positions: Sequence[int], ids: Ids | None
) -> mx.array:
    """Choose a token for each of the rows' positions, uint32 [positions]; computed when read."""
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
) -> mx.array:
    """Choose a token a row, uint32 [rows].

    Args:
        logits: [rows, tokens].
        keys: The noise of each row.
        ids: The tokens the logits are of; None for the whole vocabulary.
    """
    scaled = logits.astype(mx.float32)
    drafted = None if ids is None else mx.array(ids, mx.uint32)
    if any(s.temperature > 0 for s in samplings):
        temperatures = mx.array([s.temperature or 1.0 for s in samplings], mx.float32)
        scaled = scaled / temperatures[:, None]
        if any(s.temperature > 0 and s.filtered for s in samplings):
            scaled = _filtered(scaled, samplings)
        hot = mx.array([float(s.temperature > 0) for s in samplings], mx.float32)
        tokens = mx.arange(logits.shape[1], dtype=mx.uint32) if drafted is None else drafted
        scaled = scaled + hot[:, None] * gumbel(token_bits(mx.array(list(keys), mx.uint32), tokens))
    at = mx.argmax(scaled, axis=-1)
    return at if drafted is None else drafted[at]


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


def _filtered(scaled: mx.array, samplings: Sequence[Sampling]) -> mx.array:
    """Send what top_k, top_p and min_p leave out to -inf; [rows, tokens] of logits / T.

    Filters apply in the order of `Sampling`; of equal logits at the edge all stay.
    """
    size = scaled.shape[1]
    top_k = mx.array([min(s.top_k or size, size) for s in samplings])[:, None]
    top_p = mx.array([s.top_p for s in samplings], mx.float32)[:, None]
    min_p = mx.array([s.min_p for s in samplings], mx.float32)[:, None]
    ordered = -mx.sort(-scaled, axis=-1)
    weights = mx.exp(ordered - ordered[:, :1])
    weights = mx.where(mx.arange(size)[None] < top_k, weights, 0)
    before = mx.cumsum(weights, axis=-1) - weights
    kept = (weights > 0) & (weights >= min_p)
    kept = kept & ((before < top_p * weights.sum(axis=-1, keepdims=True)) | (top_p >= 1))
    last = mx.maximum(kept.sum(axis=-1, keepdims=True) - 1, 0)
    floor = mx.take_along_axis(ordered, last, axis=-1)
    return mx.where(scaled >= floor, scaled, float("-inf"))


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
