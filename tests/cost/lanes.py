"""Tokens a second of the lanes themselves, without actors or HTTP: every width, every depth.

    python -m tests.cost.lanes [--device gpu] [--dtype bfloat16] [--tokens 128] [--rounds 3]

Each round runs each lane at each depth once, so that what else the machine does falls on all of
them; medians are printed, as ratios to target-only decoding at the same width. `--parts` shows
where a step goes: drafting, verifying, and choosing with the commit.
"""

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

from paceline.runtime import blas

blas.preload()

import mlx.core as mx

from paceline.lanes.base import Lane
from paceline.lanes.choosing import Chooser
from paceline.lanes.install import Wanted, install
from paceline.lanes.mtp import MAX_DEPTH, Drafter
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.model import find_model, load
from paceline.runtime.modes import Mode
from paceline.runtime.shutdown import leave
from paceline.runtime.text import Text

SUBJECTS = ("the sea", "a fox", "bread", "gravity", "clocks", "a mountain", "maps", "winter")


class Seen:
    """What one lane at one depth did, round after round."""

    def __init__(self) -> None:
        self.tokens_per_s: list[float] = []
        self.step_ms: list[float] = []
        self.kept: list[float] = []
        self.parts: dict[str, float] = defaultdict(float)
        self.steps = 0


def contexts(text: Text, count: int, tokens: int, temperature: float) -> list[RowContext]:
    """Return chat requests."""
    found = []
    for i in range(count):
        ask = f"Note {i}: write a long story about {SUBJECTS[i % 8]}, with many details."
        prompt = tuple(text.encode_chat([{"role": "user", "content": ask}]))
        found.append(RowContext(prompt, Sampling(temperature=temperature), i, tokens, frozenset()))
    return found


def run(lane: Lane, contexts: list[RowContext], width: int, depth: int, seen: Seen) -> None:
    """Decode all rows, `width` at once; prompts are read while the clock stands."""
    tokens = steps = row_steps = 0
    seconds = 0.0
    for start in range(0, len(contexts), width):
        rows = [lane.open(str(c.seed), c) for c in contexts[start : start + width]]
        for row in rows:
            lane.prefill(row, len(row.context.prompt))
        live = rows
        began = time.perf_counter()
        while live:
            deltas = lane.step(live, [depth] * len(live))
            assert all(delta.error is None for delta in deltas)
            tokens += sum(len(delta.tokens) for delta in deltas)
            steps += 1
            row_steps += len(live)
            live = [row for row in live if row.left > 0]
        seconds += time.perf_counter() - began
        for row in rows:
            lane.close(row)
    seen.tokens_per_s.append(tokens / seconds)
    seen.step_ms.append(1e3 * seconds / steps)
    seen.kept.append(tokens / row_steps)
    seen.steps += steps


class Parts:
    """Times the parts of a step, with everything computed at each border."""

    def __init__(self, trunk: Any, chooser: Chooser) -> None:
        self.into: dict[str, float] = defaultdict(float)
        self._time(Drafter, "run", "draft")
        self._time(trunk, "step", "verify")
        self._time(chooser, "verify", "choose and commit")

    def _time(self, owner: Any, name: str, label: str) -> None:
        plain = getattr(owner, name)

        def timed(*given: Any) -> Any:
            began = time.perf_counter()
            out = plain(*given)
            if label == "verify":
                out.settle()
            if label == "draft":
                mx.eval([column.tokens for column in given[0].columns])
            self.into[label] += time.perf_counter() - began
            return out

        setattr(owner, name, timed)


def main() -> None:
    """Run every lane at every depth."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--widths", default="1,3,8")
    parser.add_argument("--temperatures", default="0,0.7")
    parser.add_argument("--parts", action="store_true")
    given = parser.parse_args()
    model = load(find_model("starter"), given.dtype, given.device, 0, "")
    text = Text(model.card.path, model.card.end_ids)
    installed = install(model, Wanted(Mode.MTP_BATCH))
    spec = installed.lanes[0].spec
    print(
        f"{mx.device_info().get('device_name', model.card.device)}: {model.card.device}, "
        f"{spec.dtype}, {spec.arithmetic}, tokens chosen on the {spec.choosing}"
    )
    for lane in installed.lanes:
        checks = ", ".join(f"{check.name}: {check.found}" for check in lane.receipt.checks)
        print(f"{lane.spec.name} {lane.receipt.seconds} s: {checks}")
    some: Any = installed.lanes[0]
    parts = Parts(some.trunk, some.chooser) if given.parts else None
    for temperature in map(float, given.temperatures.split(",")):
        for width in map(int, given.widths.split(",")):
            lane = next(lane for lane in installed.lanes if lane.spec.geometry >= width)
            rows = contexts(text, len(SUBJECTS) // width * width, given.tokens, temperature)
            seen = {depth: Seen() for depth in range(MAX_DEPTH + 1)}
            for depth in seen:  # what is compiled or grown once is no part of the measurement
                run(lane, contexts(text, width, 8, temperature), width, depth, Seen())
            for _ in range(given.rounds):
                for depth, into in seen.items():
                    if parts is not None:
                        parts.into = into.parts
                    run(lane, rows, width, depth, into)
            _print(lane.spec.name, width, temperature, seen)


def _print(name: str, width: int, temperature: float, seen: dict[int, Seen]) -> None:
    plain = statistics.median(seen[0].tokens_per_s)
    for depth, found in seen.items():
        speed = statistics.median(found.tokens_per_s)
        where = ", ".join(f"{k} {1e3 * v / found.steps:.2f}" for k, v in found.parts.items())
        print(
            f"{name} rows {width} T {temperature} depth {depth}: {speed:7.1f} tokens/s "
            f"x{speed / plain:.2f}, step {statistics.median(found.step_ms):6.2f} ms, "
            f"{statistics.median(found.kept):.2f} tokens a row and step"
            + (f" (ms: {where})" if where else ""),
            flush=True,
        )


if __name__ == "__main__":
    main()
    leave(0)
