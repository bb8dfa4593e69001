"""What a policy sees and what it says: rows, measured costs, and a choice. Pure values."""

from collections.abc import Sequence
from typing import Final, Protocol

import msgspec

from ..runtime.modes import Priority

SHORT: Final = 256  # tokens of the shortest class of lengths


class RowView(Protocol):
    """What a policy may know of a row."""

    @property
    def key(self) -> str: ...
    @property
    def epoch(self) -> int: ...
    @property
    def unread(self) -> int: ...
    @property
    def emitted(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def left(self) -> int: ...
    @property
    def priority(self) -> Priority: ...
    @property
    def queued_at(self) -> float: ...
    @property
    def ready_at(self) -> float: ...


class Costs(msgspec.Struct):
    """What the device was seen to take, in seconds; means are running ones and 0 while unknown.

    Args:
        per_step: Mean of a step, by geometry.
        per_span: Mean of a step, by geometry and the span class of its longest row.
        reading: Sum of all reading.
        stepping: Sum of all steps.
    """

    per_prompt_token: float = 0.0
    per_step: dict[int, float] = {}
    per_span: dict[tuple[int, int], float] = {}
    reading: float = 0.0
    stepping: float = 0.0

    def expected_s(self, read: int, geometry: int | None) -> float | None:
        """Return what a turn should take; None when nothing like it was ever seen.

        What was not seen itself takes at most what its rows or tokens would take in steps.

        Args:
            read: Prompt tokens it reads.
            geometry: Of its step, None without one.
        """
        step_s = self._step_s(geometry) if geometry is not None else 0.0
        token_s = self.per_prompt_token or self._step_s(1)
        if (read and not token_s) or (geometry is not None and not step_s):
            return None
        return read * token_s + step_s

    def _step_s(self, geometry: int) -> float:
        if geometry in self.per_step:
            return self.per_step[geometry]
        seen = (step_s * max(1.0, geometry / of) for of, step_s in self.per_step.items())
        return max(seen, default=0.0)

    def saw_read(self, tokens: int, seconds: float) -> None:
        """Note that reading `tokens` prompt tokens took `seconds`."""
        self.per_prompt_token = _smoothed(self.per_prompt_token, seconds / tokens)
        self.reading += seconds

    def saw_step(self, geometry: int, longest: int, seconds: float) -> None:
        """Note that a step at a geometry took `seconds`; `longest` counts its longest row."""
        self.per_step[geometry] = _smoothed(self.per_step.get(geometry, 0.0), seconds)
        kind = geometry, span_class(longest)
        self.per_span[kind] = _smoothed(self.per_span.get(kind, 0.0), seconds)
        self.stepping += seconds


class Scene(msgspec.Struct, frozen=True):
    """Everything a policy decides on; rows are in the order they were admitted.

    Args:
        reading: Rows with a place whose prompts are not read to the end.
        ready: Rows with a place that can step now; a row without credits is in neither.
        parked: Rows that wait for their reader.
        stepping: Keys of the cohort that stepped last, empty when it was dissolved.
        holding: How many of the parked rows still hold a place.
        back: Rows whose readers take again and that wait for a place.
    """

    reading: Sequence[RowView]
    ready: Sequence[RowView]
    parked: Sequence[RowView]
    stepping: frozenset[str]
    costs: Costs
    now: float
    holding: int = 0
    back: Sequence[RowView] = ()

    @property
    def running(self) -> int:
        """Rows that hold a place."""
        return len(self.reading) + len(self.ready) + self.holding


class Choice(msgspec.Struct, frozen=True):
    """What to do in one turn; `wait_until` says when to look again if there is nothing."""

    read: tuple[str, int] | None = None
    step: tuple[str, ...] = ()
    wait_until: float | None = None


class Policy(Protocol):
    """One scheduler mode."""

    # Whether cohorts of other rows outlive a step (turns) or the new set replaces them (batch).
    keeps_cohorts: bool

    @property
    def places(self) -> int:
        """The most rows that can hold a place at once."""
        ...

    def admit(self, queued: Sequence[RowView], scene: Scene) -> Sequence[RowView]:
        """Return the rows that get a place now, in this order.

        Args:
            queued: Rows that wait for one, those that have waited longest first; some of them
                are open already and come back from being parked.
        """
        ...

    def choose(self, scene: Scene) -> Choice:
        """Return what to run this turn."""
        ...


def span_class(length: int) -> int:
    """Return the class of a length; each holds lengths up to twice those of the one before."""
    return (max(0, length - 1) // SHORT).bit_length()


def first_come(queued: Sequence[RowView], room: int) -> Sequence[RowView]:
    """Return the rows that waited longest, as many as there is room for."""
    return queued[: max(0, room)]


def _smoothed(old: float, new: float) -> float:
    return new if old == 0 else 0.8 * old + 0.2 * new
