"""A slow client costs only itself: parked rows hold no place, and they are bounded."""

import msgspec
import pytest
import trio
import trio.testing
from tests.fakes import STEP_S, Stand, row_context, stand

from paceline.actors.entry import HOLD_SECONDS, HOLD_TOKENS, Entry, Parking
from paceline.actors.messages import Lease
from paceline.actors.request import Broken, Finished, Generation, RequestActor
from paceline.actors.speech import Ended, Piece
from paceline.api.sse import EventBody
from paceline.api.status import StatusPage
from paceline.runtime.errors import BusyError
from paceline.runtime.modes import CohortPolicy, Mode
from paceline.runtime.settings import ServerArgs

MODES = [
    *((mode, CohortPolicy.DEPTH) for mode in Mode),
    *((Mode.MTP_COHORT_EXPERIMENTAL, trial) for trial in list(CohortPolicy)[1:]),
]
_SIP_S = 25.0  # less than client_stall_s: no single wait is too long


async def _sip(actor: RequestActor, every_s: float) -> None:
    while actor.outcome is None:
        await trio.sleep(every_s)
        try:
            await actor.events.receive()
        except trio.EndOfChannel:
            return


async def _read(actor: RequestActor) -> str:
    return "".join([e.text async for e in actor.events if isinstance(e, Piece)])


def _start(place: Stand, name: str, budget: int, rows: int = 1) -> RequestActor:
    return place.house.start(Generation(name, (row_context(budget=budget),) * rows))


@pytest.mark.parametrize(("mode", "trial"), MODES)
@pytest.mark.parametrize("slow", [8, 16, 40])
async def test_a_fast_request_beside_slow_clients_is_served_in_time(
    autojump_clock: trio.testing.MockClock, mode: Mode, trial: CohortPolicy, slow: int
) -> None:
    """Beside 40 clients that take a piece every 25 seconds, 4 tokens come within a minute."""
    args = ServerArgs(scheduler_mode=mode, cohort_policy=trial)
    async with stand(args) as place, trio.open_nursery() as nursery:
        for i in range(slow):
            nursery.start_soon(_sip, _start(place, f"slow{i}", 5000), _SIP_S)
        await trio.sleep(0.1)
        with trio.fail_after(60):
            assert await _read(_start(place, "fast", 4)) == " w0 w1 w2 w3"
        policy_places = place.core._policy.places
        assert len(place.core.rows) <= policy_places + args.parked_rows_max
        nursery.cancel_scope.cancel()
    for lane in place.lanes.values():
        assert all(width <= lane.spec.geometry for width in lane.step_widths)


async def test_slow_clients_are_not_cut_while_nobody_waits(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Without others a client may read a token a second for as long as it takes."""
    async with stand(ServerArgs(scheduler_mode=Mode.AR_BATCH)) as place:
        actors = [_start(place, f"slow{i}", 900) for i in range(8)]
        async with trio.open_nursery() as nursery:
            for actor in actors:
                nursery.start_soon(_sip, actor, 1.0)
    assert all(isinstance(actor.outcome, Finished) for actor in actors)


async def test_a_row_is_parked_for_a_bounded_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Slower than a token a second, a row ends after parked_timeout_s and what its tokens buy."""
    args = ServerArgs(parked_timeout_s=100, client_stall_s=30)
    async with stand(args) as place:
        actor = _start(place, "slow", 5000)
        began = trio.current_time()
        await _sip(actor, _SIP_S)
        assert trio.current_time() - began < 100 + 2 * actor.completion_tokens + 2 * _SIP_S
        assert place.open_rows == set()
        assert place.house.meter.requests == {"cancelled": 1}
    assert actor.outcome == Broken("client_stall", "the client read too slowly for too long")


async def test_under_pressure_the_row_parked_longest_makes_room(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """At the bound the oldest parked row ends, not the request that waits; the rest stay."""
    args = ServerArgs(parked_rows_max=2, client_stall_s=300)
    async with stand(args) as place:
        slow = [_start(place, f"slow{i}", 5000) for i in range(3)]
        await trio.sleep(10)
        assert place.house.meter.parked_rows == 3
        assert await _read(_start(place, "fast", 2)) == " w0 w1"
        assert [actor.outcome is None for actor in slow] == [False, True, True]
        for actor in slow:
            actor.hang_up("client_disconnect")


async def test_a_request_never_cuts_its_own_rows(autojump_clock: trio.testing.MockClock) -> None:
    """Twenty choices for one slow reader wait for it and are all served."""
    args = ServerArgs(parked_rows_max=2)
    async with stand(args) as place:
        actor = _start(place, "many", 60, rows=20)
        ends = 0
        async for event in actor.events:
            ends += isinstance(event, Ended)
            await trio.sleep(0.5)
        assert isinstance(actor.outcome, Finished)
        assert ends == 20


@pytest.mark.parametrize("order", [["slow", "late"], ["late", "slow"]], ids="-".join)
@pytest.mark.parametrize("mode", [Mode.SERIAL, Mode.HYPER])
async def test_a_row_that_comes_back_does_not_interrupt_an_answer(
    autojump_clock: trio.testing.MockClock, mode: Mode, order: list[str]
) -> None:
    """Where one row runs at a time, a reader that returns waits in line from then on."""
    async with stand(ServerArgs(scheduler_mode=mode, client_stall_s=300)) as place:
        slow = _start(place, "slow", 100)
        await trio.sleep(2)
        quick = _start(place, "quick", 200)
        times: dict[str, float] = {}

        async def finish(name: str, actor: RequestActor) -> None:
            await _read(actor)
            times[name] = trio.current_time()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(finish, "quick", quick)
            for name in order:
                await trio.sleep(5 * STEP_S)
                actor = slow if name == "slow" else _start(place, "late", 200)
                nursery.start_soon(finish, name, actor)
        assert sorted(times, key=times.__getitem__) == ["quick", *order]


async def test_health_is_ok_while_a_client_does_not_read(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Parked rows are nothing to do: status ok, state idle, and they are counted."""
    async with stand(ServerArgs(client_stall_s=3600, parked_timeout_s=3600)) as place:
        page = StatusPage(place.house, trio.current_time)
        actor = _start(place, "slow", 500)
        for _ in range(20):
            await trio.sleep(60)
            assert (page._status(), page._state()) == ("ok", "idle")
        meter = place.house.meter
        assert (meter.active_rows, meter.parked_rows, meter.queue_depth) == (0, 1, 0)
        actor.hang_up("client_disconnect")


async def test_a_queued_request_that_leaves_is_not_counted_any_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The queue's depth is true although no turn ran."""
    async with stand(ServerArgs(parked_rows_max=0, client_stall_s=600)) as place:
        slow = _start(place, "slow", 500)
        await trio.sleep(1)
        waiting = _start(place, "waiting", 5)
        await trio.sleep(1)
        assert place.house.meter.queue_depth == 1
        waiting.hang_up("client_disconnect")
        await trio.sleep(1)
        assert place.house.meter.queue_depth == 0
        slow.hang_up("client_disconnect")


def _entry(emitted: int = 0) -> Entry:
    return Entry(Lease("r", 1), "r", row_context(budget=9999), 0, 0.0, 0, emitted=emitted)


def test_a_place_is_held_for_a_moment_once_for_many_tokens() -> None:
    """A good reader's hiccup keeps its place; who is parked often does not."""
    entry = _entry(HOLD_TOKENS)
    entry.park(10.0)
    assert entry.hold_until == 10.0 + HOLD_SECONDS
    entry.grant(8, 10.2)
    entry.credits, entry.emitted = 0, HOLD_TOKENS + 8
    entry.park(10.3)
    assert entry.hold_until == 10.0 + HOLD_SECONDS


def test_parked_time_adds_up_and_tokens_pay_for_it() -> None:
    """What was spent parked before counts; each token given buys a second."""
    entry = _entry(10)
    entry.park(0.0)
    assert entry.cut_at(Parking(timeout_s=100)) == 110.0
    entry.grant(8, 60.0)
    entry.credits, entry.emitted = 0, 18
    entry.park(61.0)
    assert entry.cut_at(Parking(timeout_s=100)) == 61.0 + 118.0 - 60.0


def _is_taken(place: Stand, name: str) -> bool:
    try:
        _start(place, name, 4)
    except BusyError:
        return False
    return True


@pytest.mark.parametrize(("then", "expected"), [("left", 3), ("took", 1), ("wait", 3)])
async def test_the_queue_has_its_bound_whatever_parked_rows_do(
    autojump_clock: trio.testing.MockClock, then: str, expected: int
) -> None:
    """A parked row that left, or whose reader took again, is none from that moment on."""
    async with stand(ServerArgs(max_queue=2, client_stall_s=300)) as place:
        owner = place.house.owner
        slow = [_start(place, f"slow{i}", 5000) for i in range(2)]
        await trio.sleep(10)
        assert place.house.meter.parked_rows == 2
        for lease in [lease for actor in slow for lease in actor._leases]:
            if then == "left":
                owner.leave(lease, "gone")
            elif then == "took":
                owner.grant(lease, 8)
        accepted = [_is_taken(place, f"new{i}") for i in range(10)]
    assert sum(accepted) == expected


async def test_rows_that_are_back_are_told_to_the_policy(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A row that waits for a place after it was parked is neither ready nor parked."""
    async with stand(ServerArgs(client_stall_s=300)) as place:
        slow = _start(place, "slow", 5000)
        await trio.sleep(10)
        quick = _start(place, "quick", 5000)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read, quick)
            await trio.sleep(1)
            place.house.owner.grant(slow._leases[0], 8)
            await trio.sleep(1)
            scene = place.core._scene(trio.current_time())
            assert [row.key for row in scene.back] == ["slow.0"]
            for actor in (slow, quick):
                actor.hang_up("client_disconnect")


async def test_a_reader_inside_a_large_event_is_not_cut(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """An event of megabytes that is written steadily for minutes costs its request nothing."""

    class Large(msgspec.Struct):
        text: str

    class Shape:
        named = False
        alive = b": alive\n\n"
        mark = b"data: [DONE]\n\n"

        opens_long = False

        def is_long(self, tokens: int) -> bool:
            return False

        ends_long = is_long

        def opening(self) -> list[Large]:
            return [Large("x" * 400_000)]

        def piece(self, piece: Piece) -> list[Large]:
            return [Large(piece.text)]

        def ended(self, ended: Ended) -> list[Large]:
            return []

        def closing(self, finished: Finished) -> list[Large]:
            return []

        def failing(self, broken: Broken) -> list[Large]:
            return [Large(broken.code)]

    async with stand(ServerArgs(client_stall_s=5, parked_timeout_s=3600)) as place:
        actor = _start(place, "r", 200)
        async with EventBody(actor, Shape()) as body:  # type: ignore[arg-type]
            parts = []
            async for part in body:
                parts.append(part)
                await trio.sleep(4.0)
                assert trio.current_time() < 3000
    data = b"".join(parts)
    assert b"client_stall" not in data
    assert b" w199" in data
    assert data.endswith(b"[DONE]\n\n")
