"""One turn of the owner: choose, run, hand out. Synchronous; lives where the device is."""

from collections.abc import Callable, Mapping
from typing import Final

from ..lanes.base import Lane, Row, RowDelta
from ..runtime.context import RowContext
from ..runtime.errors import RowError
from .core import Core, Outcome, Plan
from .messages import OwnerMessage, Turn

# A turn may take so many times what such turns took before, since contexts grow and machines are
# shared; one whose like was never seen may compile kernels first.
_SLOWER: Final = 10.0
_FIRST: Final = 10.0  # times the least allowance
STALL_SECONDS: Final = 30.0


class Engine:
    """Drives the scheduler core over installed lanes.

    Args:
        lanes: Installed lanes by name; the narrowest reads prompts.
        clock: Seconds, the same clock the requests are stamped with.
        stall_s: The least time a turn may take before it counts as hung.
    """

    def __init__(
        self,
        core: Core,
        lanes: Mapping[str, Lane],
        clock: Callable[[], float],
        stall_s: float = STALL_SECONDS,
    ) -> None:
        self._core = core
        self._lanes = lanes
        self._reader = min(lanes.values(), key=lambda lane: lane.spec.geometry)
        self._clock = clock
        self._rows: dict[str, Row] = {}
        self._unopened: dict[str, str] = {}  # rows that failed as they began, and why
        self._wait_until: float | None = None
        self._stall_s = stall_s
        self.allowance_s = stall_s
        self.doing = "idle"

    def feed(self, message: OwnerMessage) -> None:
        """Take one message."""
        self._core.feed(message, self._clock())

    def turn(self) -> Turn | None:
        """Run one turn; None when there is nothing to run."""
        plan = self.choose()
        if plan.idle:
            return None
        outcome = self.run(plan)
        return self.hand_out(outcome)

    def choose(self) -> Plan:
        """Ask the core what to run."""
        plan = self._core.next_plan(self._clock())
        self._wait_until = plan.wait_until
        self.doing = "decoding" if plan.step else "prefilling" if plan.read else "idle"
        expected_s = self._core.expected_s(plan)
        if expected_s is None:
            self.allowance_s = _FIRST * self._stall_s
        else:
            self.allowance_s = self._stall_s + _SLOWER * expected_s
        return plan

    def run(self, plan: Plan) -> Outcome:
        """Run a plan on the lanes; what escapes from here means the device cannot be trusted."""
        for key in plan.close:
            self._unopened.pop(key, None)
            row = self._rows.pop(key, None)
            if row is not None:
                self._reader.close(row)
        for key, context in plan.open:
            self._open(key, context)
        began = self._clock()
        read, advanced = self._read(*plan.read) if plan.read else (None, 0)
        between = self._clock()
        steps: tuple[RowDelta, ...] = ()
        if plan.step is not None:
            rows = [self._rows[key] for key in plan.step.rows]
            how = plan.step.steps
            steps = tuple(self._lanes[how.lane].step(rows, how.depths))
        return Outcome(read, advanced, between - began, steps, self._clock() - between)

    def hand_out(self, outcome: Outcome) -> Turn:
        """Book the outcome and return what to hand to whom."""
        turn = self._core.apply(outcome, self._clock())
        self.doing = "idle"  # the allowance stays: until it is back the turn is not over
        return turn

    def wait_s(self) -> float | None:
        """Return how long the device may wait for messages."""
        if self._wait_until is None:
            return None
        return max(0.0, self._wait_until - self._clock())

    def _open(self, key: str, context: RowContext) -> None:
        """Start a row; one that cannot start ends when its prompt would be read."""
        try:
            self._rows[key] = self._reader.open(key, context)
        except Exception as error:
            self._unopened[key] = str(error) or repr(error)

    def _read(self, key: str, tokens: int) -> tuple[RowDelta | None, int]:
        """Read a piece of a prompt; return what it gave, and by how many tokens the row is on."""
        if key in self._unopened:
            return RowDelta(key, error=f"starting the row failed: {self._unopened[key]}"), 0
        row = self._rows[key]
        before = row.read
        try:
            delta = self._reader.prefill(row, tokens)
        except RowError as error:
            delta = RowDelta(key, error=str(error) or type(error).__name__)
        return delta, row.read - before
