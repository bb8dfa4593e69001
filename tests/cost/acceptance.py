"""How many drafts the model accepts, by depth, for coupled and rejection acceptance alike.

    python -m tests.cost.acceptance [--prompts FILE] [--tokens 64] [--count 216]

Every position of every answer is the root of a chain of drafts, whatever a real step would have
skipped, so figures do not depend on where steps happen to begin. Both kinds are read off the same
chains: coupled by whether the model chooses the same token, rejection by the chance it accepts,
sum(min(p, q)). A share is conditional: of drafts whose forerunners were accepted. Positions inside
a loop (a run of 16 tokens that occurred before) are left out. FILE has lines "kind<TAB>prompt".
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from paceline.runtime import blas

blas.preload()

import numpy as np

from paceline.lanes import sampler
from paceline.lanes.base import Row
from paceline.lanes.choosing import HostChooser
from paceline.lanes.install import Wanted, install
from paceline.lanes.mtp import MAX_DEPTH, MtpLane
from paceline.lanes.sampler import Logits
from paceline.lanes.verify import Coupled, Draft, Spread, Verdict, spread
from paceline.runtime import noise
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.exits import Ids
from paceline.runtime.model import find_model, load
from paceline.runtime.modes import Mode
from paceline.runtime.shutdown import leave
from paceline.runtime.text import Text

SAMPLERS = {
    "greedy": Sampling(temperature=0),
    "T 0.7": Sampling(temperature=0.7),
    "T 1.0, top_p 0.95": Sampling(temperature=1.0, top_p=0.95),
}
LOOP = 16
ASKS = {
    "chat": (
        "Explain {} to a child.", "What is interesting about {}?", "Tell me a story about {}.",
        "Write a short poem about {}.", "What do people get wrong about {}?",
        "Write an email to a friend about {}.",
    ),
    "code": (
        "Write a Python function that sorts a list of records about {}.",
        "Write a Python class for {} with two methods.", "Write a SQL query over a table of {}.",
        "Write a JavaScript function that counts {}.", "Write unit tests for a module about {}.",
        "Write a bash script that prints a line about {}.",
    ),
    "lists": (
        "List ten facts about {}.", "Give me five ideas for a book about {}.",
        "Make a table about {} with three columns.", "Write a step-by-step guide to {}.",
        "Give me a list of questions about {}.", "What are the pros and cons of {}?",
    ),
}  # fmt: skip
SUBJECTS = (
    "volcanoes", "bicycles", "bread", "chess", "rivers", "bees", "trains", "music", "the moon",
    "gardens", "maps", "coffee",
)  # fmt: skip


class Tally:
    """Sums over roots, by depth."""

    def __init__(self) -> None:
        self.reached = np.zeros((2, MAX_DEPTH))
        self.accepted = np.zeros((2, MAX_DEPTH))
        self.kept = np.zeros(2)
        self.roots = 0

    def saw(self, reached: np.ndarray, accepted: np.ndarray) -> None:
        """Add one root: [kind, depth] of the chance to get there and to be accepted there."""
        self.reached += reached
        self.accepted += accepted
        self.roots += 1

    def show(self) -> str:
        """Return both kinds' conditional shares and tokens a step at each depth."""
        share = self.accepted / np.maximum(self.reached, 1e-9)
        out = []
        for kind, name in enumerate(("coupled", "rejection")):
            per_step = 1 + np.cumsum(np.cumprod(share[kind]))
            out.append(
                f"{name} {' / '.join(f'{s:.3f}' for s in share[kind])}, tokens a step "
                f"{' / '.join(f'{s:.2f}' for s in per_step)}"
            )
        return f"{self.roots} roots: " + "; ".join(out)


class Probe:
    """An acceptance that looks at every chain of drafts and commits one token."""

    name = "probe"

    def __init__(self) -> None:
        self.tallies: dict[str, Tally] = defaultdict(Tally)
        self.kinds: dict[str, str] = {}
        self._seen: dict[str, set[tuple[int, ...]]] = defaultdict(set)
        self._drafter = Coupled()

    def draft(self, logits: Logits, row: Row, before: Sequence[Draft], ids: Ids | None) -> Draft:
        """Draft as coupled acceptance does, and keep what the draft was drawn from."""
        found = self._drafter.draft(logits, row, before, ids)
        return Draft(found.token, spread(logits, row.context.sampling, ids))

    def verify(self, logits: Logits, row: Row, drafts: Sequence[Draft]) -> Verdict:
        """Note how far the drafts would have gone; commit what the model chooses."""
        loop = tuple(row.tokens_from(row.position - LOOP, LOOP)) if row.position > LOOP else ()
        if len(drafts) == MAX_DEPTH and loop not in self._seen[row.key]:
            self._note(logits, row, drafts)
        self._seen[row.key].add(loop)
        token, _ = sampler.choose(logits[0], row)
        row.commit(token)
        return Verdict([token], [])

    def _note(self, logits: Logits, row: Row, drafts: Sequence[Draft]) -> None:
        sampling = row.context.sampling
        reached, accepted = np.zeros((2, MAX_DEPTH)), np.zeros((2, MAX_DEPTH))
        chain = np.ones(2)
        for at, draft in enumerate(drafts):
            key = noise.stream_key(row.context.seed, row.position + at)
            same = sampler.pick(logits[at], sampling, key) == draft.token
            assert draft.spread is not None
            overlap, ratio = compare(
                spread(logits[at], sampling, None), draft.spread, draft.token, logits.shape[1]
            )
            reached[:, at] = chain
            accepted[:, at] = chain * (same, overlap)
            chain *= (same, ratio)
        for kind in ("all", self.kinds[row.key]):
            self.tallies[kind].saw(reached, accepted)


def compare(p: Spread, q: Spread, token: int, size: int) -> tuple[float, float]:
    """Return sum(min(p, q)) and min(1, p/q) of one token."""
    target, drafted = np.zeros(size), np.zeros(size)
    target[p.tokens], drafted[q.tokens] = p.shares, q.shares
    return float(np.minimum(target, drafted).sum()), min(1.0, target[token] / drafted[token])


def prompts_of(path: Path | None, count: int) -> list[tuple[str, str]]:
    """Return (kind, prompt) pairs."""
    if path is not None:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [(kind, text) for kind, _, text in (line.partition("\t") for line in lines)][:count]
    every = [
        (kind, ask.format(subject))
        for subject in SUBJECTS
        for kind, asks in ASKS.items()
        for ask in asks
    ]
    return random.Random(1).sample(every, min(count, len(every)))


def main() -> None:
    """Measure every sampler."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--count", type=int, default=216)
    parser.add_argument("--only", default="", help="samplers whose names hold this")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    given = parser.parse_args()
    model = load(find_model("starter"), given.dtype, given.device, 0, "")
    text = Text(model.card.path, model.card.end_ids)
    wide = install(model, Wanted(Mode.MTP_BATCH)).lanes[-1]
    assert isinstance(wide, MtpLane)
    asked = prompts_of(given.prompts, given.count)
    for name, sampling in SAMPLERS.items():
        if given.only not in name:
            continue
        probe = Probe()
        wide.chooser = HostChooser(probe)
        for start in range(0, len(asked), 8):
            live = []
            for i, (kind, ask) in enumerate(asked[start : start + 8]):
                prompt = tuple(text.encode_chat([{"role": "user", "content": ask}]))
                ends = frozenset(model.card.end_ids)
                # Room for whole chains up to the last token.
                context = RowContext(prompt, sampling, start + i, given.tokens + MAX_DEPTH, ends)
                row = wide.open(str(start + i), context)
                probe.kinds[row.key] = kind
                wide.prefill(row, len(prompt))
                live.append(row)
            every = list(live)
            while live:
                wide.step(live, [MAX_DEPTH] * len(live))
                live = [
                    row
                    for row in live
                    if len(row.generated) < given.tokens and row.generated[-1] not in ends
                ]
            for row in every:
                wide.close(row)
        for kind, tally in sorted(probe.tallies.items()):
            print(f"{name}, {kind}: {tally.show()}", flush=True)


if __name__ == "__main__":
    main()
    leave(0)
