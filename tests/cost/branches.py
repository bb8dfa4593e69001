"""hyper against serial with the same head: accepted drafts a step, tokens a second, same tokens?

    python -m tests.cost.branches [--prompts 20] [--tokens 96] [--temperatures 0,0.8]

Both modes answer every prompt one after the other through their own schedulers, which choose
depth and branches as in a server, so that what else the machine does falls on both.
"""

import argparse
import statistics
import time

from paceline.runtime import blas

blas.preload()

from paceline.actors.engine import Engine
from paceline.actors.house import make_core
from paceline.actors.messages import Admit, Lease, Tokens
from paceline.lanes.install import Wanted, install
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.model import find_model, load
from paceline.runtime.modes import Mode
from paceline.runtime.settings import ServerArgs
from paceline.runtime.shutdown import leave
from paceline.runtime.text import Text

ASKS = (
    "Explain {} to a child.",
    "Write a Python function that sorts a list of records about {}.",
    "List ten facts about {}.",
    "Write a short story about {}.",
    "Write a step-by-step guide to {}.",
)
SUBJECTS = ("bees", "the moon", "bread", "maps", "rivers", "chess")


class Side:
    """One mode and what it did."""

    def __init__(self, mode: Mode, engine: Engine) -> None:
        self.mode = mode
        self.engine = engine
        self.steps = 0
        self.accepted = 0
        self.rates: list[float] = []
        self.lanes: dict[tuple[str, int], int] = {}

    def answer(self, name: str, context: RowContext) -> list[int]:
        """Run one request to its end; the clock stands while its prompt is read."""
        self.engine.feed(Admit(Lease(name, 0), name, context, 10**6, time.perf_counter()))
        found: list[int] = []
        seconds = tokens = 0.0
        while (turn := self.engine.turn()) is not None:
            for message in turn.messages:
                if isinstance(message, Tokens):
                    found += message.tokens
            if turn.lane is not None:
                self.steps += 1
                self.accepted += sum(drafts.accepted for drafts in turn.drafts)
                kind = turn.lane, turn.depth
                self.lanes[kind] = self.lanes.get(kind, 0) + 1
                seconds += turn.step_s
                tokens += turn.committed
        self.rates.append(tokens / seconds)
        return found


def main() -> None:
    """Compare both modes at each temperature."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--temperatures", default="0,0.8")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    model = load(find_model("starter"), given.dtype, given.device, 0, "")
    text = Text(model.card.path, model.card.end_ids)
    lanes = install(model, Wanted(Mode.HYPER)).lanes
    for temperature in map(float, given.temperatures.split(",")):
        sides = []
        for mode, some in ((Mode.SERIAL, lanes[:1]), (Mode.HYPER, lanes)):
            core = make_core(ServerArgs(scheduler_mode=mode), some)
            named = {lane.spec.name: lane for lane in some}
            sides.append(Side(mode, Engine(core, named, time.perf_counter)))
        same = 0
        for i in range(given.prompts):
            ask = ASKS[i % len(ASKS)].format(SUBJECTS[i % len(SUBJECTS)])
            prompt = tuple(text.encode_chat([{"role": "user", "content": ask}]))
            context = RowContext(
                prompt, Sampling(temperature=temperature), i, given.tokens, frozenset()
            )
            answers = [side.answer(f"{side.mode}-{i}", context) for side in sides]
            same += answers[0] == answers[1]
        print(f"T {temperature}: {same} of {given.prompts} have the same tokens")
        for side in sides:
            used = sorted(side.lanes.items(), key=lambda item: -item[1])
            print(
                f"  {side.mode.value}: {side.accepted / side.steps:.2f} drafts accepted a step, "
                f"{statistics.median(side.rates):.1f} tokens/s (median of prompts), "
                f"{statistics.harmonic_mean(side.rates):.1f} over all; "
                + ", ".join(f"{lane} depth {depth} x{n}" for (lane, depth), n in used),
                flush=True,
            )
        ratios = [b / a for a, b in zip(sides[0].rates, sides[1].rates, strict=True)]
        print(
            f"  hyper over serial: accepted "
            f"{(sides[1].accepted / sides[1].steps) / (sides[0].accepted / sides[0].steps):.2f}x, "
            f"tokens/s {statistics.median(ratios):.2f}x (median of prompts, paired)",
            flush=True,
        )


if __name__ == "__main__":
    main()
    leave(0)
