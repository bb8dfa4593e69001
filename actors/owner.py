"""The model owner: one mailbox in front of the device, and the hand-out behind it.

It never waits for a reader: every reply is sent without blocking, and a request that does not
take its tokens runs out of credits instead.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import trio

from ..runtime.context import RowContext
from ..runtime.errors import BusyError, CallerError, ModelError, OwnerDied
from ..runtime.log import logger
from ..runtime.meter import Meter
from ..runtime.modes import Priority
from ..runtime.thread import Device
from .cohort_log import CohortLog
from .engine import STALL_SECONDS
from .messages import (
    Admit,
    Admitted,
    CohortSealed,
    Failed,
    Grant,
    Lease,
    Leave,
    OwnerMessage,
    RowMessage,
    Turn,
)

_FAREWELL_SECONDS = 1.0  # how long a dead owner waits for its last errors to reach clients


class _Client(NamedTuple):
    """Who holds a lease: where its messages go, and how it is ended when it does not take them."""

    send: trio.MemorySendChannel[RowMessage]
    hang_up: Callable[[], None]


class ModelOwner:
    """The one actor that owns the model.

    Args:
        device: Where turns run.
        places: Rows that can run at once.
        max_queue: Rows that may wait beyond those.
        stall_s: How long messages may wait for a device that runs nothing.
    """

    def __init__(
        self,
        device: Device[OwnerMessage, Turn],
        meter: Meter,
        mode: str,
        places: int,
        max_queue: int,
        clock: Callable[[], float] = trio.current_time,
        stall_s: float = STALL_SECONDS,
    ) -> None:
        self._device = device
        self._meter = meter
        self._stall_s = stall_s
        self._log = logger().bind(mode=mode)
        self._cohorts = CohortLog(self._log)
        self._places = places
        self._room = places + max_queue
        self._clock = clock
        self._epoch = 0
        self._open: dict[Lease, _Client] = {}
        self._parked: frozenset[Lease] = frozenset()  # as of the last turn, without who took since
        self._holders = 0  # requests that still hold rows, so a dying owner can wait for them
        self._freed = trio.Event()
        self.dead = False

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run the device until cancelled.

        Raises:
            OwnerDied: When the device broke; every open request has been told before.
        """
        try:
            await self._device.run(self._publish, task_status)
        except ModelError:
            raise  # refused at load; nobody was served
        except Exception as error:
            self.dead = True
            for lease in list(self._open):
                failure = Failed(lease, "model_failed", "the model stopped working; try again")
                with suppress(Exception):  # whatever is wrong here, the others are told too
                    self._send(failure)
            self._log.error("owner.failed", error=repr(error), exc_info=error)
            with trio.move_on_after(_FAREWELL_SECONDS):
                await self._nobody_holds()
                await trio.sleep(_FAREWELL_SECONDS / 10)  # for the error events' last write
            raise OwnerDied(f"the model owner failed: {error!r}") from error

    def admit(
        self,
        request_id: str,
        contexts: Sequence[RowContext],
        credits: int,
        hang_up: Callable[[], None],
        priority: Priority = Priority.NORMAL,
    ) -> tuple[list[Lease], trio.MemoryReceiveChannel[RowMessage]]:
        """Queue a request's rows at once, in order, and return what they will say.

        No task switch lies between two calls, so rows queue in the order they were asked for.

        Args:
            hang_up: Ends the request, when its client reads so slowly that a row of it is cut.

        Raises:
            BusyError: When there is no room for all of them; then none is queued.
            CallerError: When there never will be.
            OwnerDied: When there is no model any more.
        """
        self._check_room(len(contexts))
        # Unbounded, since what a row may send is bounded by the credits its request grants.
        send, receive = trio.open_memory_channel[RowMessage](math.inf)
        client = _Client(send, hang_up)
        leases: list[Lease] = []
        self._holders += 1
        try:
            for i, context in enumerate(contexts):
                leases.append(self._lease(f"{request_id}.{i}", client))
                at = self._clock()
                self._device.post(Admit(leases[-1], request_id, context, credits, at, priority))
        except BaseException:
            self.release(leases)
            raise
        return leases, receive

    def release(self, leases: Sequence[Lease]) -> None:
        """Take back what `admit` gave; rows that are still open are let go."""
        self._holders -= 1
        if not self._holders:
            self._freed.set()
        for lease in leases:
            self.leave(lease, "request ended")

    def grant(self, lease: Lease, tokens: int) -> None:
        """Let a row run `tokens` further."""
        self._parked -= {lease}
        self._device.post(Grant(lease, tokens))

    def leave(self, lease: Lease, reason: str) -> None:
        """Give a row up; one that ended already is nothing."""
        if self._open.pop(lease, None) is not None:
            self._device.post(Leave(lease, reason))

    def stalled(self, now: float) -> bool:
        """Return whether the device hangs: a turn over its allowance, or work that it never takes.

        Rows that wait for their readers are no work.
        """
        pulse = self._device.pulse()
        if self.dead or not pulse.alive:
            return True
        if pulse.began is not None:
            return now - pulse.began > pulse.allowance_s
        if pulse.waiting_since is not None:
            return now - pulse.waiting_since > self._stall_s
        # A turn that has ended and is not handed out yet is progress too.
        last = max(self._meter.last_progress, pulse.ended)
        return self._meter.state != "idle" and now - last > self._stall_s

    def state(self) -> str:
        """Return what the device does now, or has to do next: idle, prefilling or decoding."""
        doing = self._device.pulse().doing
        return doing if doing != "idle" else self._meter.state

    async def _nobody_holds(self) -> None:
        while self._holders:
            self._freed = trio.Event()
            await self._freed.wait()

    def _check_room(self, rows: int) -> None:
        if self.dead:
            raise OwnerDied("the model owner is gone")
        if rows > self._room:
            raise CallerError(
                f"a request of {rows} rows can never fit: this server holds {self._room} "
                "(max_queue and what runs); ask for fewer choices or prompts",
                param="n",
            )
        held = sum(lease not in self._parked for lease in self._open)  # they take nobody's room
        if held + rows > self._room:
            waiting = held - self._places
            raise BusyError(
                f"the queue is full ({max(0, waiting)} rows wait, {rows} more do not fit); "
                "try again later",
                self._retry_after(),
            )

    def _lease(self, row: str, client: _Client) -> Lease:
        self._epoch += 1
        lease = Lease(row, self._epoch)
        self._open[lease] = client
        return lease

    def _publish(self, turn: Turn) -> None:
        """Hand out one turn; what this raises ends the owner."""
        self._count(turn)
        for note in turn.notes:
            if isinstance(note, CohortSealed):
                self._meter.saw_cohort(len(note.rows))
            self._cohorts.note(note, self._clock())
        self._cohorts.sum_up(self._clock(), not turn.active_rows)
        for message in turn.messages:
            if isinstance(message, Admitted):
                self._meter.saw_wait(message.queue_wait_s)
            self._send(message)

    def _send(self, message: RowMessage) -> None:
        client = self._open.get(message.lease)
        if client is None:
            return  # the request left while this was on its way
        if isinstance(message, Failed) or getattr(message, "finish", None) is not None:
            del self._open[message.lease]
        if isinstance(message, Failed) and message.code == "client_stall":
            client.hang_up()  # it waits for its reader and would take no message
            return
        try:
            client.send.send_nowait(message)
        except trio.BrokenResourceError:
            self.leave(message.lease, "request gone")

    def _count(self, turn: Turn) -> None:
        if turn.lane is not None:
            self._meter.saw_step(turn.lane, turn.width, turn.step_s)
            self._meter.saw_drafts(turn.depth, [(d.drafted, d.accepted) for d in turn.drafts])
            for drafts in turn.drafts:
                self._meter.draft_failures += drafts.failed
                if (tree := drafts.branches) is not None:
                    self._meter.saw_branches(tree.carried, tree.nodes, tree.taken, drafts.committed)
        self._meter.tokens_committed += turn.committed
        if turn.prompt_tokens:
            self._meter.saw_read(turn.prompt_tokens, turn.read_s)
        self._meter.cached_tokens += turn.cached_tokens
        self._parked = turn.parked
        self._meter.saw_rows(
            turn.active_rows,
            turn.queue_depth,
            turn.state,
            self._clock(),
            parked=len(turn.parked),
        )

    def _retry_after(self) -> int:
        """Guess when a place frees: the median of recent waits, within 1 and 60 seconds."""
        p50 = self._meter.queue_wait.p50 or 1.0
        return max(1, min(60, round(p50)))
