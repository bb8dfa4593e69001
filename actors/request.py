"""One request from prompt to last token: its rows, its text, its stops, its cancel scope.

The actor runs in the supervisor's nursery and talks to the owner over messages and to its
reader over a bounded channel. Nothing but cancellation may leave its task: whatever goes wrong
becomes this request's error.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, Final, Literal

import msgspec
import trio

from ..runtime.context import RowContext
from ..runtime.log import logger
from ..runtime.meter import Meter
from ..runtime.modes import Priority
from ..runtime.parts import Manner
from ..runtime.text import Text
from .messages import Admitted, Failed, Lease, Tokens
from .owner import ModelOwner
from .speech import CREDITS, Ended, Piece, Speech

PIECES: Final = 16  # pieces a row may have waiting for its reader


class Generation(msgspec.Struct, frozen=True):
    """What a request asks for, with all wire formats behind it.

    Args:
        rows: One context a choice.
        stops: Stop strings; one that appears in what is said ends a row just before it.
        manner: How to tell thought, content and calls apart.
        priority: What its turns weigh, where the mode knows priorities.
    """

    request_id: str
    rows: tuple[RowContext, ...]
    stops: tuple[str, ...] = ()
    manner: Manner = Manner()
    priority: Priority = Priority.NORMAL


class Alive(msgspec.Struct, frozen=True):
    """Nothing was said for a while, but the request lives."""


Event = Piece | Ended | Alive
_ALIVE: Final = Alive()
_READERS: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("call_readers")
_MOST_READERS: Final = 4  # long calls that are read at a time


class Receipt(msgspec.Struct, frozen=True):
    """What ran for a request, as told to the client that sent it.

    Args:
        cached_tokens: Of each row, prompt tokens that came from the prefix bank.
    """

    lanes: tuple[str, ...]
    widths: tuple[int, ...]
    queue_wait_s: float
    time_to_first_token_s: float
    completion_tokens: int
    reasoning_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    cached_tokens: tuple[int, ...]


class Finished(msgspec.Struct, frozen=True):
    """The one good end of a request."""

    receipt: Receipt


class Broken(msgspec.Struct, frozen=True):
    """The one bad end of a request."""

    code: str
    message: str


Outcome = Finished | Broken
Origin = Literal[
    "client_disconnect", "client_stall", "client_slow", "deadline", "server_shutdown",
    "internal_error",
]  # fmt: skip


class RequestActor:
    """One request.

    Args:
        deadline_s: Seconds the whole request may take; infinity for no limit.
        stall_s: Seconds its reader may take nothing.

    Raises:
        BusyError: On creation, when the queue has no room for all its rows.
        CallerError: When its rows never will fit.
        OwnerDied: On creation, when there is no model any more.
    """

    def __init__(
        self,
        generation: Generation,
        owner: ModelOwner,
        text: Text,
        meter: Meter,
        *,
        mode: str,
        deadline_s: float,
        stall_s: float,
        clock: Callable[[], float] = trio.current_time,
    ) -> None:
        self._owner = owner
        self._meter = meter
        self._clock = clock
        self._stall_s = stall_s
        self._received_at = clock()
        self._scope = trio.CancelScope(deadline=self._received_at + deadline_s)
        self._reason: Origin | None = None
        self._rows = [
            Speech(i, text, generation.manner, generation.stops)
            for i in range(len(generation.rows))
        ]
        self._lanes: set[str] = set()
        self._widths: set[int] = set()
        self._cached: dict[int, int] = {}  # of each row, prompt tokens from the prefix bank
        self._drafted = 0
        self._accepted = 0
        self._queue_wait_s: float | None = None
        self._first_token_s: float | None = None
        self._log = logger().bind(request_id=generation.request_id, mode=mode)
        self._send, self.events = trio.open_memory_channel[Event](PIECES * len(self._rows))
        self.outcome: Outcome | None = None
        self._quiet = False
        self._sending = trio.CancelScope()  # while an event waits for its reader
        # Here and not in the task, so that requests queue in the order they came in; last, since
        # an exception after it would leave rows that nobody gives back.
        self._leases, self._replies = owner.admit(
            generation.request_id,
            generation.rows,
            CREDITS,
            partial(self.hang_up, "client_slow"),
            generation.priority,
        )

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far that count."""
        return sum(row.tokens for row in self._rows)

    def hang_up(self, reason: Origin) -> None:
        """End the request from outside; the first reason is kept."""
        if self._reason is None:
            self._reason = reason
            self._scope.cancel(reason=reason)

    def beat(self) -> None:
        """Tell the reader that the request lives, when nothing was said since the last beat.

        One task calls this for all requests: a timer for every token would cost more than it.
        """
        if self._quiet and self.outcome is None:
            with suppress(trio.WouldBlock, trio.BrokenResourceError):
                self._send.send_nowait(_ALIVE)
        self._quiet = True

    def give_up(self) -> None:
        """Give back what creation took, for an actor that will never run."""
        self._owner.release(self._leases)
        self._replies.close()
        self._settle(_abandoned("server_shutdown"))
        self._send.close()

    async def run(self) -> None:
        """Live until the request is over; never raises, but is cancelled with its nursery."""
        try:
            with self._scope:
                await self._live()
        finally:
            if self.outcome is None:
                late: Origin = "deadline" if self._scope.cancelled_caught else "server_shutdown"
                self._settle(_abandoned(self._reason or late))
            self._send.close()

    async def _live(self) -> None:
        self._log.info("request.queued", rows=[lease.row for lease in self._leases])
        try:
            await self._serve()
        except trio.BrokenResourceError:
            self._reason = self._reason or "client_disconnect"
        except trio.TooSlowError:
            self._reason = self._reason or "client_stall"
        except Exception as error:
            self._log.error("request.crashed", error=repr(error), exc_info=error)
            self._settle(Broken("internal_error", "the request failed inside the server"))
        finally:
            self._owner.release(self._leases)
            self._replies.close()

    async def _serve(self) -> None:
        index = {lease: i for i, lease in enumerate(self._leases)}
        while not all(row.ended for row in self._rows):
            message = await self._replies.receive()
            if isinstance(message, Failed):
                self._settle(Broken(message.code, message.message))
                return
            await self._take(message, self._rows[index[message.lease]])
        self._settle(Finished(self._receipt()))

    async def _take(self, message: Admitted | Tokens, row: Speech) -> None:
        match message:
            case Admitted(lease, queue_wait_s):
                self._queue_wait_s = max(self._queue_wait_s or 0.0, queue_wait_s)
                self._log.info(
                    "request.admitted", row_id=lease.row, queue_wait_s=round(queue_wait_s, 6)
                )
            case Tokens():
                await self._take_tokens(message, row)

    async def _take_tokens(self, message: Tokens, row: Speech) -> None:
        if row.ended:
            return
        self._lanes.add(message.lane)
        if message.width:
            self._widths.add(message.width)
        self._cached[row.index] = self._cached.get(row.index, 0) + message.cached
        self._drafted += message.drafted
        self._accepted += message.accepted
        if message.tokens and self._first_token_s is None:
            self._note_first_token(message.lease)
        if row.takes_long:
            said = await trio.to_thread.run_sync(row.take, message, limiter=_few_readers())
        else:
            said = row.take(message)
        for event in said:
            await self._pass_on(event)
        if row.ended:
            self._owner.leave(message.lease, "text ended")
        elif granted := row.credit(len(message.tokens)):
            self._owner.grant(message.lease, granted)

    async def _pass_on(self, event: Event) -> None:
        """Hand an event to the reader; waiting for it has a limit, and mostly need not begin."""
        self._quiet = False
        try:
            self._send.send_nowait(event)
        except trio.WouldBlock:
            with trio.fail_after(self._stall_s) as self._sending:
                await self._send.send(event)

    def reader_took(self) -> None:
        """Note that the reader, which takes no event now, goes on with a large one."""
        self._sending.deadline = trio.current_time() + self._stall_s

    def _note_first_token(self, lease: Lease) -> None:
        self._first_token_s = self._clock() - self._received_at
        self._meter.first_tokens.append(self._first_token_s)
        self._log.info(
            "request.first_token",
            row_id=lease.row,
            time_to_first_token_s=round(self._first_token_s, 6),
        )

    def _receipt(self) -> Receipt:
        return Receipt(
            tuple(sorted(self._lanes)),
            tuple(sorted(self._widths)),
            round(self._queue_wait_s or 0.0, 6),
            round(self._first_token_s or 0.0, 6),
            self.completion_tokens,
            sum(row.thought_tokens for row in self._rows),
            self._drafted,
            self._accepted,
            tuple(self._cached.get(row.index, 0) for row in self._rows),
        )

    def _settle(self, outcome: Outcome) -> None:
        """Set the one terminal outcome and log it."""
        assert self.outcome is None, "a request ends once"
        self.outcome = outcome
        fields: dict[str, Any] = {
            "completion_tokens": self.completion_tokens,
            "duration_s": round(self._clock() - self._received_at, 6),
        }
        match outcome:
            case Finished(receipt):
                finishes = [row.ended.finish for row in self._rows if row.ended]
                self._meter.saw_end("finished")
                self._log.info(
                    "request.finished",
                    **fields,
                    finish_reasons=finishes,
                    lanes=receipt.lanes,
                    widths=receipt.widths,
                    drafted_tokens=receipt.drafted_tokens,
                    accepted_tokens=receipt.accepted_tokens,
                    cached_tokens=sum(receipt.cached_tokens),
                    reasoning_tokens=receipt.reasoning_tokens,
                )
            case Broken("client_disconnect" | "client_stall" as code):
                self._meter.saw_end("cancelled")
                self._log.info("request.cancelled", **fields, reason=code)
            case Broken(code, message):
                self._meter.saw_end("failed")
                self._log.warning("request.failed", **fields, code=code, error=message)


def _few_readers() -> trio.CapacityLimiter:
    try:
        return _READERS.get()
    except LookupError:
        _READERS.set(trio.CapacityLimiter(_MOST_READERS))
        return _READERS.get()


def _abandoned(reason: Origin) -> Broken:
    messages = {
        "client_disconnect": "the client went away",
        "client_stall": "the client stopped reading",
        "client_slow": "the client read too slowly for too long",
        "deadline": "the request took longer than request_timeout_s allows",
        "server_shutdown": "the server is shutting down",
        "internal_error": "the request failed inside the server",
    }
    return Broken("client_stall" if reason == "client_slow" else reason, messages[reason])
