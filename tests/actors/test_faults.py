"""Faults around the owner: nothing leaves a lease open, and nothing ends trio's own loop."""

import io
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
import trio
import trio.testing
from tests.fakes import FakeLane, FakeText, Nature, Stand, Wear, row_context, stand

from paceline.actors.engine import Engine
from paceline.actors.house import Loaded, Served, keep_house, make_core
from paceline.actors.messages import OwnerMessage, Turn
from paceline.actors.request import Broken, Finished, Generation, RequestActor
from paceline.api.status import StatusPage
from paceline.lanes.geometry import GEOMETRIES, lane_name
from paceline.runtime import log
from paceline.runtime.errors import BusyError, OwnerDied
from paceline.runtime.modes import Mode
from paceline.runtime.settings import ServerArgs
from paceline.runtime.thread import DeviceThread, Pulse


def _broken(*_: Any, **__: Any) -> Any:
    raise BrokenPipeError(32, "Broken pipe")


@pytest.fixture(params=["a processor", "what takes lines", "structlog as somebody set it up"])
def dead_log(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make every log line raise on its way."""
    before = structlog.get_config()
    log.configure("debug", "json", io.StringIO())
    if request.param == "a processor":
        monkeypatch.setattr(log._OUT, "processors", [_broken])
    elif request.param == "what takes lines":
        monkeypatch.setattr(log._OUT, "line", _broken)
        monkeypatch.setattr(log._OUT, "info", _broken)
    else:
        wrapper: Any = _broken
        structlog.configure(processors=[_broken], wrapper_class=wrapper)
    yield
    monkeypatch.undo()
    structlog.configure(**before)
    log.configure("error", "json")


def _start(place: Stand, name: str, budget: int) -> RequestActor:
    return place.house.start(Generation(name, (row_context(budget=budget),)))


async def _drain(actor: RequestActor) -> None:
    async for _ in actor.events:
        pass


def _loaded(lanes: dict[str, FakeLane]) -> Loaded:
    loaded = Loaded()
    loaded.served = Served("fake", "fake", "fake", "cpu", "fake", "none", 8192, 100_000, 1)
    loaded.text = FakeText()  # type: ignore[assignment]
    loaded.lanes = tuple(lanes.values())
    return loaded


def _threaded(args: ServerArgs) -> tuple[DeviceThread[OwnerMessage, Turn], Loaded]:
    """Return a real device thread over fake lanes."""
    wear = Wear()
    lanes = {lane_name("ar", g): FakeLane("ar", g, wear, Nature()) for g in GEOMETRIES}
    core = make_core(args, tuple(lanes.values()))
    clock = trio.lowlevel.current_clock().current_time
    return DeviceThread(lambda: Engine(core, lanes, clock)), _loaded(lanes)


@pytest.mark.parametrize("mode", list(Mode))
async def test_a_log_that_raises_costs_nobody_anything(
    autojump_clock: trio.testing.MockClock, dead_log: None, mode: Mode
) -> None:
    """Every line raises, and requests are answered, cut, failed and let go as ever."""
    async with stand(ServerArgs(scheduler_mode=mode, client_stall_s=5)) as place:
        stalled = _start(place, "stalled", 1000)
        left = _start(place, "left", 1000)
        whole = _start(place, "whole", 5)
        left.hang_up("client_disconnect")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_drain, whole)
            nursery.start_soon(_drain, left)
        await trio.sleep(10)
        assert isinstance(whole.outcome, Finished)
        assert isinstance(left.outcome, Broken)
        assert isinstance(stalled.outcome, Broken)
        assert place.open_rows == set()
        assert not place.house.owner._open
        assert place.house.open_requests == 0
        await place.house.drain(1)


async def test_a_log_that_raises_beside_the_device_thread(dead_log: None) -> None:
    """With the real thread and clock too: trio's own loop does not end."""
    args = ServerArgs(scheduler_mode=Mode.AR_BATCH)
    device, loaded = _threaded(args)
    with trio.fail_after(60):
        async with keep_house(args, device, loaded) as house:
            actor = house.start(Generation("r", (row_context(budget=50),)))
            await _drain(actor)
            assert isinstance(actor.outcome, Finished)
            assert not house.owner._open


async def test_a_fault_while_handing_out_is_the_owners_and_everyone_is_told() -> None:
    """What raises behind the device thread is OwnerDied, never trio's internal error."""
    args = ServerArgs(scheduler_mode=Mode.AR_BATCH)
    device, loaded = _threaded(args)
    actors: list[RequestActor] = []

    async def run() -> None:
        async with keep_house(args, device, loaded) as house:
            contexts = (row_context(budget=100_000),)
            actors.extend(house.start(Generation(f"r{i}", contexts)) for i in range(3))
            house.meter.saw_rows = None  # type: ignore[assignment, method-assign]
            await trio.sleep_forever()

    with trio.fail_after(60), pytest.RaisesGroup(OwnerDied, flatten_subgroups=True):
        await run()
    assert {actor.outcome.code for actor in actors if isinstance(actor.outcome, Broken)} == {
        "model_failed"
    }


async def test_an_admission_that_breaks_half_way_keeps_nothing(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When the second of three rows cannot be posted, none is left and others are served."""
    async with stand(ServerArgs(scheduler_mode=Mode.AR_BATCH)) as place:
        device = place.house.owner._device
        post, posted = device.post, [0]

        def failing(message: OwnerMessage) -> None:
            posted[0] += 1
            if posted[0] == 2:
                raise MemoryError
            post(message)

        monkeypatch.setattr(device, "post", failing)
        with pytest.raises(MemoryError):
            place.house.start(Generation("r", (row_context(),) * 3))
        assert not place.house.owner._open
        assert place.house.open_requests == 0
        await trio.sleep(1)
        assert place.open_rows == set()
        actor = _start(place, "next", 3)
        await _drain(actor)
        assert isinstance(actor.outcome, Finished)


async def test_a_request_after_the_end_is_refused_and_keeps_nothing(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """When the house's nursery is closed a request gets 503 and leaves no lease."""
    async with stand(ServerArgs()) as place:
        house = place.house
    with pytest.raises(BusyError):
        house.start(Generation("late", (row_context(),)))
    assert not house.owner._open
    assert house.open_requests == 0


async def test_a_cancelled_house_ends_every_request_once(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Requests whose nursery is cancelled have their outcome, and their readers an end."""
    async with stand(ServerArgs()) as place:
        actor = _start(place, "r", 100_000)
        await trio.sleep(1)
    assert actor.outcome == Broken("server_shutdown", "the server is shutting down")
    await _drain(actor)


# ---- health ----


async def test_a_device_that_hangs_is_stalled_whatever_it_does() -> None:
    """A hang in building rows, reading, stepping or closing, the first time or later."""
    for where in ("open", "prefill", "step", "close"):
        await _hang_in(where)


async def _hang_in(where: str) -> None:
    args = ServerArgs(scheduler_mode=Mode.AR_BATCH)
    device, loaded = _threaded(args)
    hanging, go_on = threading.Event(), threading.Event()
    lane: Any = loaded.lanes[0]
    real = getattr(lane, where)

    def hang(*args: Any) -> Any:
        hanging.set()
        go_on.wait(60)
        return real(*args)

    setattr(lane, where, hang)
    with trio.fail_after(60):
        async with keep_house(args, device, loaded) as house:
            late_s = [0.0]
            page = StatusPage(house, lambda: trio.current_time() + late_s[0])
            assert (page._status(), page._state()) == ("ok", "idle")
            actor = house.start(Generation("r", (row_context(budget=3),)))
            await trio.to_thread.run_sync(hanging.wait)
            assert page._status() == "ok", where
            late_s[0] = 29.0
            assert page._status() == "ok", where
            late_s[0] = 3600.0
            assert (page._status(), page._state()) == ("stalled", "stalled"), where
            go_on.set()
            await _drain(actor)
            while page._state() != "idle":  # noqa: ASYNC110  # the device thread sets no event
                await trio.sleep(0.001)
            assert page._status() == "ok", where


async def test_a_long_piece_of_a_prompt_is_not_stalled(
    autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow machine that takes a minute for each piece is ok and prefilling all the way."""
    monkeypatch.setattr("tests.fakes.READ_S", 1.0)
    async with stand(ServerArgs()) as place:
        page = StatusPage(place.house, trio.current_time)
        actor = _start(place, "r", 1)
        long = place.house.start(Generation("long", (row_context(640, 3),)))
        for _ in range(62):
            await trio.sleep(10)
            assert (page._status(), page._state()) == ("ok", "prefilling")
        assert actor.outcome is not None
        long.hang_up("client_disconnect")


class _Device:
    """A device that says what a test wants it to be doing."""

    def __init__(self, pulse: Pulse) -> None:
        self._pulse = pulse

    def pulse(self) -> Pulse:
        return self._pulse


@pytest.mark.parametrize(
    ("pulse", "stalled"),
    [
        (Pulse(), False),
        (Pulse(alive=False), True),
        (Pulse(began=0.0, allowance_s=99.0), True),
        (Pulse(began=0.0, allowance_s=101.0), False),
        (Pulse(began=-2.0, allowance_s=101.0), True),
        (Pulse(waiting_since=71.0), False),
        (Pulse(waiting_since=69.0), True),
        (Pulse(began=50.0, allowance_s=60.0, waiting_since=0.0), False),
    ],
)
async def test_stalled_is_a_turn_over_its_allowance_or_messages_nobody_takes(
    autojump_clock: trio.testing.MockClock, pulse: Pulse, stalled: bool
) -> None:
    """At 99.5 s: by when the turn began, when messages came, and whether the thread lives."""
    async with stand(ServerArgs()) as place:
        place.house.owner._device = _Device(pulse)  # type: ignore[assignment]
        assert place.house.owner.stalled(99.5) is stalled


@pytest.mark.parametrize(("ended", "stalled"), [(0.0, True), (60.0, True), (98.0, False)])
async def test_a_turn_that_ended_and_is_not_handed_out_is_progress(
    autojump_clock: trio.testing.MockClock, ended: float, stalled: bool
) -> None:
    """Between a long turn's end and its results health looks at when it ended."""
    async with stand(ServerArgs()) as place:
        place.house.owner._device = _Device(Pulse(ended=ended))  # type: ignore[assignment]
        place.house.meter.state = "decoding"
        assert place.house.owner.stalled(99.5) is stalled


async def test_a_turn_keeps_its_allowance_until_the_next_begins(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Handing out does not shorten what the turn may take: it is not over for health yet."""
    seen: list[tuple[float, float]] = []
    async with stand(ServerArgs()) as place:
        engine: Any = place.house.owner._device._engine  # type: ignore[attr-defined]
        real = engine.hand_out

        def watched(outcome: Any) -> Any:
            before = engine.allowance_s
            turn = real(outcome)
            seen.append((before, engine.allowance_s))
            return turn

        engine.hand_out = watched
        await _drain(_start(place, "r", 3))
    assert len({before for before, _ in seen}) > 1
    assert all(before == after for before, after in seen)


async def test_time_since_progress_begins_with_the_server(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Before the first turn it counts from the start, not from the clock's own beginning."""
    async with stand(ServerArgs()) as place:
        await trio.sleep(7)
        assert StatusPage(place.house, trio.current_time)._idle_s() == pytest.approx(7)
