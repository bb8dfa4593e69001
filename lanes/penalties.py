"""Penalties and logit bias of one row: what they are made of is worked out once, then applied."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ..runtime.context import Sampling
from ..runtime.exits import Ids

_DENSE: Final = 16  # a bias on more than one token in so many is kept as one array for all

Logits = NDArray[np.float32]


class Adjuster:
    """Adds a row's bias and penalties to logits; arrays are made at first use and kept.

    Args:
        sampling: The row's.
        prompt: Its prompt's token ids, which the repetition penalty counts as seen.
    """

    def __init__(self, sampling: Sampling, prompt: Sequence[int] | frozenset[int]) -> None:
        self._sampling = sampling
        self._prompt = prompt
        self._read: tuple[Ids, NDArray[np.bool_]] | None = None
        self._biased: tuple[Ids, Logits] | None = None
        self._added: Logits | None = None

    def apply(self, logits: Logits, counts: Mapping[int, int], ids: Ids | None = None) -> Logits:
        """Return logits with bias and penalties; the same array when there are none.

        Args:
            logits: Float32, [tokens]; not changed.
            counts: How often each token was generated.
            ids: The tokens the logits are of, ascending; None for the whole vocabulary.
        """
        sampling = self._sampling
        if not sampling.penalised and not sampling.logit_bias:
            return logits
        out = logits.copy()
        tokens = np.fromiter(counts.keys(), np.int64, len(counts))
        if sampling.repetition_penalty != 1.0:
            self._repeat(out, tokens, ids)
        if counts and (sampling.presence_penalty or sampling.frequency_penalty):
            times = np.fromiter(counts.values(), np.float32, len(counts))
            tokens, times = _places(tokens, times, ids)
            out[tokens] -= sampling.presence_penalty + sampling.frequency_penalty * times
        if sampling.logit_bias:
            self._bias(out, ids)
        return out

    def _repeat(self, out: Logits, generated: Ids, ids: Ids | None) -> None:
        if self._read is None:
            read = np.unique(np.fromiter(self._prompt, np.int64, len(self._prompt)))
            known = np.zeros(int(read[-1]) + 1 if read.size else 0, np.bool_)
            known[read] = True
            self._read = read, known
        read, known = self._read
        inside = generated[generated < len(known)]
        fresh = np.concatenate([generated[generated >= len(known)], inside[~known[inside]]])
        factor = np.float32(self._sampling.repetition_penalty)
        for seen in (read, fresh):
            at, _ = _places(seen, seen, ids)
            picked = out[at]
            out[at] = np.where(picked > 0, picked / factor, picked * factor)

    def _bias(self, out: Logits, ids: Ids | None) -> None:
        if self._biased is None:
            pairs = dict(self._sampling.logit_bias)
            tokens = np.fromiter(pairs.keys(), np.int64, len(pairs))
            order = np.argsort(tokens)
            added = np.fromiter(pairs.values(), np.float32, len(pairs))
            self._biased = tokens[order], added[order]
        tokens, added = self._biased
        if len(tokens) * _DENSE < (len(out) if ids is None else int(ids[-1])):
            tokens, added = _places(tokens, added, ids)
            out[tokens] += added
            return
        size = max(len(out) if ids is None else int(ids[-1]) + 1, int(tokens[-1]) + 1)
        if self._added is None or len(self._added) < size:
            self._added = np.zeros(size, np.float32)
            self._added[tokens] = added
        out += self._added[: len(out)] if ids is None else self._added[ids]


def _places(tokens: Ids, values: NDArray[Any], ids: Ids | None) -> tuple[Ids, NDArray[Any]]:
    """Return where tokens lie among `ids`, and the values of those that do."""
    if ids is None:
        return tokens, values
    if not ids.size:
        return tokens[:0], values[:0]
    at = np.minimum(np.searchsorted(ids, tokens), len(ids) - 1)
    there = ids[at] == tokens
    return at[there], values[there]
