"""Constant-shape arithmetic on the real starter model: same bits at any width, true to mlx-lm."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import make_prompt_cache
from mlx_lm.utils import load_model

from paceline.lanes.base import Lane, Row, RowDelta
from paceline.lanes.install import Installed
from paceline.runtime.context import RowContext, Sampling, TokenLogprob
from paceline.runtime.model import LoadedModel, _unpack
from paceline.runtime.text import Text

pytestmark = pytest.mark.slow

_PROMPTS = (
    "Write one sentence about the sea.",
    "hi",
    "List three fruits, and for each of them say where it grows and how it tastes. " * 2,
    "What is two plus two?",
    "Explain gravity to a child.",
    "Name a color.",
    "Who was Newton?",
    "Tell me a story about a fox.",
)


def _context(text: Text, prompt: str, seed: int, temperature: float) -> RowContext:
    tokens = tuple(text.encode_chat([{"role": "user", "content": prompt}]))
    sampling = Sampling(temperature=temperature, top_p=0.95 if seed % 2 else 1.0, logprobs=2)
    return RowContext(tokens, sampling, seed, 100, frozenset())


def _run(
    lane: Lane, contexts: list[RowContext], steps: int
) -> list[tuple[list[int], list[TokenLogprob]]]:
    rows = [lane.open(str(i), context) for i, context in enumerate(contexts)]
    gained: dict[str, list[TokenLogprob]] = {row.key: [] for row in rows}
    for row in rows:
        _keep(gained, lane.prefill(row, 10_000))
    for _ in range(steps):
        for delta in lane.step(rows, [0] * len(rows)):
            _keep(gained, delta)
    for row in rows:
        lane.close(row)
    return [(row.generated, gained[row.key]) for row in rows]


def _keep(gained: dict[str, list[TokenLogprob]], delta: RowDelta | None) -> None:
    assert delta is not None
    assert delta.error is None
    gained[delta.key] += delta.logprobs


def test_tokens_and_logprobs_are_the_same_bits_at_b1_b3_and_b8(
    installed: Installed, text: Text
) -> None:
    """A row alone, in threes and in eights gives identical tokens and log probabilities."""
    b1, b3, b8 = installed.lanes
    contexts = [_context(text, p, i, (0, 0.7, 1.3)[i % 3]) for i, p in enumerate(_PROMPTS)]
    wide = _run(b8, contexts, 9)
    alone = [_run(b1, [context], 9)[0] for context in contexts]
    threes = [row for i in (0, 3, 6) for row in _run(b3, contexts[i : i + 3], 9)]
    assert wide == alone
    assert threes == alone


def test_lanes_agree_with_mlx_lm(installed: Installed, starter: LoadedModel, text: Text) -> None:
    """Logits of reading and of steps equal mlx-lm's own within float32 rounding."""
    plain, _ = load_model(starter.card.path)
    _unpack(plain, mx.float32)
    context = _context(text, _PROMPTS[2], 0, 0.0)
    lane = installed.lanes[0]
    (tokens, reports) = _run(lane, [context], 8)[0]
    cache = make_prompt_cache(plain)
    logits = plain(mx.array([list(context.prompt)]), cache=cache)[0, -1]
    for token, report in zip(tokens, reports, strict=True):
        exact = np.array(logits - mx.logsumexp(logits))
        assert int(exact.argmax()) == token
        assert report.logprob == pytest.approx(float(exact[token]), abs=2e-3)
        logits = plain(mx.array([[token]]), cache=cache)[0, -1]


def test_the_size_of_reading_chunks_changes_no_bit(installed: Installed, text: Text) -> None:
    """However a prompt's reading is cut over turns, its first token and logprobs are the same."""
    lane = installed.lanes[0]
    context = _context(text, _PROMPTS[2], 5, 1.0)
    whole = lane.open("whole", context)
    at_once = lane.prefill(whole, 10_000)
    parts = lane.open("parts", context)
    last = None
    while last is None:
        last = lane.prefill(parts, lane.spec.prefill_tile)
    assert at_once is not None
    assert (at_once.tokens, at_once.logprobs) == (last.tokens, last.logprobs)


@settings(max_examples=4)
@given(data=st.data())
def test_a_rows_bits_do_not_know_its_neighbours(
    data: st.DataObject, installed: Installed, text: Text
) -> None:
    """Neighbours that join, leave, sample otherwise and are longer change no bit of a row."""
    lane = installed.lanes[2]
    context = _context(text, _PROMPTS[0], 3, 0.9)
    (alone,) = _run(installed.lanes[0], [context], 8)
    row = lane.open("row", context)
    delta = lane.prefill(row, 10_000)
    gained: dict[str, list[TokenLogprob]] = {"row": []}
    _keep(gained, delta)
    others: list[Row] = []
    for step in range(8):
        leaves: bool = data.draw(st.booleans(), "leave")
        if others and leaves:
            lane.close(others.pop(data.draw(st.integers(0, len(others) - 1), "who")))
        while len(others) < data.draw(st.integers(0, 7), "width"):
            which = data.draw(st.integers(0, 7), "prompt")
            seed = data.draw(st.integers(0, 99), "seed")
            key = f"other{step}-{len(others)}-{seed}"
            others.append(lane.open(key, _context(text, _PROMPTS[which], seed, seed / 50)))
            lane.prefill(others[-1], 10_000)
        order: list[int] = data.draw(st.permutations(range(1 + len(others))), "order")
        stepping = [[row, *others][i] for i in order]
        for found in lane.step(stepping, [0] * len(stepping)):
            if found.key == "row":
                _keep(gained, found)
    for other in others:
        lane.close(other)
    lane.close(row)
    assert (row.generated, gained["row"]) == alone
