"""The cohort policies under trial against mtp_batch: a load where each should win, one where not.

    python -m tests.cost.cohorts [--rounds 3] [--only depth]

Each load runs through the real scheduler and lanes, without HTTP, in turn with each policy, round
after round. A first request may be read before the clock starts and the others come; apart from
that all are there from the start, and their prompts count. Printed are tokens a second until the
last of the others is done, and the mean time to a request's end.
"""

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

from paceline.runtime import blas

blas.preload()

from paceline.actors.engine import Engine
from paceline.actors.house import make_core
from paceline.actors.messages import Admit, Lease, Tokens
from paceline.lanes.base import Lane
from paceline.lanes.install import Wanted, install
from paceline.runtime import model as models
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.modes import CohortPolicy, Mode
from paceline.runtime.settings import ServerArgs
from paceline.runtime.shutdown import leave
from paceline.runtime.text import Text

LISTED = "Repeat this list three times: " + ", ".join(f"item {i}" for i in range(12))
WRITTEN = "Tell me a story about a fox."


def context(text: Text, seed: int, ask: str, temperature: float, budget: int) -> RowContext:
    """Return one request."""
    prompt = tuple(text.encode_chat([{"role": "user", "content": ask}]))
    return RowContext(prompt, Sampling(temperature=temperature), seed, budget, frozenset())


class Load(NamedTuple):
    """Some requests, the policy they are for, and the width they run at.

    Args:
        early: The first request is there, and decodes, before the others come.
    """

    trial: CohortPolicy
    width: int
    contexts: list[RowContext]
    early: bool = False


def loads(text: Text) -> dict[str, Load]:
    """Return the loads by name."""

    def of(seed: int, ask: str, temperature: float, budget: int) -> RowContext:
        return context(text, seed, ask, temperature, budget)

    long = "Here are notes. " + " ".join(f"Note {i} says {i * 7}." for i in range(420))
    mixed = [of(i, LISTED, 0.0, 160) if i % 2 else of(i, WRITTEN, 1.3, 160) for i in range(8)]
    alike = [of(i, WRITTEN, 0.7, 96) for i in range(8)]
    beside = [of(0, long, 0.7, 400), *(of(i, WRITTEN, 0.7, 64) for i in range(1, 8))]
    budgets = [of(i, WRITTEN, 0.7, (160, 150, 24, 12)[i % 4]) for i in range(16)]
    return {
        "depth: 4 lists, greedy, beside 4 stories at 1.3": Load(CohortPolicy.DEPTH, 8, mixed),
        "depth: 8 stories at 0.7": Load(CohortPolicy.DEPTH, 8, alike),
        "length: 7 stories beside one context of 4,000": Load(
            CohortPolicy.LENGTH, 8, beside, early=True
        ),
        "length: 8 stories": Load(CohortPolicy.LENGTH, 8, alike),
        "fair-finish: 16 budgets of 12 to 160, width 4": Load(CohortPolicy.FAIR_FINISH, 4, budgets),
        "fair-finish: 4 stories, width 4": Load(CohortPolicy.FAIR_FINISH, 4, alike[:4]),
    }


def run(
    args: ServerArgs, lanes: Sequence[Lane], load: Load
) -> tuple[float, float, float, list[list[int]]]:
    """Run a load; return tokens a second, the mean and the last time to an end, and the tokens."""
    named = {lane.spec.name: lane for lane in lanes}
    engine = Engine(make_core(args, lanes), named, time.perf_counter)
    gained: list[list[int]] = [[] for _ in load.contexts]
    ends: dict[int, float] = {}

    def turn(began: float) -> bool:
        found = engine.turn()
        for message in found.messages if found is not None else ():
            if isinstance(message, Tokens):
                row = int(message.lease.row)
                gained[row] += message.tokens
                if message.finish is not None:
                    ends[row] = time.perf_counter() - began
        return found is not None

    def feed(row: int) -> None:
        lease = Lease(str(row), row)
        engine.feed(Admit(lease, str(row), load.contexts[row], 10**6, time.perf_counter()))

    first = int(load.early)
    if load.early:
        feed(0)
        while not gained[0]:
            turn(0.0)
    before = sum(map(len, gained))
    for row in range(first, len(load.contexts)):
        feed(row)
    began = time.perf_counter()
    while len(ends.keys() - set(range(first))) < len(load.contexts) - first:
        turn(began)
    tokens, seconds = sum(map(len, gained)) - before, time.perf_counter() - began
    times = [ends[row] for row in range(first, len(load.contexts))]
    while turn(began):
        pass
    return tokens / seconds, statistics.mean(times), max(times), gained


def main() -> None:
    """Run every load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    given = parser.parse_args()
    model = models.load(models.find_model("starter"), "auto", "auto", 0, "")
    text = Text(model.card.path, model.card.end_ids)
    lanes = install(model, Wanted(Mode.MTP_BATCH)).lanes
    for name, load in loads(text).items():
        if given.only not in name:
            continue
        both = (
            ServerArgs(scheduler_mode=Mode.MTP_BATCH, decode_batch_max=load.width),
            ServerArgs(
                scheduler_mode=Mode.MTP_COHORT_EXPERIMENTAL,
                cohort_policy=load.trial,
                decode_batch_max=load.width,
            ),
        )
        seen: list[list[tuple[float, float, float]]] = [[], []]
        same = True
        for _ in range(given.rounds):
            answers = []
            for at, args in enumerate(both):
                *figures, gained = run(args, lanes, load)
                seen[at].append((figures[0], figures[1], figures[2]))
                answers.append(gained)
            same = same and answers[0] == answers[1]
        plain, tried = ([statistics.median(c) for c in zip(*side, strict=True)] for side in seen)
        print(
            f"{name}: tokens/s {plain[0]:.1f} -> {tried[0]:.1f} ({tried[0] / plain[0]:.2f}x), "
            f"mean end {plain[1]:.2f} -> {tried[1]:.2f} s ({tried[1] / plain[1]:.2f}x), "
            f"last {plain[2]:.2f} -> {tried[2]:.2f} s, tokens {'the same' if same else 'DIFFER'}",
            flush=True,
        )


if __name__ == "__main__":
    main()
    leave(0)
