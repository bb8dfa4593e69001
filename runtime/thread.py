"""The one thread that may call MLX, and the way back into trio.

`trio.to_thread` promises no fixed thread, and an MLX array belongs to the thread that made it.
So this is a plain thread, alive from start to stop: it blocks on its inbox while idle, runs
turn after turn while there is work, and crosses back with one `run_sync_soon` a turn. That call
only puts the turn into a bounded mailbox; a task of trio's hands it out, since an exception in the
call itself would end trio's own loop.
"""

import queue
import threading
from collections.abc import Callable
from typing import Final, Generic, Protocol, TypeVar

import msgspec
import trio

Message = TypeVar("Message", contravariant=True)
Result = TypeVar("Result", covariant=True)
M = TypeVar("M")
R = TypeVar("R")

# Turns that trio has not taken yet; more would let the device run ahead of its cancellations.
LAG: Final = 4
JOIN_SECONDS: Final = 5.0  # a turn is far shorter; a device stuck for longer is given up


class Pulse(msgspec.Struct, frozen=True):
    """What a device is doing at the moment it is asked; times in trio's clock.

    Args:
        began: When the running turn began, its messages included; None between turns.
        allowance_s: What that turn may take before it counts as hung.
        ended: When the last turn that ran ended, handed out or not; 0 before there was one.
        waiting_since: When the oldest message that the device has not taken came; None without.
        doing: "prefilling", "decoding" or, in what is neither, "idle".
        alive: Whether there is still something that takes messages.
    """

    began: float | None = None
    allowance_s: float = 0.0
    doing: str = "idle"
    waiting_since: float | None = None
    alive: bool = True
    ended: float = 0.0


class TurnLoop(Protocol[Message, Result]):
    """What the thread drives."""

    # Of the running turn: what it may take in seconds, and what it does; see `Pulse`. Written
    # before the turn runs and read by other threads.
    allowance_s: float
    doing: str

    def feed(self, message: Message) -> None:
        """Take one message."""
        ...

    def turn(self) -> Result | None:
        """Run one turn; None when there is nothing to run."""
        ...

    def wait_s(self) -> float | None:
        """Return how long to wait for messages after an empty turn; None is for ever."""
        ...


class Device(Protocol[Message, Result]):
    """Where turns run: this thread in production, a trio task in virtual-time tests."""

    async def run(
        self,
        publish: Callable[[Result], None],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Run until stopped; raises whatever broke the loop. Started once the loop is built."""
        ...

    def post(self, message: Message) -> None:
        """Hand a message over; never blocks, and does nothing once the device has ended."""
        ...

    def pulse(self) -> Pulse:
        """Say what the device is doing; never blocks."""
        ...


class DeviceThread(Generic[M, R]):
    """Builds a turn loop inside a thread of its own and drives it there.

    Args:
        build: Makes the loop; runs in the thread, so every array it makes belongs there.
    """

    def __init__(self, build: Callable[[], TurnLoop[M, R]], name: str = "paceline-device") -> None:
        self._build = build
        self._inbox: queue.SimpleQueue[M | None] = queue.SimpleQueue()
        self._posted_at = 0.0  # of the oldest message that waits, where one does
        self._lag = threading.Semaphore(LAG)
        # As large as the lag, so that putting a turn in never finds it full.
        self._turns_in, self._turns = trio.open_memory_channel[R](LAG)
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._ready = trio.Event()
        self._ended = trio.Event()
        self._error: BaseException | None = None
        self._token: trio.lowlevel.TrioToken | None = None
        self._clock: Callable[[], float] = trio.current_time
        self._loop: TurnLoop[M, R] | None = None
        self._began: float | None = None
        self._turn_ended = 0.0
        self.stuck = False  # the thread did not end in time and may still be inside MLX

    def post(self, message: M) -> None:
        """Hand a message to the thread."""
        if self._inbox.empty():
            self._posted_at = self._clock()
        self._inbox.put(message)

    def pulse(self) -> Pulse:
        """Say what the thread is doing."""
        loop = self._loop
        while True:
            began = self._began
            allowance_s = loop.allowance_s if loop is not None else 0.0
            if began == self._began:
                break  # else the two are of different turns
        return Pulse(
            began=began,
            allowance_s=allowance_s,
            doing=loop.doing if loop is not None else "idle",
            waiting_since=None if self._inbox.empty() else self._posted_at,
            alive=self._thread.is_alive(),
            ended=self._turn_ended,
        )

    async def run(
        self,
        publish: Callable[[R], None],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Start the thread and stay until it ends; see `Device.run`.

        Cancelled while the loop is built, it leaves the thread behind, since nothing can hurry
        that; `stuck` says so. The thread ends itself once the loop is built.
        """
        self._token = trio.lowlevel.current_trio_token()
        self._clock = trio.lowlevel.current_clock().current_time  # safe to read from any thread
        self._thread.start()
        try:
            await self._ready.wait()
            if self._error is None:
                task_status.started()
                async for result in self._turns:
                    self._lag.release()
                    publish(result)
            if self._error is not None:
                raise self._error
        finally:
            self._turns.close()
            self._lag.release(LAG)  # a thread that waits for its turns to be taken is let go
            self._inbox.put(None)
            patience = JOIN_SECONDS if self._ready.is_set() else 0.0
            with trio.move_on_after(patience, shield=True) as waiting:
                await self._ended.wait()
            self.stuck = waiting.cancelled_caught
            if not self.stuck:
                self._thread.join(JOIN_SECONDS)

    def _main(self) -> None:
        error: BaseException | None = None
        try:
            loop = self._loop = self._build()
            self._post_back(self._ready.set)
            self._drive(loop)
        except BaseException as caught:
            error = caught
        finally:
            self._post_back(self._end, error)

    def _drive(self, loop: TurnLoop[M, R]) -> None:
        timeout: float | None = None
        waiting = True  # nothing to run: block for a message
        while True:
            try:
                message = self._inbox.get(block=waiting, timeout=timeout if waiting else None)
                self._began = self._began or self._clock()
                while True:
                    if message is None:
                        return
                    loop.feed(message)
                    message = self._inbox.get_nowait()
            except queue.Empty:
                pass
            self._began = self._began or self._clock()
            result = loop.turn()
            self._turn_ended = self._clock()  # before it is said that none runs
            self._began = None
            waiting = result is None
            if result is None:
                timeout = loop.wait_s()
            else:
                self._lag.acquire()
                self._post_back(self._deliver, result)

    def _deliver(self, result: R) -> None:
        try:
            self._turns_in.send_nowait(result)
        except trio.BrokenResourceError:
            self._lag.release()  # nobody takes turns any more

    def _end(self, error: BaseException | None) -> None:
        self._error = error
        self._ready.set()
        self._turns_in.close()
        self._ended.set()

    def _post_back(self, call: Callable[..., object], *args: object) -> None:
        assert self._token is not None
        try:
            self._token.run_sync_soon(call, *args)
        except trio.RunFinishedError:
            self._lag.release()  # trio is gone; do not block on a reader that never comes
