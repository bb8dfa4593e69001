"""The real actors over fake lanes in virtual time: exact finishing times, bounded gaps."""

from collections import defaultdict
from itertools import pairwise

import pytest
import trio
import trio.testing
from tests.fakes import DRAFT_S, READ_S, STEP_S, TILE, Stand, row_context, stand

from paceline.actors.request import Finished, Generation
from paceline.actors.speech import Ended, Piece
from paceline.runtime.modes import Mode
from paceline.runtime.settings import ServerArgs


async def _arrivals(
    place: Stand, name: str, prompt: int, budget: int, out: dict[str, list[float]]
) -> None:
    """Run one request and note when each of its tokens arrives."""
    generation = Generation(name, (row_context(prompt, budget),))
    actor = place.house.start(generation)
    async for event in actor.events:
        if isinstance(event, Piece):
            out[name].append(trio.current_time())
    assert isinstance(actor.outcome, Finished)


async def test_eight_rows_finish_together_at_the_exact_time(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Eight rows of n tokens at 10 ms a step end at 8 prompts plus n - 1 steps, to the digit."""
    args = ServerArgs(scheduler_mode=Mode.AR_BATCH, batch_wait_ms=1000)
    times: dict[str, list[float]] = defaultdict(list)
    async with stand(args) as place:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(_arrivals, place, f"r{i}", 1, 21, times)
        ends = {round(t[-1] - began, 9) for t in times.values()}
        assert ends == {round(8 * READ_S + 20 * STEP_S, 9)}
        assert place.lanes["ar-b8"].step_widths == [8] * 20
        assert place.house.meter.batch_histogram == {8: 1}
        assert place.house.meter.last_real_width == 8


async def test_a_row_that_joins_steps_with_the_others_at_the_next_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A late row does not wait for the cohort to drain, and nobody waits for it."""
    times: dict[str, list[float]] = defaultdict(list)
    async with stand(ServerArgs(scheduler_mode=Mode.AR_BATCH)) as place:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_arrivals, place, "first", 1, 50, times)
            await trio.sleep(0.1)
            joined = trio.current_time()
            nursery.start_soon(_arrivals, place, "late", 1, 3, times)
        assert times["late"][0] - joined <= 2 * (STEP_S + READ_S)
        assert times["late"][-1] - joined <= 5 * (STEP_S + READ_S)
        assert place.house.meter.batch_histogram == {2: 1}


@pytest.mark.parametrize("mode", [Mode.AR_BATCH, Mode.COOPERATIVE])
async def test_a_long_prompt_keeps_every_running_rows_gap_bounded(
    autojump_clock: trio.testing.MockClock, mode: Mode
) -> None:
    """While 4,000 tokens are read, a running row waits a tile and a round of steps at most."""
    rows = 4
    times: dict[str, list[float]] = defaultdict(list)
    async with stand(ServerArgs(scheduler_mode=mode)) as place, trio.open_nursery() as nursery:
        for i in range(rows):
            nursery.start_soon(_arrivals, place, f"r{i}", 1, 300, times)
        await trio.sleep(0.5)
        nursery.start_soon(_arrivals, place, "long", 4000, 2, times)
    steps = rows + 1 if mode is Mode.COOPERATIVE else 1
    bound = TILE * READ_S + steps * STEP_S
    for i in range(rows):
        arrived = times[f"r{i}"]
        gaps = [b - a for a, b in pairwise(arrived)]
        assert max(gaps) <= bound + 1e-9
    began, ended = times["r0"][0], times["r0"][-1]
    assert began < times["long"][0] < ended, "the long prompt was read while the others ran"


async def test_short_prompts_pass_a_long_one(autojump_clock: trio.testing.MockClock) -> None:
    """A short prompt that arrives behind a long one is answered long before that is read."""
    times: dict[str, list[float]] = defaultdict(list)
    args = ServerArgs(scheduler_mode=Mode.AR_BATCH)
    async with stand(args) as place, trio.open_nursery() as nursery:
        nursery.start_soon(_arrivals, place, "long", 4000, 2, times)
        await trio.sleep(0.01)
        nursery.start_soon(_arrivals, place, "short", 10, 2, times)
    assert times["short"][-1] < times["long"][0] / 2


async def test_what_has_least_left_to_read_passes_a_longer_prompt(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A prompt of several tiles behind a far longer one takes twice its own time, no more."""
    times: dict[str, list[float]] = defaultdict(list)
    args = ServerArgs(scheduler_mode=Mode.AR_BATCH)
    async with stand(args) as place, trio.open_nursery() as nursery:
        nursery.start_soon(_arrivals, place, "long", 8000, 2, times)
        await trio.sleep(0.01)
        nursery.start_soon(_arrivals, place, "middle", 600, 2, times)
    assert times["middle"][0] < 3 * 600 * READ_S + 0.5
    assert times["long"][0] < (8000 + 600) * READ_S + 1


async def test_prompts_are_read_first_come_first_served(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Among prompts of one size the first asked for is read first."""
    times: dict[str, list[float]] = defaultdict(list)
    args = ServerArgs(scheduler_mode=Mode.AR_BATCH)
    async with stand(args) as place, trio.open_nursery() as nursery:
        for i in range(6):
            nursery.start_soon(_arrivals, place, f"r{i}", 200, 2, times)
            await trio.sleep(0.001)
    firsts = [times[f"r{i}"][0] for i in range(6)]
    assert firsts == sorted(firsts)


async def test_serial_serves_one_after_the_other(autojump_clock: trio.testing.MockClock) -> None:
    """In serial mode no two requests' tokens interleave, and the order is that of arrival."""
    times: dict[str, list[float]] = defaultdict(list)
    async with stand(ServerArgs()) as place, trio.open_nursery() as nursery:
        for i in range(5):
            nursery.start_soon(_arrivals, place, f"r{i}", 3, 5, times)
            await trio.sleep(0.001)
    for i in range(4):
        assert times[f"r{i}"][-1] < times[f"r{i + 1}"][0]
    assert place.house.meter.batch_histogram == {}


async def test_cooperative_gives_every_row_the_same_pace(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """While five rows decode, none is ever more than one token ahead of another."""
    times: dict[str, list[float]] = defaultdict(list)
    args = ServerArgs(scheduler_mode=Mode.COOPERATIVE)
    async with stand(args) as place, trio.open_nursery() as nursery:
        for i in range(5):
            nursery.start_soon(_arrivals, place, f"r{i}", 1, 40, times)
    began, ended = max(t[0] for t in times.values()), min(t[-1] for t in times.values())
    gained = [sum(began < at <= ended for at in t) for t in times.values()]
    assert min(gained) >= 30
    assert max(gained) - min(gained) <= 1
    assert place.lanes["ar-b1"].step_widths == [1] * (5 * 39)


async def test_a_first_row_waits_for_company_only_as_long_as_it_was_told(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """batch_wait_ms holds a lone row's first step back by exactly that much."""
    times: dict[str, list[float]] = defaultdict(list)
    args = ServerArgs(scheduler_mode=Mode.AR_BATCH, batch_wait_ms=50)
    async with stand(args) as place:
        began = trio.current_time()
        await _arrivals(place, "alone", 1, 3, times)
    assert [round(t - began, 9) for t in times["alone"]] == [0.001, 0.061, 0.071]


async def test_geometry_follows_the_rows(autojump_clock: trio.testing.MockClock) -> None:
    """One row runs on B1, two or three on B3, more on B8, and back again as rows end."""
    async with stand(ServerArgs(scheduler_mode=Mode.AR_BATCH)) as place:

        async def run(i: int) -> None:
            actor = place.house.start(Generation(f"r{i}", (row_context(1, 10 + 10 * i),)))
            assert [e async for e in actor.events if isinstance(e, Ended)]

        async with trio.open_nursery() as nursery:
            for i in range(5):
                nursery.start_soon(run, i)
        widths = {name: set(lane.step_widths) for name, lane in place.lanes.items()}
    assert widths["ar-b1"] == {1}
    assert widths["ar-b3"] == {2, 3}
    assert widths["ar-b8"] == {4, 5}


async def test_a_speculative_step_hands_out_all_it_accepted(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """At depth 3 of which two are accepted, 8 rows of 22 tokens take seven steps, to the digit."""
    args = ServerArgs(scheduler_mode=Mode.MTP_BATCH, batch_wait_ms=1000, speculative_depth=3)
    times: dict[str, list[float]] = defaultdict(list)
    async with stand(args) as place:
        began = trio.current_time()
        async with trio.open_nursery() as nursery:
            for i in range(8):
                nursery.start_soon(_arrivals, place, f"r{i}", 1, 22, times)
        ends = {round(t[-1] - began, 9) for t in times.values()}
        meter = place.house.meter
        step_s = STEP_S + 3 * DRAFT_S
        assert ends == {round(8 * READ_S + 7 * step_s, 9)}
        assert place.lanes["mtp-b8"].step_widths == [8] * 7
        assert (meter.active_lane, meter.batch_histogram) == ("mtp-b8", {8: 1})
        assert meter.acceptance_by_depth == {1: 1.0, 2: 1.0, 3: 0.0}
        assert (meter.mean_accepted, meter.steps_by_depth) == (2.0, {3: 7})
        assert meter.tokens_committed == 8 * 22


async def test_a_budget_ends_a_row_inside_a_step(autojump_clock: trio.testing.MockClock) -> None:
    """What a step accepted beyond the budget is not handed out, and counts nowhere."""
    args = ServerArgs(scheduler_mode=Mode.MTP_BATCH, speculative_depth=4)
    async with stand(args) as place:
        actor = place.house.start(Generation("r", (row_context(1, 6),)))
        text = "".join([e.text async for e in actor.events if isinstance(e, Piece)])
        assert text == " w0 w1 w2 w3 w4 w5"
        assert isinstance(actor.outcome, Finished)
        assert actor.outcome.receipt.completion_tokens == 6
        assert actor.outcome.receipt.accepted_tokens == 2 * actor.outcome.receipt.drafted_tokens / 4
        assert place.house.meter.tokens_committed == 6


async def test_auto_finds_the_depth_that_pays_in_this_mode(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Two drafts are accepted and each costs a fifth of a step: depth 2 is what most steps take."""
    async with stand(ServerArgs(scheduler_mode=Mode.MTP_BATCH)) as place:
        actor = place.house.start(Generation("r", (row_context(1, 600),)))
        assert [e async for e in actor.events if isinstance(e, Ended)]
        steps = place.house.meter.steps_by_depth
    assert max(steps, key=lambda depth: steps[depth]) == 2
    assert steps[2] > 0.9 * sum(steps.values())
