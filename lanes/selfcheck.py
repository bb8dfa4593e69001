"""What must hold before a lane is installed, measured on the model it will run.

Row isolation: a row's logits keep every bit when all its neighbours change, and when they are no
numbers, as was the row whose slot it has. Against B1: the same rows at this geometry differ by no
more than the type's bound. With a head also: golden values, drafts that are taken in part while
others are taken whole, and rows that were cut back and are none the wiser.
"""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..runtime.context import RowContext, Sampling
from ..runtime.errors import LaneRefused
from ..runtime.exits import Ids
from ..runtime.model import ModelCard
from .ar import ArLane
from .base import Check, Receipt, Row, Trunk
from .branchcheck import check_branches
from .choosing import ON_HOST, HostChooser, on_host
from .head import Head
from .mtp import MtpLane
from .ragged import Layout, Pass, RowSlots
from .reference import apart, sound
from .sampler import Logits, finite
from .spoilt import chosen_alike, leave_spoilt
from .verify import Draft, Verdict

# Largest logit difference from B1 that is still rounding, a type; measured on real models.
BOUNDS: Final = {"float32": 2e-3, "float16": 0.25, "bfloat16": 1.0}
_PACKED_BOUND: Final = 1.0  # packed weights compute in 16 bits
_TENSOR_FLOAT_BOUND: Final = 0.25  # float32 products on a GPU keep 10 bits of each factor

_LENGTHS: Final = (5, 66, 62, 3, 9, 12, 7, 2)  # one lies past a block of keys, one crosses it
_PLAIN: Final = (0, 0)  # depths of the steps of a lane that does not draft
_SPECULATIVE: Final = (2, 1, 0)  # and of one that does: verify, step on from what was kept, plain
_CASES: Final = 3  # of row i the first i % 3 drafts of the first step are right
_NO_RECEIPT: Final = Receipt((), 0.0, 0.0)

Transcript = list[NDArray[np.float32]]


class Trace:
    """What one row saw in a run.

    Args:
        steps: Of each step the logits that every committed token was chosen from.
        drafted: The head's own logits.
    """

    def __init__(self) -> None:
        self.steps: list[Transcript] = []
        self.drafted: Transcript = []

    @property
    def logits(self) -> Transcript:
        """The logits of all steps."""
        return [logits for step in self.steps for logits in step]


class LaneChecker:
    """Checks the geometries of one trunk; what B1 gives is worked out once for all of them.

    Args:
        bound: The largest logit difference from B1 that is rounding (`rounding`).
        widest: Rows of the widest geometry that will be checked.
        head: The head whose lanes are checked, or None for target-only lanes.
    """

    def __init__(self, trunk: Trunk, bound: float, widest: int, head: Head | None = None) -> None:
        self._trunk = trunk
        self._head = head
        self._bound = bound
        self._depths = _PLAIN if head is None else _SPECULATIVE
        prompts = _prompts(trunk.vocab_size)[: self._rows_at(widest)]
        lane = ArLane(trunk, 1, "", _NO_RECEIPT, ON_HOST, head)
        self._rows = [_read(lane, str(i), prompt) for i, prompt in enumerate(prompts)]
        # The most a row can commit in the steps: every draft, and one token more in each.
        steps = len(self._depths) + (0 if head is None else _CASES - 1)
        traces = self._run(self._rows, 1, (0,) * steps, None)
        self._alone = [trace.logits for trace in traces]
        self._others: list[Row] = []

    def check(self, lane_name: str, geometry: int) -> Receipt:
        """Check one geometry.

        Raises:
            LaneRefused: Naming the check that failed and what was seen.
        """
        began = time.perf_counter()
        rows = self._rows[: self._rows_at(geometry)]
        seen = self._run(rows, geometry, self._depths, self._answers())
        differences = self._differences(seen)
        checks = [_finite(seen), self._isolation(rows, geometry, seen[0])]
        names = ("against B1",) if self._head is None else _CHECKS
        for at, name in enumerate(names):
            worst = max(differences[at :: len(names)])
            found = f"{worst:.3g} of {self._bound:.3g} allowed"
            checks.append(Check(name, worst <= self._bound, found))
        _refuse(lane_name, checks)
        seconds = round(time.perf_counter() - began, 3)
        return Receipt(tuple(checks), max(differences), seconds)

    def check_branching(self, lane_name: str, narrow: Receipt) -> Receipt:
        """Check the lane that carries branches, on top of what the narrow lane was checked for.

        Raises:
            LaneRefused: Naming the check that failed and what was seen.
        """
        began = time.perf_counter()
        checks = check_branches(self._trunk, self._rows, self._alone, self._bound)
        _refuse(lane_name, checks)
        seconds = round(time.perf_counter() - began, 3)
        return Receipt((*narrow.checks, *checks), narrow.max_logit_difference, seconds)

    @property
    def _shapeless(self) -> bool:
        return self._trunk.arithmetic == "constant-shape"

    def _rows_at(self, geometry: int) -> int:
        return geometry if self._head is None else max(geometry, _CASES)

    def _answers(self) -> dict[str, list[int]]:
        """Return what each row goes on with, whatever the run that is checked would choose."""
        return {
            row.key: [row.generated[0], *(int(logits.argmax()) for logits in alone)]
            for row, alone in zip(self._rows, self._alone, strict=True)
        }

    def _differences(self, seen: Sequence[Trace]) -> list[float]:
        """Return each step's largest difference of any row from B1, token by token."""
        worst = [0.0] * len(self._depths)
        for trace, alone in zip(seen, self._alone, strict=False):
            at = 0
            for step, logits in enumerate(trace.steps):
                worst[step] = max(worst[step], _apart(logits, alone[at : at + len(logits)]))
                at += len(logits)
        return worst

    def _isolation(self, rows: Sequence[Row], geometry: int, before: Trace) -> Check:
        """Change every neighbour of the first row, and its slot; its bits must stay."""
        others = self._read_others(max(1, geometry - 1))
        answers = self._answers() | {row.key: [row.generated[0]] * 9 for row in others}
        # Where shapes do not matter, few and uneven rows leave places for filler.
        beside = 1 if geometry == 1 or self._shapeless else geometry - 1
        spoilt = [*others[:beside], others[0]][:geometry]  # the last, a long one, leaves its slot
        runs = [self._run(rows[:1], geometry, self._depths, answers, spoilt)[-1]]
        if geometry > 1:
            runs.append(self._run([*others, rows[0]], geometry, self._depths, answers)[-1])
        worst = max(_apart(run.logits, before.logits) for run in runs)
        found = f"largest difference {worst:.3g}"
        drafts = max(_apart(run.drafted, before.drafted) if before.drafted else 0.0 for run in runs)
        if before.drafted:
            found += f", of a draft {drafts:.3g}"
        alike = chosen_alike(before.logits[0])
        if not alike:
            found += "; another token is chosen on the device"
        # A draft decides how many tokens a step commits and not which, so it may round.
        return Check("row isolation", worst == 0.0 and drafts <= self._bound and alike, found)

    def _read_others(self, count: int) -> list[Row]:
        """Return rows on other prompts than the checked ones, each of them read once."""
        lane = ArLane(self._trunk, 1, "", _NO_RECEIPT, ON_HOST, self._head)
        rows = self._rows[1:] or self._rows
        for at in range(len(self._others), count):
            prompt = tuple(reversed(rows[at].context.prompt))
            self._others.append(_read(lane, f"other {at}", prompt))
        return self._others[:count]

    def _run(
        self,
        rows: Sequence[Row],
        geometry: int,
        depths: Sequence[int],
        answers: dict[str, list[int]] | None,
        spoilt: Sequence[Row] = (),
    ) -> list[Trace]:
        """Step copies of rows whose prompts are read; without answers each goes its own way.

        Args:
            spoilt: Rows that sit in the lane first, with keys and values that are no numbers; all
                but the last stay, before the others.
        """
        recorder = _Recorder(self._trunk)
        script = Script(answers or {})
        lane = ArLane(recorder, geometry, "", _NO_RECEIPT, ON_HOST)
        if self._head is not None and answers is not None:
            chooser = HostChooser(script)
            lane = MtpLane(recorder, geometry, "", _NO_RECEIPT, chooser, self._head)
        copies = [row.copy() for row in rows]
        script.strict = True  # so that rows without logits fail before they leave
        left = leave_spoilt(lane, spoilt)
        script.strict = False
        copies = [*left, *copies]
        groups = [copies] if geometry > 1 else [[row] for row in copies]
        deeper = {row.key for row in left} if self._shapeless else ()
        traces = {row.key: Trace() for row in copies}
        for group in groups:
            for depth in depths:
                recorder.passes.clear()
                deltas = lane.step(group, [depth + (row.key in deeper) for row in group])
                passed = recorder.passes[0]  # another one is for rows that failed in it
                logits = passed.host()
                for place, (row, delta) in enumerate(zip(group, deltas, strict=True)):
                    first = passed.layout.first[place]
                    # A row that fails, on logits that are not finite, has gained nothing.
                    kept = logits[first : first + max(1, len(delta.tokens))].copy()
                    traces[row.key].steps.append(list(kept))
                    if answers is not None and delta.tokens:
                        row.generated[-1] = answers[row.key][len(row.generated) - 1]
        for row in copies:
            traces[row.key].drafted = script.drafted.get(row.key, [])
            lane.close(row)
        return [traces[row.key] for row in copies]


# What the three steps of the script show.
_CHECKS: Final = ("uneven acceptance", "rewind against recompute", "against B1")


class Script:
    """An `Acceptance` in which it is settled beforehand which drafts are right.

    The head drafts in earnest, but what it drafts is recorded and not used. In the first step the
    first n % 3 drafts of a row are right, where n is what its key ends in; later ones are wrong.
    """

    name = "script"

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self._answers = answers
        self.drafted: dict[str, Transcript] = {}
        self.strict = False  # whether a row ends where it has no logits

    def draft(self, logits: Logits, row: Row, before: Sequence[Draft], ids: Ids | None) -> Draft:
        """Draft what the script says, and keep the head's logits."""
        self.drafted.setdefault(row.key, []).append(logits.copy())
        token = self._answers[row.key][len(row.generated) + len(before)]
        return Draft(token if len(before) < _right(row) else int(token == 0))

    def verify(self, logits: Logits, row: Row, drafts: Sequence[Draft]) -> Verdict:
        """Accept what the script says."""
        if self.strict:
            finite(logits[0])
        right, begin = min(_right(row), len(drafts)), len(row.generated)
        tokens = self._answers[row.key][begin : begin + right + 1]
        for token in tokens:
            row.commit(token)
        return Verdict(tokens, [], right)


def _right(row: Row) -> int:
    return int(row.key[-1]) % _CASES if len(row.generated) == 1 else 0


def rounding(card: ModelCard) -> float:
    """Return the largest logit difference that a model's type explains on its device."""
    if card.dtype == "float32" and card.device == "gpu":
        return _TENSOR_FLOAT_BOUND
    return BOUNDS.get(card.dtype, _PACKED_BOUND)


def check_golden(head: Head, trunk: Trunk, folder: Path, bound: float) -> Check:
    """Compare a head with the values its trainer recorded, hidden states in and out.

    Raises:
        LaneRefused: When they differ by more than the type's bound.
    """
    golden = np.load(folder / "golden.npz")
    worst = 0.0
    for name in golden.files:
        case, _, root = name.removesuffix("_g").rpartition("_")
        if name.endswith("_g"):
            tokens, hidden = golden[f"{case}_tokens"], golden[f"{case}_hidden"]
            found = _recursion(head, trunk, hidden, tokens, int(root), golden[name])
            worst = max(worst, float(np.abs(found - golden[name]).max()))
    check = Check("golden head", worst <= bound, f"{worst:.3g} of {bound:.3g} allowed")
    if not check.passed:
        raise LaneRefused("mtp", check.name, check.found)
    return check


def _recursion(
    head: Head,
    trunk: Trunk,
    hidden: NDArray[np.float32],
    tokens: NDArray[np.int32],
    root: int,
    golden: NDArray[np.float32],
) -> NDArray[np.float32]:
    """Read up to a position and draft greedily from there; return the hidden states of each."""
    slots = trunk.new_row()
    one = Layout([1])
    head.read(slots, 0, mx.array(hidden[:root]), tokens[1 : root + 1].tolist())
    states = head.step(
        slots,
        slots.drafted,
        one,
        mx.array(hidden[root : root + 1]),
        mx.array(tokens[root + 1 : root + 2]),
    )
    slots.drafted[0] += 1
    found = [on_host(states)[0]]
    for depth in range(1, len(golden)):
        at = on_host(head.logits(states))[0].argmax()
        drafted = int(at if head.ids is None else head.ids[at])
        lengths = [slots.drafted[0] + depth - 1]
        states = head.step(slots, lengths, one, states, mx.array([drafted]))
        found.append(on_host(states)[0])
    return np.stack(found)


def _refuse(lane_name: str, checks: Sequence[Check]) -> None:
    for check in checks:
        if not check.passed:
            raise LaneRefused(lane_name, check.name, check.found)


def _apart(ours: Transcript, theirs: Transcript) -> float:
    return max(apart(a, b) for a, b in zip(ours, theirs, strict=True))


def _finite(traces: Sequence[Trace]) -> Check:
    bad = sum(not sound(logits) for trace in traces for logits in trace.logits)
    return Check("finite logits", bad == 0, f"{bad} positions without a finite largest logit")


def _read(lane: ArLane, key: str, prompt: tuple[int, ...]) -> Row:
    """Return a greedy row whose prompt is read."""
    row = lane.open(key, RowContext(prompt, Sampling(temperature=0), 0, 99, frozenset()))
    lane.prefill(row, len(prompt))
    return row


class _Recorder:
    """A trunk that remembers its steps."""

    def __init__(self, trunk: Trunk) -> None:
        self._trunk = trunk
        self.passes: list[Pass] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def step(self, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        self.passes.append(self._trunk.step(slots, layout, tokens))
        return self.passes[-1]


def _prompts(vocab_size: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(8)
    return [tuple(map(int, rng.integers(0, vocab_size, n))) for n in _LENGTHS]
