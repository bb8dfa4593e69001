"""Modes in which one row runs at a time: to its end, or in turns of bounded cost. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final

import msgspec

from ..runtime.modes import Pace, Priority
from .reader import Reader
from .scene import Choice, RowView, Scene, first_come

# Tokens a row is granted in one round of turns. Every row has some, so none starves.
WEIGHTS: Final[Mapping[Priority, float]] = {
    Priority.BACKGROUND: 0.25,
    Priority.NORMAL: 1.0,
    Priority.INTERACTIVE: 4.0,
}
AGE_SECONDS: Final = 20.0  # of waiting that lift a row by one priority, for a place and its prompt

_NOBODY: Final = -1  # before every epoch
_RANKS: Final = tuple(Priority)


class SerialPolicy:
    """One row at a time, first come, first served; a parked row lets the next one by.

    It gets its place back when that one ends or is parked itself, in the order in which rows
    began to wait.
    """

    keeps_cohorts = True
    places = 1

    def __init__(self, pace: Pace, share: float, tile: int) -> None:
        self._reader = Reader(pace, share, tile)

    def admit(self, queued: Sequence[RowView], scene: Scene) -> Sequence[RowView]:
        """Admit one when nobody has the place."""
        return first_come(queued, self.places - scene.running)

    def choose(self, scene: Scene) -> Choice:
        """Serve the row that has the place."""
        row = next(iter((*scene.reading, *scene.ready)), None)
        if row is None:
            return Choice()
        if row.unread:
            return Choice(read=(row.key, self._reader.tokens(row, scene, 0.0)))
        return Choice(step=(row.key,))


class Account(msgspec.Struct):
    """What a row may take and has taken, in tokens; a step may overdraw it."""

    granted: float
    before: int  # tokens it had when the account was opened

    def balance(self, row: RowView) -> float:
        """Return the tokens left to take."""
        return self.granted - (row.emitted - self.before)


class CooperativePolicy:
    """Rows take turns of one step each, by deficit round robin (Shreedhar, Varghese 1995).

    Steps are accounted in tokens, since a row whose drafts are accepted gains several in one: a
    round grants every row its weight, and a row steps while it has something left, so rows of a
    priority get equal tokens a second. Reading prompts is one more taker of turns and accounted
    in measured seconds: it is on while it has taken no more than its share of the time since rows
    began to wait for it.
    """

    keeps_cohorts = True

    def __init__(self, pace: Pace, share: float, tile: int) -> None:
        self._limit = pace.max_active_requests
        self._reader = Reader(pace, share, tile)
        self._accounts: dict[str, Account] = {}
        self._last = _NOBODY  # epoch of the row that had the last turn
        self._since: tuple[float, float] | None = None  # seconds read and stepped till then

    @property
    def places(self) -> int:
        """Rows that take turns."""
        return self._limit

    def admit(self, queued: Sequence[RowView], scene: Scene) -> Sequence[RowView]:
        """Fill up to max_active_requests, the most urgent first."""
        room = self._limit - scene.running
        return first_come(sorted(queued, key=lambda row: _urgency(row, scene.now)), room)

    def choose(self, scene: Scene) -> Choice:
        """Give the next row its step; at the end of a round read a piece of a prompt when due."""
        following = self._next(scene) if scene.ready else None
        over = following is None or following.epoch <= self._last
        if self._reading_is_due(scene) and over:
            self._last = _NOBODY
            row = self._reader.next(_most_urgent(scene.reading, scene.now))
            round_s = len(scene.ready) * scene.costs.per_step.get(1, 0.0)
            return Choice(read=(row.key, self._reader.tokens(row, scene, round_s)))
        if following is None:
            return Choice()
        self._last = following.epoch
        return Choice(step=(following.key,))

    def _reading_is_due(self, scene: Scene) -> bool:
        if not scene.reading or not scene.ready:
            self._since = None
            return bool(scene.reading)
        costs = scene.costs
        if self._since is None:
            self._since = costs.reading, costs.stepping
        read, stepped = costs.reading - self._since[0], costs.stepping - self._since[1]
        return read <= stepped * self._reader.ratio

    def _next(self, scene: Scene) -> RowView:
        """Return the next row, in order of arrival, that has tokens to take."""
        self._keep_accounts(scene)
        while True:
            able = [row for row in scene.ready if self._accounts[row.key].balance(row) > 0]
            if able:
                return next((row for row in able if row.epoch > self._last), able[0])
            for row in scene.ready:
                self._accounts[row.key].granted += WEIGHTS[row.priority]

    def _keep_accounts(self, scene: Scene) -> None:
        """Open an account for every new row, and close those of rows that are gone."""
        held = {row.key for row in (*scene.ready, *scene.parked, *scene.back)}
        self._accounts = {key: one for key, one in self._accounts.items() if key in held}
        for row in scene.ready:
            if row.key not in self._accounts:
                self._accounts[row.key] = Account(WEIGHTS[row.priority], row.emitted)


def _rank(row: RowView, now: float) -> int:
    """Return a row's priority, lifted by the time it has waited."""
    aged = _RANKS.index(row.priority) + int((now - row.queued_at) / AGE_SECONDS)
    return min(aged, len(_RANKS) - 1)


def _urgency(row: RowView, now: float) -> tuple[int, float, int]:
    return -_rank(row, now), row.queued_at, row.epoch


def _most_urgent(rows: Sequence[RowView], now: float) -> list[RowView]:
    """Return the rows of the highest rank, in order of arrival."""
    best = max(_rank(row, now) for row in rows)
    return [row for row in rows if _rank(row, now) == best]
