"""The same requests through every installed way of running them, compared token by token.

    python -m tests.cost.exactness [--requests 48] [--tokens 128] [--dtype float32]

Prompts have 10 to 600 tokens; temperatures are 0, 0.7, 1.0 and 1.3, with changing filters and
penalties. In the shared modes requests join at random times, at most `width` of them at once.
Printed is the share that has the tokens of serial without a head, and its log probabilities.
"""

import argparse
import random
import re
import time
from collections.abc import Iterator
from typing import NamedTuple

from paceline.runtime import blas

blas.preload()

from paceline.actors.core import Core
from paceline.actors.depth import Depths
from paceline.actors.engine import Engine
from paceline.actors.messages import Admit, Lease, Tokens
from paceline.actors.policies import make_policy
from paceline.lanes.geometry import BRANCHING
from paceline.lanes.install import Installed, Wanted, install
from paceline.runtime.context import RowContext, Sampling, TokenLogprob
from paceline.runtime.model import find_model, load
from paceline.runtime.modes import Mode, Pace
from paceline.runtime.shutdown import leave
from paceline.runtime.text import Text

SUBJECTS = ("the sea", "a fox", "bread", "gravity", "clocks", "a mountain", "maps", "winter")
Answer = tuple[list[int], list[TokenLogprob]]


class Way(NamedTuple):
    """One way to run the requests.

    Args:
        depth: None lets the scheduler choose.
        width: The most rows at once.
    """

    mode: Mode
    mtp: bool
    depth: int | None
    width: int
    numerics: str = "throughput"

    @property
    def name(self) -> str:
        """How the way is printed."""
        drafts = f" depth {'auto' if self.depth is None else self.depth}" if self.mtp else ""
        return f"{self.mode.value}{drafts} width {self.width} {self.numerics}"


WAYS = (
    Way(Mode.SERIAL, False, 0, 1),
    Way(Mode.AR_BATCH, False, 0, 8),
    *(Way(Mode.MTP_BATCH, True, None, width) for width in range(8, 1, -1)),
    *(Way(Mode.SERIAL, True, depth, 1) for depth in (3, 1, 4, 2, None, 0)),
    *(Way(Mode.MTP_BATCH, True, None, 8, numerics) for numerics in ("b1-exact", "balanced")),
    Way(Mode.MTP_BATCH, True, 2, 8),
    Way(Mode.COOPERATIVE, True, None, 8),
    Way(Mode.MTP_BATCH, True, None, 1),
    *(Way(Mode.HYPER, True, depth, 1) for depth in (None, 4, 2)),
)


def contexts(text: Text, count: int, tokens: int) -> list[RowContext]:
    """Return requests that differ in prompt, length, temperature, filters and penalties."""
    found = []
    for i in range(count):
        content = f"Write about {SUBJECTS[i % 8]}. " * (2, 3, 8, 21, 110)[i % 5]
        sampling = Sampling(
            temperature=(0.0, 0.7, 1.0, 1.3)[i % 4],
            top_p=(1.0, 0.9, 1.0)[i % 3],
            top_k=(0, 0, 40, 0, 0)[i % 5],
            min_p=(0.0, 0.0, 0.0, 0.05, 0.0, 0.0, 0.0)[i % 7],
            repetition_penalty=(1.0, 1.0, 1.1)[(i // 4) % 3],
            frequency_penalty=(0.0, 0.5, 0.0)[(i // 4) % 3],
            logprobs=0,
        )
        encoded = (
            text.encode(content)
            if i % 5 == 0
            else text.encode_chat([{"role": "user", "content": content}])
        )
        found.append(RowContext(tuple(encoded), sampling, 1000 + i, tokens, frozenset()))
    return found


def run(way: Way, installed: Installed, rows: list[RowContext]) -> list[Answer]:
    """Run all rows through a mode's real scheduler core and lanes."""
    narrow = installed.lanes[0].spec
    branching = next(
        (lane.spec.name for lane in installed.lanes if lane.spec.kind == BRANCHING), None
    )
    policy = make_policy(way.mode, Pace(way.width, way.width, 0, 1024), 0.5, narrow.prefill_tile)
    lanes = {lane.spec.name: lane for lane in installed.lanes}
    core = Core(policy, Depths(narrow.kind, narrow.max_depth, way.depth, branching))
    engine = Engine(core, lanes, time.perf_counter)
    order = list(range(len(rows)))
    random.Random(way.name).shuffle(order)
    joins = random.Random(7)
    answers: list[Answer] = [([], []) for _ in rows]
    open_rows = len(rows)
    while open_rows:
        if order and (way.width == 1 or joins.random() < 0.1 or len(order) == open_rows):
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


def lanes_of(ways: tuple[Way, ...], given: argparse.Namespace) -> Iterator[tuple[Way, Installed]]:
    """Install lanes for each way, on one model for all that can share it."""
    found: dict[tuple[bool, bool, str], Installed] = {}
    for way in ways:
        key = (way.mtp, way.mode is Mode.HYPER, way.numerics)
        if key not in found:
            mode = Mode.MTP_BATCH if way.mtp else Mode.AR_BATCH
            mode = Mode.HYPER if way.mode is Mode.HYPER else mode
            model = load(find_model("starter"), given.dtype, given.device, 0, "")
            wanted = Wanted(mode, exact_widths=given.exact_widths, numerics=way.numerics)
            found[key] = install(model, wanted)
        yield way, found[key]


def main() -> None:
    """Compare every way with serial without a head."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--only", default="", help="run the ways this regular expression finds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--exact-widths", action=argparse.BooleanOptionalAction, default=True)
    given = parser.parse_args()
    path = find_model("starter")
    text = Text(path, load(path, "auto", "auto", 0, "").card.end_ids)
    rows = contexts(text, given.requests, given.tokens)
    print(
        f"{len(rows)} requests, prompts of {min(len(r.prompt) for r in rows)} to "
        f"{max(len(r.prompt) for r in rows)} tokens, {given.tokens} tokens each"
    )
    ways = tuple(w for i, w in enumerate(WAYS) if i == 0 or re.search(given.only, w.name))
    plain: list[Answer] = []
    for way, installed in lanes_of(ways, given):
        began = time.perf_counter()
        answers = run(way, installed, rows)
        plain = plain or answers
        tokens = sum(a[0] == b[0] for a, b in zip(answers, plain, strict=True))
        bits = sum(a == b for a, b in zip(answers, plain, strict=True))
        print(
            f"{way.name}: {tokens} of {len(rows)} have the same tokens, "
            f"{bits} the same log probabilities bit for bit "
            f"({time.perf_counter() - began:.0f} s)",
            flush=True,
        )


if __name__ == "__main__":
    main()
    leave(0)
