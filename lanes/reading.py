"""Reading a prompt in whole tiles, by the model and, where there is one, by its head behind it."""

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import mlx.core as mx
import numpy as np

from ..runtime.context import TokenLogprob
from ..runtime.errors import RowError
from . import sampler
from .base import DRAFT_FAILURES, Hidden, Row, Trunk
from .head import Head
from .prefix import PrefixBank
from .ragged import RowSlots
from .sampler import Logits


class Read(NamedTuple):
    """What reading a piece of a prompt gave.

    Args:
        last: The logits behind the prompt, once it is read to its end.
        scored: Entries of the tokens just read, when the row asks for them.
        cached: Tokens that were not computed but taken from the bank.
    """

    last: Logits | None
    scored: tuple[TokenLogprob, ...]
    cached: int


class PromptReader:
    """Reads prompts on one trunk.

    Args:
        head: The head that must have read a row before it can draft for it; None for none.
        bank: Where tiles that were read before are taken from and new ones kept; None for none.
    """

    def __init__(self, trunk: Trunk, head: Head | None, bank: PrefixBank | None = None) -> None:
        self._trunk = trunk
        self._head = head
        self._bank = bank

    def read(self, row: Row, count: int) -> "Read":
        """Read up to `count` more tokens; what the bank has is taken without counting."""
        prompt = row.context.prompt
        tile = self._trunk.prefill_tile
        stop = min(row.read + count, len(prompt))
        scored: list[TokenLogprob] = []
        last: Logits | None = None
        cached = 0
        while row.read < stop:
            if taken := self._take(row):
                cached += taken
                continue
            # Boundaries lie at multiples of the tile, so the arithmetic knows only the prompt.
            end = min((row.read // tile + 1) * tile, len(prompt))
            logits = self._read_tile(row, end)
            if row.context.score_prompt and logits is not None:
                scored += _scored(row, logits, end)
            if logits is not None and end == len(prompt):
                last = logits[-1]
            row.read = end
            self._keep(row)
        return Read(last, tuple(scored), cached)

    def _take(self, row: Row) -> int:
        """Take from the bank what it has; a bank that fails costs time and nothing else."""
        if self._bank is None:
            return 0
        with suppress(Exception):
            return self._bank.give(row)
        return 0

    def _keep(self, row: Row) -> None:
        """Give the bank what was read, by the model and by the head where there is one."""
        if self._bank is not None and (self._head is None or row.drafts):
            with suppress(Exception):
                self._bank.keep(row)

    def _read_tile(self, row: Row, end: int) -> Logits | None:
        want = "last" if end == len(row.context.prompt) else "none"
        if row.context.score_prompt:
            want = "all"
        tokens = row.context.prompt[row.read : end]
        passed = self._trunk.prefill(row.slots, tokens, want=want)
        if self._head is not None and row.drafts:
            assert passed.hidden is not None
            row.unheard.append(Hidden(passed.hidden, 0, len(tokens)))
            hear(self._head, row, row.slots, 0)
        if want == "none":
            passed.settle()
            return None
        return passed.host()


def hear(head: Head, row: Row, slots: RowSlots, slot: int) -> bool:
    """Let a head read a row's positions up to the last, which is needed for drafting.

    Returns:
        Whether it could; a row that a head has not read is never drafted for again.
    """
    count = row.unheard_count - 1
    if count <= 0:
        return True
    tokens = row.tokens_from(slots.drafted[slot] + 1, count)
    spans, row.unheard = _split(row.unheard)
    try:
        head.read(slots, slot, gathered(spans), tokens)
    except Exception:  # nothing is computed yet: what the device says comes later
        row.draft_failed(DRAFT_FAILURES)
    return row.drafts


def gathered(spans: Sequence[Hidden]) -> mx.array:
    """Join runs of hidden states, [positions, hidden size]; runs of one pass in one move."""
    first = spans[0].states
    if len(spans) == 1:
        return first[spans[0].start : spans[0].start + spans[0].length]
    if all(span.states is first for span in spans):
        at = [i for span in spans for i in range(span.start, span.start + span.length)]
        return first if at == list(range(first.shape[0])) else first[mx.array(at)]
    return mx.concatenate([s.states[s.start : s.start + s.length] for s in spans])


def _split(spans: Sequence[Hidden]) -> tuple[list[Hidden], list[Hidden]]:
    """Take the last position off."""
    *before, end = spans
    head = [Hidden(end.states, end.start, end.length - 1)] if end.length > 1 else []
    return [*before, *head], [Hidden(end.states, end.start + end.length - 1, 1)]


def _scored(row: Row, logits: Logits, end: int) -> list[TokenLogprob]:
    """Return log probabilities of the prompt tokens that positions up to `end` predict.

    Raises:
        RowError: When the model produced no finite logit.
    """
    prompt, alternatives = row.context.prompt, row.context.sampling.logprobs or 0
    start = end - len(logits)
    if not np.isfinite(logits.max(axis=-1)).all():
        raise RowError(sampler.NOT_FINITE)
    entries = [TokenLogprob(prompt[0], None, ())] if start == 0 else []
    entries.extend(
        sampler.logprob_of(logits[at - start], prompt[at + 1], alternatives)
        for at in range(start, min(end, len(prompt) - 1))
    )
    return entries
