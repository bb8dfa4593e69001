"""One row as the scheduler sees it: what it may take, and whether it holds a place. Pure.

A row without credits is parked: it waits for its reader, and keeps its keys and values but no
place. When its reader takes again, it queues for a place as a new row does.
"""

from typing import Final

import msgspec

from ..runtime.context import RowContext
from ..runtime.modes import Priority
from .messages import Lease

# A hiccup of the server or of a good reader does not cost a row its place: it is held for so
# long, once for so many tokens, so that a reader who parks his row often is not waited for.
HOLD_SECONDS: Final = 0.5
HOLD_TOKENS: Final = 128


class Parking(msgspec.Struct, frozen=True):
    """How many rows may be parked, and for how long.

    Args:
        rows: Rows that may be open beyond those that have a place; each has keys and values.
        timeout_s: Seconds a row may be parked in all, beyond `token_s` for each token it gave.
        token_s: What a token buys: a reader who takes one so often is never too slow.
        grace_s: A row that was parked for less is not cut to make room for another.
    """

    rows: int = 8
    timeout_s: float = 300.0
    token_s: float = 1.0
    grace_s: float = 5.0


class Entry(msgspec.Struct):
    """One row as the scheduler sees it.

    Args:
        queued_at: When it began to wait for a place, the last time it did.
        parked_at: When it was parked; None while it is not.
        parked_s: How long it was parked before that, in all.
    """

    lease: Lease
    request_id: str
    context: RowContext
    credits: int
    queued_at: float
    unread: int
    priority: Priority = Priority.NORMAL
    ready_at: float = 0.0
    emitted: int = 0
    placed: bool = False
    parked_at: float | None = None
    parked_s: float = 0.0
    hold_until: float = 0.0
    held_at: int = 0  # tokens emitted when its place was last held

    @property
    def key(self) -> str:
        """The row's id."""
        return self.lease.row

    @property
    def epoch(self) -> int:
        """The order rows were asked for."""
        return self.lease.epoch

    @property
    def length(self) -> int:
        """Tokens of prompt and answer so far."""
        return len(self.context.prompt) + self.emitted

    @property
    def left(self) -> int:
        """Tokens the row may still generate."""
        return self.context.budget - self.emitted

    @property
    def parked(self) -> bool:
        """Whether the row waits for its reader."""
        return self.unread == 0 and self.credits <= 0

    def park(self, now: float) -> None:
        """Note that the row ran out of credits."""
        self.parked_at = now
        if self.emitted - self.held_at >= HOLD_TOKENS:
            self.held_at, self.hold_until = self.emitted, now + HOLD_SECONDS

    def grant(self, tokens: int, now: float) -> None:
        """Take credits; a parked row that has lost its place waits for one from now on."""
        self.credits += tokens
        if self.parked_at is not None and not self.parked:
            self.parked_s += now - self.parked_at
            self.parked_at = None
            self.ready_at = now
            if not self.placed:
                self.queued_at = now

    def cut_at(self, parking: Parking) -> float:
        """Return when a parked row has been parked for too long in all."""
        assert self.parked_at is not None
        allowed = parking.timeout_s + self.emitted * parking.token_s
        return self.parked_at + max(0.0, allowed - self.parked_s)
