"""One request actor over fake lanes: stops, credits, hang-ups, deadlines, failures."""

import threading
from typing import Any

import pytest
import trio
import trio.testing
from tests.fakes import END, READ_S, STEP_S, WORD_BASE, Stand, row_context, stand, threads_hold_time

from paceline.actors.request import Broken, Finished, Generation, RequestActor
from paceline.actors.speech import Ended, Piece
from paceline.lanes.base import Row
from paceline.runtime.dialect import Dialect
from paceline.runtime.errors import BusyError, CallerError, OwnerDied
from paceline.runtime.modes import Mode
from paceline.runtime.parts import Manner
from paceline.runtime.settings import ServerArgs


async def _read(actor: RequestActor) -> tuple[str, list[str]]:
    text = ""
    finishes: list[str] = []
    async for event in actor.events:
        if isinstance(event, Piece):
            text += event.text
        elif isinstance(event, Ended):
            finishes.append(event.finish)
    return text, finishes


async def test_budget_ends_a_request_with_length(autojump_clock: trio.testing.MockClock) -> None:
    """A request gets exactly its budget and ends with `length`."""
    async with stand(ServerArgs()) as place:
        actor = place.house.start(Generation("r", (row_context(2, 3),)))
        assert await _read(actor) == (" w0 w1 w2", ["length"])
        assert isinstance(actor.outcome, Finished)
        assert actor.outcome.receipt.completion_tokens == 3


async def test_end_token_ends_a_request_and_shows_no_text(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The end token is counted, but none of it is text, and the finish is `stop`."""

    def script(row: Row) -> int:
        return END if len(row.generated) == 2 else WORD_BASE + len(row.generated)

    async with stand(ServerArgs(), script) as place:
        actor = place.house.start(Generation("r", (row_context(2, 30),)))
        assert await _read(actor) == (" w0 w1", ["stop"])
        assert actor.completion_tokens == 3


async def test_a_stop_string_over_two_tokens_is_cut_and_frees_the_row(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A stop string that spans tokens is never shown in part, and its row ends within a turn."""
    async with stand(ServerArgs()) as place:
        actor = place.house.start(Generation("r", (row_context(1, 1000),), stops=("3 w4",)))
        pieces = [event async for event in actor.events]
        shown = "".join(e.text for e in pieces if isinstance(e, Piece))
        assert shown == " w0 w1 w2 w"
        assert pieces[-1] == Ended(0, "stop", "3 w4")
        await trio.sleep(3 * STEP_S)
        assert place.open_rows == set()


async def test_rows_of_one_request_end_each_for_itself(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """n rows share a request; each has its own end, and the request ends after the last."""
    async with stand(ServerArgs(scheduler_mode=Mode.AR_BATCH)) as place:
        rows = (row_context(1, 2), row_context(1, 5))
        actor = place.house.start(Generation("r", rows))
        ends = [e.index async for e in actor.events if isinstance(e, Ended)]
        assert ends == [0, 1]
        assert isinstance(actor.outcome, Finished)


@pytest.mark.parametrize(("words", "beside"), [(100, False), (3_000, True)])
async def test_a_long_call_is_read_beside_the_event_loop(
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    words: int,
    beside: bool,
) -> None:
    """Families' parsers may take long over what a model makes up; others go on meanwhile."""
    threads_hold_time(monkeypatch)
    readers: list[bool] = []
    here = threading.get_ident()

    def parse(text: str, tools: Any) -> Any:
        readers.append(threading.get_ident() != here)
        return {"name": "f", "arguments": {"text": text}}

    dialect = Dialect(call_open=" w1", call_close=f" w{words}", json_calls=False, parse=parse)
    manner = Manner(dialect, calling="maybe", most_calls=1)
    async with stand(ServerArgs()) as place:
        row = row_context(1, words + 5)
        actor = place.house.start(Generation("r", (row,), manner=manner))
        called = [call async for e in actor.events if isinstance(e, Piece) for call in e.calls]
        assert isinstance(actor.outcome, Finished)
    assert [call.name for call in called] == ["f"]
    assert readers == [beside]


@pytest.mark.parametrize("when", ["queue", "prefill", "decode"])
async def test_a_hang_up_frees_the_row_within_a_turn(
    autojump_clock: trio.testing.MockClock, when: str
) -> None:
    """Whatever the row is doing, one turn after the client left nothing of it is there."""
    async with stand(ServerArgs()) as place:
        other = None
        if when == "queue":
            other = place.house.start(Generation("other", (row_context(1, 10_000),)))
        prompt = 4000 if when == "prefill" else 1
        actor = place.house.start(Generation("r", (row_context(prompt, 10_000),)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read, actor)
            if other is not None:
                nursery.start_soon(_read, other)
            await trio.sleep(0.3)
            actor.hang_up("client_disconnect")
            await trio.sleep(64 * 4 * READ_S + 2 * STEP_S)
            assert not any(key.startswith("r.") for key in place.open_rows)
            assert not any(key.startswith("r.") for key in place.core.rows)
            assert all(entry.request_id != "r" for entry in place.core.queued)
            if other is not None:
                other.hang_up("client_disconnect")
        assert actor.outcome == Broken("client_disconnect", "the client went away")


async def test_a_slow_reader_parks_its_own_row_and_nobody_elses(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A reader that takes nothing stops only its own row, which goes on when it reads again."""
    args = ServerArgs(scheduler_mode=Mode.AR_BATCH, client_stall_s=60)
    async with stand(args) as place:
        slow = place.house.start(Generation("slow", (row_context(1, 200),)))
        quick = place.house.start(Generation("quick", (row_context(1, 300),)))
        began = trio.current_time()
        text, _ = await _read(quick)
        assert text.endswith(" w299")
        assert trio.current_time() - began <= 300 * STEP_S + 0.1
        assert slow.completion_tokens < 100, "the row ran on although nobody read"
        text, finishes = await _read(slow)
        assert text.endswith(" w199")
        assert finishes == ["length"]


@pytest.mark.parametrize("mode", [Mode.SERIAL, Mode.COOPERATIVE, Mode.AR_BATCH])
async def test_a_reader_that_stalls_for_good_is_cut(
    autojump_clock: trio.testing.MockClock, mode: Mode
) -> None:
    """After client_stall_s without a read the request ends and its row is free."""
    async with stand(ServerArgs(scheduler_mode=mode, client_stall_s=5)) as place:
        stalled = place.house.start(Generation("s", (row_context(1, 10_000),)))
        await trio.sleep(10)
        assert stalled.outcome == Broken("client_stall", "the client stopped reading")
        assert place.open_rows == set()
        assert (await _read(place.house.start(Generation("n", (row_context(1, 2),)))))[1] == [
            "length"
        ]


async def test_a_deadline_ends_a_request_with_an_error(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A request over request_timeout_s is broken, never finished with `length`."""
    async with stand(ServerArgs(request_timeout_s=1)) as place:
        actor = place.house.start(Generation("r", (row_context(1, 100_000),)))
        _, finishes = await _read(actor)
        assert finishes == []
        assert isinstance(actor.outcome, Broken)
        assert actor.outcome.code == "deadline"
        assert trio.current_time() - 1 < 0.1


async def test_one_rows_failure_leaves_its_neighbours_tokens_alone(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A row that cannot go on gets an error; the cohort's other rows lose nothing."""

    def script(row: Row) -> int:
        bad = row.context.seed == 666 and len(row.generated) == 3
        return -1 if bad else WORD_BASE + len(row.generated)

    async with stand(ServerArgs(scheduler_mode=Mode.AR_BATCH), script) as place:
        bad = place.house.start(Generation("bad", (row_context(1, 10, seed=666),)))
        good = place.house.start(Generation("good", (row_context(1, 10),)))
        assert (await _read(bad))[1] == []
        assert bad.outcome == Broken("row_failed", "scripted failure")
        assert await _read(good) == ("".join(f" w{i}" for i in range(10)), ["length"])


async def test_a_full_queue_refuses_at_once(autojump_clock: trio.testing.MockClock) -> None:
    """Beyond max_queue waiting rows a request is refused, and nothing of it is kept."""
    async with stand(ServerArgs(max_queue=1)) as place:
        running = place.house.start(Generation("a", (row_context(1, 500),)))
        waiting = place.house.start(Generation("b", (row_context(1, 1),)))
        with pytest.raises(BusyError) as refused:
            place.house.start(Generation("c", (row_context(1, 1),)))
        assert refused.value.retry_after_s >= 1
        with pytest.raises(CallerError, match="3 rows can never fit: this server holds 2"):
            place.house.start(Generation("e", (row_context(1, 1),) * 3))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read, running)
            nursery.start_soon(_read, waiting)
        assert (await _read(place.house.start(Generation("d", (row_context(1, 1),)))))[1]


async def test_draining_lets_requests_finish_and_ends_the_rest(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A drain admits nothing, waits for what can end in time, and breaks what cannot."""
    async with stand(ServerArgs(scheduler_mode=Mode.AR_BATCH)) as place:
        quick = place.house.start(Generation("quick", (row_context(1, 50),)))
        endless = place.house.start(Generation("endless", (row_context(1, 100_000),)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read, quick)
            nursery.start_soon(_read, endless)
            await trio.sleep(0.1)
            await place.house.drain(2.0)
        assert isinstance(quick.outcome, Finished)
        assert endless.outcome == Broken("server_shutdown", "the server is shutting down")
        with pytest.raises(BusyError):
            place.house.start(Generation("late", (row_context(1, 1),)))


async def test_a_dead_owner_tells_every_request_and_brings_the_house_down(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """When a forward pass raises, every open request is broken and OwnerDied leaves the house."""
    actors: list[RequestActor] = []
    seen: list[list[str]] = []

    async def client(actor: RequestActor) -> None:
        seen.append((await _read(actor))[1])

    async def run(place: Stand) -> None:
        async with trio.open_nursery() as nursery:
            for i in range(3):
                actors.append(place.house.start(Generation(f"r{i}", (row_context(1, 1000),))))
                nursery.start_soon(client, actors[-1])
            await trio.sleep(0.2)
            for lane in place.lanes.values():
                lane.fail_next = RuntimeError("device lost")
            await trio.sleep(60)

    with pytest.RaisesGroup(OwnerDied, flatten_subgroups=True):
        async with stand(ServerArgs(scheduler_mode=Mode.AR_BATCH)) as place:
            await run(place)
    assert seen == [[], [], []]
    assert {a.outcome.code for a in actors if isinstance(a.outcome, Broken)} == {"model_failed"}
