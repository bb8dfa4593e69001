"""Which lane steps and how many tokens it drafts: pure, from what steps were seen to give.

Drafting pays when the tokens it adds are worth the time it adds, which differs by machine, width
and text. So the way to step is chosen for the most committed tokens a second, drafting nothing
included, and what is not chosen is tried again now and then, since texts and contexts change.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgspec

from ..lanes.base import RowDelta
from ..lanes.geometry import GEOMETRIES, geometry_for, lane_name

PRIOR: Final = 0.6  # acceptance expected of a draft before any was seen
_PRIOR_WEIGHT: Final = 4.0  # ... which counts as so many drafts
_SAVED: Final = 0.35  # of what a chain misses, the part that a tree is expected to have
_WINDOW: Final = 256.0  # drafts that the running acceptance remembers
_ROW_WINDOW: Final = 64.0  # and that of a single row
_TRIES: Final = 2  # steps from which a cost is believed; the first may pay for a warm-up
_PROBE: Final = 64  # steps of a width after which a neighbouring way is tried once
_RECENT: Final = 5  # steps whose median is the cost
_LEANING: Final = 1.02  # of two ways equal within the noise, the one with fewer passes is taken
_PER_POSITION: Final = 0.9  # of what drafting costs, the part that is for each position


class Arm(NamedTuple):
    """One way to step: on this lane, drafting so many tokens a row."""

    lane: str
    depth: int


class Steps(NamedTuple):
    """What to run: a lane, its geometry, and how many tokens to draft for each row."""

    lane: str
    geometry: int
    depths: tuple[int, ...]


class _Rate(msgspec.Struct):
    """A running count of drafts at one depth and of those that were accepted."""

    window: float
    accepted: float = 0.0
    seen: float = 0.0

    def saw(self, accepted: bool) -> None:
        keep = 1.0 - 1.0 / self.window if self.seen >= self.window else 1.0
        self.accepted = self.accepted * keep + accepted
        self.seen = self.seen * keep + 1.0


class _Rates:
    """Running acceptance, depth by depth; what was seen little of is expected to be as before it.

    Args:
        prior: The share expected of first drafts before any was seen.
        chain: Rates of a chain; given, these are of trees, of which a chain is the likeliest
            branch, and whose other branches are expected to save some of what the chain misses.
    """

    def __init__(
        self,
        most: int,
        window: float = _WINDOW,
        prior: float = PRIOR,
        chain: "_Rates | None" = None,
    ) -> None:
        self._rates = [_Rate(window) for _ in range(most)]
        self._prior = prior
        self._chain = chain

    def saw(self, drafted: int, accepted: int) -> None:
        """Note so many drafts of which so many were accepted."""
        for at in range(min(drafted, accepted + 1)):
            self._rates[at].saw(at < accepted)

    def reaches(self) -> list[float]:
        """Return the chances that at least 0, 1, 2 ... drafts are accepted."""
        chances = [1.0]
        for share in self.shares():
            chances.append(chances[-1] * share)
        return chances

    def shares(self) -> list[float]:
        """Return the expected share of each depth's drafts, of those whose forerunners were."""
        found, share = [], self._prior
        chain = None if self._chain is None else self._chain.shares()
        for at, rate in enumerate(self._rates):
            if chain is not None:
                share = chain[at] + _SAVED * (1 - chain[at])
            share = (rate.accepted + share * _PRIOR_WEIGHT) / (rate.seen + _PRIOR_WEIGHT)
            found.append(share)
        return found

    def expected(self, depth: int) -> float:
        """Return the tokens a row is expected to commit in a step."""
        return sum(self.reaches()[: depth + 1])

    def heir(self) -> "_Rates":
        """Return rates for one row, of whose first drafts is expected what was seen of all."""
        return _Rates(len(self._rates), _ROW_WINDOW, self.reaches()[1])


class _Cost:
    """What steps of one kind took of late, in seconds."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_RECENT)

    def saw(self, seconds: float) -> None:
        self._recent.append(seconds)

    @property
    def known(self) -> bool:
        return len(self._recent) >= _TRIES

    @property
    def seconds(self) -> float:
        """The median, the lower of two: a stall of the machine is not the step's doing."""
        ordered = sorted(self._recent)
        return ordered[(len(ordered) - 1) // 2] if ordered else 0.0


class Depths:
    """Chooses how every step is run; all rows draft alike.

    Args:
        kind: Kind of the installed lanes, "ar" or "mtp".
        most: The deepest they draft; 0 where there is no head.
        fixed: A depth that is always taken, or None to choose.
        branching: The lane that drafts a tree for a lone row, where there is one.
    """

    def __init__(
        self, kind: str, most: int, fixed: int | None = None, branching: str | None = None
    ) -> None:
        self.kind = kind
        self._most = most
        self._fixed = fixed if fixed is None else min(fixed, most)
        self._branching = branching
        self._main = _Rates(most)
        self._tree = _Rates(most, chain=self._main)
        self._costs: dict[tuple[int, Arm], _Cost] = {}
        self._steps: dict[int, int] = {}

    def choose(self, rows: Sequence[str]) -> Steps:
        """Return how the next step of these rows is run."""
        arm, _ = self._pick(rows)
        return self._steps_of(arm, (arm.depth,) * len(rows))

    def saw(
        self, rows: Sequence[str], steps: Steps, seconds: float, deltas: Sequence[RowDelta]
    ) -> None:
        """Note what a step of some rows took and gave; one that failed gave nothing."""
        width = len(rows)
        self._steps[width] = self._steps.get(width, 0) + 1
        if len(set(steps.depths)) == 1:
            self._cost(width, Arm(steps.lane, steps.depths[0])).saw(seconds)
        for delta in deltas:
            if delta.branches is None:
                self._main.saw(delta.drafted, delta.accepted)
            else:
                self._main.saw(delta.branches.main, delta.branches.main_accepted)
                # A tree that ends early has given up on what lies deeper, so that counts too.
                self._tree.saw(max(steps.depths), delta.accepted)

    def forget(self, row: str) -> None:
        """Let go of what is known of a single row."""

    def rate(self, rows: Sequence[str], arm: Arm) -> float:
        """Return the tokens a second that steps of some rows are expected to commit."""
        seconds = self._cost(len(rows), arm).seconds
        leaning = _LEANING if arm.lane == self._branching else 1.0
        return leaning * self._expected(rows, arm) / max(seconds, 1e-9)

    def _expected(self, rows: Sequence[str], arm: Arm) -> float:
        """Return the tokens that a step is expected to commit."""
        rates = self._tree if arm.lane == self._branching else self._main
        return len(rows) * rates.expected(arm.depth)

    def _pick(self, rows: Sequence[str]) -> tuple[Arm, bool]:
        """Return an arm, and whether it is the best one known and no trial."""
        width = len(rows)
        arms = self._arms(width)
        if self._fixed is not None or self._most == 0:
            deep = [arm for arm in arms if arm.depth == (self._fixed or 0)]
            return deep[-1], True
        known = [arm for arm in arms if self._cost(width, arm).known]
        if not known:
            return next(arm for arm in reversed(arms) if arm.depth == 1), False
        best = max(known, key=lambda arm: self.rate(rows, arm))
        around = [arm for arm in arms if _near(arm, best)]
        untried = [arm for arm in around if arm not in known]
        if untried:
            return untried[0], False
        turn, rest = divmod(self._steps.get(width, 0), _PROBE)
        return (around[turn % len(around)], False) if rest == _PROBE - 1 else (best, True)

    def _arms(self, width: int) -> list[Arm]:
        """Return every way to step so many rows; deeper ones first among equals."""
        lane = lane_name(self.kind, geometry_for(width))
        arms = [Arm(lane, depth) for depth in range(self._most, -1, -1)]
        if self._branching is not None and width == 1:
            arms += [Arm(self._branching, depth) for depth in range(self._most, 0, -1)]
        return arms

    def _steps_of(self, arm: Arm, depths: tuple[int, ...]) -> Steps:
        wide = arm.lane == self._branching
        return Steps(arm.lane, GEOMETRIES[-1] if wide else geometry_for(len(depths)), depths)

    def _cost(self, width: int, arm: Arm) -> _Cost:
        return self._costs.setdefault((width, arm), _Cost())


class RowDepths(Depths):
    """Chooses a depth for each row of a cohort, by how its own drafts fared.

    A draft is worth its position in the pass where the chance to reach it is at least what the
    position costs, in tokens at the going rate; rows whose drafts fail leave the positions out.
    """

    def __init__(self, kind: str, most: int, fixed: int | None = None) -> None:
        super().__init__(kind, most, fixed)
        self._rows: dict[str, _Rates] = {}
        self._uneven: dict[tuple[int, int, int], _Cost] = {}

    def choose(self, rows: Sequence[str]) -> Steps:
        """See `Depths.choose`."""
        arm, settled = self._pick(rows)
        depths = (arm.depth,) * len(rows)
        if settled and self._fixed is None:
            depths = self._by_row(rows, arm)
        return self._steps_of(arm, depths)

    def saw(
        self, rows: Sequence[str], steps: Steps, seconds: float, deltas: Sequence[RowDelta]
    ) -> None:
        """See `Depths.saw`."""
        super().saw(rows, steps, seconds, deltas)
        if len(set(steps.depths)) > 1:
            self._uneven.setdefault(_shape(steps.depths), _Cost()).saw(seconds)
        for delta in deltas:
            self._of(delta.key).saw(delta.drafted, delta.accepted)

    def forget(self, row: str) -> None:
        """See `Depths.forget`."""
        self._rows.pop(row, None)

    def _expected(self, rows: Sequence[str], arm: Arm) -> float:
        return sum(self._of(row).expected(arm.depth) for row in rows)

    def _by_row(self, rows: Sequence[str], best: Arm) -> tuple[int, ...]:
        """Return the plan that commits most tokens a second, the even one included."""
        width = len(rows)
        even = (best.depth,) * width
        if not self._cost(width, best._replace(depth=0)).known:
            return even
        rate = self._rate_of(rows, best.lane, even)
        plans = [even]
        for most in range(1, self._most + 1):
            worth = rate * self._position_s(best.lane, width, most)
            plans.append(tuple(self._worth(self._of(row), worth, most) for row in rows))
        return max(plans, key=lambda plan: self._rate_of(rows, best.lane, plan))

    def _worth(self, rates: _Rates, least: float, most: int) -> int:
        """Return how many drafts have a chance of at least `least` to be reached and accepted."""
        return sum(chance >= least for chance in rates.reaches()[1 : most + 1])

    def _rate_of(self, rows: Sequence[str], lane: str, plan: Sequence[int]) -> float:
        tokens = sum(self._of(row).expected(d) for row, d in zip(rows, plan, strict=True))
        return tokens / max(self._seconds(lane, plan), 1e-9)

    def _seconds(self, lane: str, plan: Sequence[int]) -> float:
        """Return what a step takes: as seen, or else a hopeful guess, which a trial corrects."""
        width, deepest = len(plan), max(plan)
        seen = self._uneven.get(_shape(plan))
        if seen is not None and seen.known:
            return seen.seconds
        left_out = width * deepest - sum(plan)
        return self._even_s(lane, width, deepest) - left_out * self._position_s(
            lane, width, deepest
        )

    def _position_s(self, lane: str, width: int, depth: int) -> float:
        """Return what one drafted position may take: its part of all that drafting adds."""
        if depth == 0:
            return 0.0
        added = self._even_s(lane, width, depth) - self._even_s(lane, width, 0)
        return max(0.0, _PER_POSITION * added / (width * depth))

    def _even_s(self, lane: str, width: int, depth: int) -> float:
        """Return what an even step takes, in line with shallower ones where it was not seen."""
        seen = self._cost(width, Arm(lane, depth))
        if seen.known or depth == 0:
            return seen.seconds
        plain = self._cost(width, Arm(lane, 0)).seconds
        shallower = self._even_s(lane, width, depth - 1)
        step = (shallower - plain) / (depth - 1) if depth > 1 else plain / width
        return shallower + max(0.0, step)

    def _of(self, row: str) -> _Rates:
        if row not in self._rows:
            self._rows[row] = self._main.heir()
        return self._rows[row]


def _near(one: Arm, other: Arm) -> bool:
    if one.lane == other.lane:
        return abs(one.depth - other.depth) == 1
    return one.depth == other.depth or one.depth + other.depth == 1


def _shape(depths: Sequence[int]) -> tuple[int, int, int]:
    """Return what an uneven step's cost depends on: rows, deepest draft, drafts in all."""
    return len(depths), max(depths), sum(depths)
