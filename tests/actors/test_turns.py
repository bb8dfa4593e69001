"""cooperative: equal pace whatever is accepted, bounded gaps, priorities that starve nobody."""

from typing import NamedTuple

import pytest
import trio
import trio.testing
from tests.actors.arrivals import Arrivals
from tests.fakes import MAX_DEPTH, READ_S, STEP_S, TILE, Nature, stand

from paceline.actors.scene import Costs, Scene
from paceline.actors.turns import AGE_SECONDS, WEIGHTS, CooperativePolicy
from paceline.lanes.base import Row
from paceline.runtime.modes import PRESETS, Mode, Preset, Priority
from paceline.runtime.settings import ServerArgs

COOPERATIVE = ServerArgs(scheduler_mode=Mode.COOPERATIVE)


def _by_number(row: Row) -> int:
    """Accept as many drafts as the row's name says."""
    return int(row.key.removeprefix("r").partition(".")[0]) % (MAX_DEPTH + 1)


async def test_rows_get_the_same_tokens_a_second_whatever_they_accept(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """From none to four drafts accepted a step: tokens within 10 % of each other."""
    args = ServerArgs(scheduler_mode=Mode.COOPERATIVE, speculative_depth=4)
    times = Arrivals()
    place_of = stand(args, nature=Nature(accepts=_by_number), drafts=True)
    async with place_of as place, trio.open_nursery() as nursery:
        for i in range(5):
            nursery.start_soon(times.run, place, f"r{i}", 1, 200)
    began, ended = max(t[0] for t in times.values()), min(t[-1] for t in times.values())
    gained = times.between(began, ended).values()
    assert min(gained) > 150
    assert max(gained) <= 1.1 * min(gained)


async def test_a_long_prompt_delays_each_round_by_one_piece(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Eight rows decode while 4,000 tokens are read: no gap is longer than a round and a piece."""
    times = Arrivals()
    args = ServerArgs(scheduler_mode=Mode.COOPERATIVE, max_active_requests=9)
    async with stand(args) as place, trio.open_nursery() as nursery:
        for i in range(8):
            nursery.start_soon(times.run, place, f"r{i}", 1, 200)
        await trio.sleep(1)
        nursery.start_soon(times.run, place, "long", 4000, 2)
    piece = max(TILE * READ_S, 8 * STEP_S)
    assert max(times.longest_gap(f"r{i}") for i in range(8)) <= 9 * STEP_S + piece + 1e-9
    assert times["long"][0] < times["r0"][-1], "it was read while the others ran"


async def test_reading_takes_its_share_of_measured_time_and_no_more(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A tile that is dearer than a round of steps is paid back by steps before the next one."""
    share, rows = 0.2, 2
    args = ServerArgs(scheduler_mode=Mode.COOPERATIVE, prefill_share=share)
    times = Arrivals()
    async with stand(args) as place, trio.open_nursery() as nursery:
        for i in range(rows):
            nursery.start_soon(times.run, place, f"r{i}", 1, 2000)
        await trio.sleep(1)
        began = trio.current_time()
        nursery.start_soon(times.run, place, "long", 4000, 1)
    taken = times["long"][0] - began
    assert taken == pytest.approx(4000 * READ_S / share, rel=0.03)


async def test_priorities_weigh_turns_and_starve_nobody(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """While all three decode, tokens are as 1 to 4 to 16."""
    times = Arrivals()
    async with stand(COOPERATIVE) as place, trio.open_nursery() as nursery:
        for priority in Priority:
            budget = int(240 * WEIGHTS[priority])
            nursery.start_soon(times.run, place, priority.value, 1, budget, priority)
    began, ended = max(t[0] for t in times.values()), min(t[-1] for t in times.values())
    gained = times.between(began, ended)
    normal = gained["normal"]
    assert normal >= 200
    for priority in Priority:
        assert gained[priority.value] == pytest.approx(WEIGHTS[priority] * normal, rel=0.1)


async def test_the_urgent_get_a_place_and_are_read_first(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """With one place, queued requests start by priority, then in the order they came."""
    args = ServerArgs(scheduler_mode=Mode.COOPERATIVE, max_active_requests=1)
    times = Arrivals()
    names = ["background", "normal", "normal", "interactive", "background", "interactive"]
    async with stand(args) as place, trio.open_nursery() as nursery:
        nursery.start_soon(times.run, place, "first", 1, 20)
        await trio.sleep(0.01)
        for i, name in enumerate(names):
            nursery.start_soon(times.run, place, f"{i} {name}", 1, 5, Priority(name))
            await trio.sleep(0.001)
    started = sorted(times, key=lambda name: times[name][0])
    assert [name.partition(" ")[0] for name in started] == ["first", "3", "5", "1", "2", "0", "4"]


async def test_background_is_served_in_time_while_urgent_requests_keep_coming(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Waiting lifts a row's priority, so an endless line of urgent ones does not keep it out."""
    args = ServerArgs(scheduler_mode=Mode.COOPERATIVE, max_active_requests=1)
    times = Arrivals()
    async with stand(args) as place, trio.open_nursery() as nursery:
        nursery.start_soon(times.run, place, "urgent 0", 1, 100, Priority.INTERACTIVE)
        await trio.sleep(0.01)
        began = trio.current_time()
        nursery.start_soon(times.run, place, "patient", 1, 5, Priority.BACKGROUND)
        for i in range(1, 150):
            nursery.start_soon(times.run, place, f"urgent {i}", 1, 100, Priority.INTERACTIVE)
            await trio.sleep(1.0)
    waited = times["patient"][0] - began
    assert 2 * AGE_SECONDS - 1 < waited < 2 * AGE_SECONDS + 5
    assert times["urgent 149"][0] > times["patient"][0]


class _Row(NamedTuple):
    key: str
    epoch: int
    emitted: int = 0
    unread: int = 0
    length: int = 1
    left: int = 100
    priority: Priority = Priority.NORMAL
    queued_at: float = 0.0
    ready_at: float = 0.0


def test_a_row_that_was_parked_has_nothing_saved_up() -> None:
    """Turns a row could not take are lost to it: it comes back at the common pace."""
    policy = CooperativePolicy(PRESETS[Preset.LATENCY], 0.5, TILE)
    emitted = {"a": 0, "b": 0}

    def turn(parked: str | None) -> str:
        rows = [_Row(key, at, emitted[key]) for at, key in enumerate(emitted)]
        ready = [row for row in rows if row.key != parked]
        waits = [row for row in rows if row.key == parked]
        (key,) = policy.choose(Scene([], ready, waits, frozenset(), Costs(), 0.0)).step
        emitted[key] += 1
        return key

    together = [turn(None) for _ in range(20)]
    assert together == ["a", "b"] * 10
    assert [turn("b") for _ in range(50)] == ["a"] * 50
    back = [turn(None) for _ in range(20)]
    assert abs(back.count("a") - back.count("b")) <= 1


def test_a_row_that_waits_for_its_place_keeps_its_overdraft() -> None:
    """A row whose reader is back, and that is not placed yet, owes what it has overdrawn."""
    policy = CooperativePolicy(PRESETS[Preset.LATENCY], 0.5, TILE)
    emitted = {"a": 0, "b": 0}

    def turn(waits: str | None) -> str:
        rows = [_Row(key, at, emitted[key]) for at, key in enumerate(emitted)]
        ready = [row for row in rows if row.key != waits]
        back = [row for row in rows if row.key == waits]
        scene = Scene([], ready, [], frozenset(), Costs(), 0.0, back=back)
        (key,) = policy.choose(scene).step
        return key

    for gained in (20, 1):
        emitted[turn(None)] += gained
    assert emitted == {"a": 20, "b": 1}
    assert turn("a") == "b"
    for _ in range(15):
        assert turn(None) == "b"
        emitted["b"] += 1
