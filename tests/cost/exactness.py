"""The same requests through every installed mode, compared token by token and bit by bit.

    python -m tests.cost.exactness [--requests 24] [--tokens 128] [--no-exact-widths]

Requests have temperatures 0, 0.7 and 1.3 with changing filters and penalties; in the shared
modes they join at random times. Printed is the share that is identical to serial.
"""

import argparse
import random
import time

from paceline.runtime import blas

blas.preload()

from paceline.actors.core import Core
from paceline.actors.engine import Engine
from paceline.actors.messages import Admit, Lease, Tokens
from paceline.actors.policies import make_policy
from paceline.lanes.install import Installed, install
from paceline.runtime.context import RowContext, Sampling, TokenLogprob
from paceline.runtime.model import find_model, load
from paceline.runtime.modes import INSTALLED, PRESETS, Mode, Preset
from paceline.runtime.text import Text

SUBJECTS = ("the sea", "a fox", "bread", "gravity", "clocks", "a mountain", "maps", "winter")
Answer = tuple[list[int], list[TokenLogprob]]


def contexts(text: Text, count: int, tokens: int) -> list[RowContext]:
    """Return requests that differ in prompt, length, temperature, filters and penalties."""
    found = []
    for i in range(count):
        content = f"Write about {SUBJECTS[i % 8]}. " * (1 + 7 * (i % 5))
        sampling = Sampling(
            temperature=(0.0, 0.7, 1.3)[i % 3],
            top_p=(1.0, 0.9)[i % 2],
            top_k=(0, 0, 40, 0)[i % 4],
            min_p=(0.0, 0.0, 0.0, 0.05, 0.0)[i % 5],
            frequency_penalty=(0.0, 0.0, 0.5)[i % 3] if i % 2 else 0.0,
            logprobs=0,
        )
        prompt = tuple(text.encode_chat([{"role": "user", "content": content}]))
        found.append(RowContext(prompt, sampling, 1000 + i, tokens, frozenset()))
    return found


def run(mode: Mode, installed: Installed, rows: list[RowContext]) -> list[Answer]:
    """Run all rows through a mode's real scheduler core and lanes."""
    policy = make_policy(mode, PRESETS[Preset.LATENCY], 0.5, installed.lanes[0].spec.prefill_tile)
    lanes = {lane.spec.name: lane for lane in installed.lanes}
    engine = Engine(Core(policy), lanes, time.perf_counter)
    order = list(range(len(rows)))
    random.Random(mode.value).shuffle(order)
    joins = random.Random(7)
    answers: list[Answer] = [([], []) for _ in rows]
    open_rows = len(rows)
    while open_rows:
        if order and (mode is Mode.SERIAL or joins.random() < 0.1 or len(order) == open_rows):
            i = order.pop()
            engine.feed(Admit(Lease(str(i), i), str(i), rows[i], 10**6, time.perf_counter()))
        turn = engine.turn()
        for message in turn.messages if turn is not None else ():
            if isinstance(message, Tokens):
                answers[int(message.lease.row)][0].extend(message.tokens)
                answers[int(message.lease.row)][1].extend(message.logprobs)
                open_rows -= message.finish is not None
    engine.turn()
    return answers


def main() -> None:
    """Compare every mode with serial."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--exact-widths", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    model = load(find_model("starter"), "auto", "auto", 0, "")
    text = Text(model.card.path, model.card.end_ids)
    installed = install(model, Mode.AR_BATCH, 8, given.exact_widths)
    rows = contexts(text, given.requests, given.tokens)
    serial: list[Answer] = []
    for mode in INSTALLED:
        began = time.perf_counter()
        answers = run(mode, installed, rows)
        serial = serial or answers
        tokens = sum(a[0] == b[0] for a, b in zip(answers, serial, strict=True))
        bits = sum(a == b for a, b in zip(answers, serial, strict=True))
        print(
            f"{mode.value}: {tokens} of {len(rows)} requests have serial's tokens, "
            f"{bits} its log probabilities bit for bit ({time.perf_counter() - began:.0f} s, "
            f"prompts of {min(len(r.prompt) for r in rows)} to "
            f"{max(len(r.prompt) for r in rows)} tokens)"
        )


if __name__ == "__main__":
    main()
