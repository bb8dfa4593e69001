"""How many tokens to draft, per step: pure, from what drafts and steps were seen to give and cost.

Drafting pays when the tokens it adds are worth the time it adds, which differs by machine, width
and text. So depth is chosen for the most committed tokens a second, 0 included, and what is not
chosen is tried again now and then, since texts and contexts change.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec

PRIOR: Final = 0.6  # acceptance expected of a draft before any was seen
_PRIOR_WEIGHT: Final = 4.0  # ... which counts as so many drafts
_WINDOW: Final = 256.0  # drafts that the running acceptance remembers
_TRIES: Final = 2  # steps from which a cost is believed; the first may pay for a warm-up
_PROBE: Final = 64  # steps of a width after which a neighbouring depth is tried once
_RECENT: Final = 5  # steps whose median is the cost


class _Rate(msgspec.Struct):
    """A running share of accepted drafts."""

    accepted: float = PRIOR * _PRIOR_WEIGHT
    seen: float = _PRIOR_WEIGHT

    def saw(self, accepted: bool) -> None:
        keep = 1.0 - 1.0 / _WINDOW if self.seen >= _WINDOW else 1.0
        self.accepted = self.accepted * keep + accepted
        self.seen = self.seen * keep + 1.0

    @property
    def share(self) -> float:
        return self.accepted / self.seen


class _Cost:
    """What steps of one width and depth took of late, in seconds."""

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
    """Chooses the depth of every step.

    Args:
        most: The deepest the installed lanes draft; 0 where there is no head.
        fixed: A depth that is always taken, or None to choose.
    """

    def __init__(self, most: int, fixed: int | None = None) -> None:
        self._most = most
        self._fixed = fixed if fixed is None else min(fixed, most)
        self._rates = [_Rate() for _ in range(most)]
        self._costs: dict[tuple[int, int], _Cost] = {}
        self._steps: dict[int, int] = {}

    def choose(self, width: int) -> int:
        """Return the depth of the next step of so many rows."""
        if self._fixed is not None or self._most == 0:
            return self._fixed or 0
        known = [d for d in range(self._most + 1) if self._cost(width, d).known]
        if not known:
            return min(1, self._most)
        best = max(known, key=lambda depth: self.rate(width, depth))
        around = [d for d in (best + 1, best - 1) if 0 <= d <= self._most]
        untried = [d for d in around if d not in known]
        if untried:
            return untried[0]
        turn, rest = divmod(self._steps.get(width, 0), _PROBE)
        return around[turn % len(around)] if rest == _PROBE - 1 else best

    def saw(self, width: int, depth: int, seconds: float, rows: Sequence[tuple[int, int]]) -> None:
        """Note a step and its rows.

        Args:
            rows: Of each row how many tokens were drafted and how many of them accepted.
        """
        self._cost(width, depth).saw(seconds)
        self._steps[width] = self._steps.get(width, 0) + 1
        for drafted, accepted in rows:
            for at in range(min(drafted, accepted + 1)):
                self._rates[at].saw(at < accepted)

    def expected(self, depth: int) -> float:
        """Return the tokens a row is expected to commit in a step."""
        total = reached = 1.0
        for rate in self._rates[:depth]:
            reached *= rate.share
            total += reached
        return total

    def rate(self, width: int, depth: int) -> float:
        """Return the tokens a second that steps of a width are expected to commit."""
        return width * self.expected(depth) / max(self._cost(width, depth).seconds, 1e-9)

    def _cost(self, width: int, depth: int) -> _Cost:
        return self._costs.setdefault((width, depth), _Cost())
