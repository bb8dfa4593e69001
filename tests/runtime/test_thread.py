"""The device thread on the real clock: one thread for all turns, and a way back into trio."""

import math
import threading

import pytest
import trio

from paceline.runtime import thread as thread_module
from paceline.runtime.thread import LAG, DeviceThread

_GUARD_S = 120.0  # after which a build ends by itself, so that waiting for it is seen to fail


class _Loop:
    """Echoes messages one a turn and remembers which thread ran it."""

    allowance_s = 30.0
    doing = "decoding"

    def __init__(self) -> None:
        self.threads = {threading.get_ident()}
        self.waiting: list[int] = []
        self.fed = 0

    def feed(self, message: int) -> None:
        self.waiting.append(message)
        self.fed += 1

    def turn(self) -> int | None:
        self.threads.add(threading.get_ident())
        if not self.waiting:
            return None
        message = self.waiting.pop(0)
        if message < 0:
            raise RuntimeError("device lost")
        return message

    def wait_s(self) -> float | None:
        return None


async def test_every_turn_runs_in_the_thread_that_built_the_loop() -> None:
    """Building and all turns share one thread that is not trio's, and results come in order."""
    loops: list[_Loop] = []
    got: list[int] = []
    done = trio.Event()

    def build() -> _Loop:
        loops.append(_Loop())
        return loops[0]

    def publish(result: int) -> None:
        got.append(result)
        if len(got) == 20:
            done.set()

    device = DeviceThread[int, int](build)
    async with trio.open_nursery() as nursery:
        await nursery.start(device.run, publish)
        for i in range(20):
            device.post(i)
        with trio.fail_after(10):
            await done.wait()
        nursery.cancel_scope.cancel()
    assert got == list(range(20))
    assert len(loops[0].threads) == 1
    assert threading.get_ident() not in loops[0].threads
    assert not device.stuck


async def test_a_loop_that_raises_ends_the_run_with_its_error() -> None:
    """What breaks in a turn comes out of run, after what was published before."""
    got: list[int] = []
    device = DeviceThread[int, int](_Loop)
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="device lost")):
        async with trio.open_nursery() as nursery:
            await nursery.start(device.run, got.append)
            device.post(1)
            device.post(-1)
            with trio.fail_after(10):
                await trio.sleep_forever()
    assert got == [1]


async def test_a_loop_that_cannot_be_built_never_starts() -> None:
    """An error while loading comes out of start, with the thread gone."""

    def build() -> _Loop:
        raise RuntimeError("no weights")

    device = DeviceThread[int, int](build)
    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError, match="no weights")):
        async with trio.open_nursery() as nursery:
            await nursery.start(device.run, lambda result: None)


async def test_the_device_cannot_outrun_trio() -> None:
    """While trio is busy, at most LAG results pile up; the rest wait in the device."""
    loop = _Loop()
    got: list[int] = []
    done = trio.Event()

    def publish(result: int) -> None:
        got.append(result)
        if len(got) == 50:
            done.set()

    device = DeviceThread[int, int](lambda: loop)
    async with trio.open_nursery() as nursery:
        await nursery.start(device.run, publish)
        for i in range(50):
            device.post(i)
        blocked_until = threading.Event()
        blocked_until.wait(0.3)  # trio's own thread is held here; only the device can move
        assert loop.fed - len(loop.waiting) <= LAG + 1
        with trio.fail_after(10):
            await done.wait()
        nursery.cancel_scope.cancel()


async def test_a_build_that_is_given_up_is_left_behind_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Cancelled while the loop is built, `run` does not wait for it; the thread ends by itself."""
    monkeypatch.setattr(thread_module, "JOIN_SECONDS", math.inf)
    go_on, began = threading.Event(), trio.Event()
    token = trio.lowlevel.current_trio_token()
    thread: list[threading.Thread] = []

    def build() -> _Loop:
        thread.append(threading.current_thread())
        token.run_sync_soon(began.set)
        go_on.wait(_GUARD_S)
        return _Loop()

    device = DeviceThread[int, int](build)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(device.run, lambda result: None)
        await began.wait()
        nursery.cancel_scope.cancel()
    assert device.stuck
    assert thread[0].is_alive()
    go_on.set()
    await trio.to_thread.run_sync(thread[0].join, _GUARD_S)
    assert not thread[0].is_alive()


async def test_the_end_of_a_turn_is_known_before_its_result() -> None:
    """Whoever gets a turn's result finds in the pulse when that turn ended."""
    ends: list[float] = []
    done = trio.Event()

    def publish(_: int) -> None:
        ends.append(device.pulse().ended)
        done.set()

    device = DeviceThread[int, int](_Loop)
    began = trio.current_time()
    async with trio.open_nursery() as nursery:
        await nursery.start(device.run, publish)
        assert device.pulse().ended == 0.0
        device.post(1)
        with trio.fail_after(60):
            await done.wait()
        nursery.cancel_scope.cancel()
    assert began <= ends[0] <= trio.current_time()
