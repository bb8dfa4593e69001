"""The cohort policies under trial: each does what its name says, where that is quicker."""

from collections import defaultdict

import trio
import trio.testing
from tests.actors.arrivals import Arrivals
from tests.fakes import STEP_S, Nature, stand

from paceline.actors.depth import Depths, RowDepths, Steps
from paceline.lanes.base import Row, RowDelta
from paceline.runtime.modes import CohortPolicy, Mode
from paceline.runtime.settings import ServerArgs

SPAN_S = 4e-6  # of a token of the longest row, for each row of the geometry


def _args(trial: CohortPolicy | None, width: int = 8) -> ServerArgs:
    if trial is None:
        return ServerArgs(
            scheduler_mode=Mode.MTP_BATCH, decode_batch_max=width, speculative_depth=0
        )
    return ServerArgs(
        scheduler_mode=Mode.MTP_COHORT_EXPERIMENTAL,
        cohort_policy=trial,
        decode_batch_max=width,
        speculative_depth=0,
    )


async def _short_beside_long(trial: CohortPolicy | None, long: int, span_s: float) -> float:
    """Return how long seven short rows took beside a long one, all prompts read before."""
    times = Arrivals()
    behaving = stand(_args(trial), nature=Nature(span_s=span_s))
    async with behaving as place, trio.open_nursery() as nursery:
        nursery.start_soon(times.run, place, "long", long, 3000)
        await trio.sleep(8)
        for i in range(7):
            nursery.start_soon(times.run, place, f"r{i}", 10, 200)
    return max(times[f"r{i}"][-1] - times[f"r{i}"][0] for i in range(7))


async def test_length_keeps_a_long_row_from_widening_every_step(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Where attention to a long row is dear, short rows step apart from it and end earlier."""
    together = await _short_beside_long(None, 4000, SPAN_S)
    apart = await _short_beside_long(CohortPolicy.LENGTH, 4000, SPAN_S)
    assert apart < 0.6 * together


async def test_length_keeps_rows_together_where_that_is_quicker(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Where a pass costs the same at any length, one cohort is what most steps are."""
    together = await _short_beside_long(None, 4000, 0.0)
    found = await _short_beside_long(CohortPolicy.LENGTH, 4000, 0.0)
    assert found < 1.05 * together


async def test_length_gives_every_class_its_turn(autojump_clock: trio.testing.MockClock) -> None:
    """Short and long rows gain the same number of tokens while both decode."""
    times = Arrivals()
    behaving = stand(_args(CohortPolicy.LENGTH), nature=Nature(span_s=SPAN_S))
    async with behaving as place, trio.open_nursery() as nursery:
        for name, prompt in (("a", 10), ("b", 20), ("c", 1000), ("d", 3000)):
            nursery.start_soon(times.run, place, name, prompt, 150)
    began, ended = max(t[0] for t in times.values()), min(t[-1] for t in times.values())
    gained = times.between(began, ended).values()
    assert min(gained) > 50
    assert max(gained) - min(gained) <= 2


async def _mean_time(trial: CohortPolicy | None) -> tuple[float, float]:
    """Return the mean and the longest time of twelve requests, short and long, at width 4."""
    times = Arrivals()
    async with stand(_args(trial, 4)) as place, trio.open_nursery() as nursery:
        began = trio.current_time()
        for i in range(12):
            nursery.start_soon(times.run, place, f"r{i}", 1, (200, 190, 20, 10)[i % 4])
            await trio.sleep(0.0001)
    spent = [t[-1] - began for t in times.values()]
    return sum(spent) / len(spent), max(spent)


async def test_fair_finish_ends_short_answers_first(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The mean request ends earlier, and the last one no later than by the length of a row."""
    mean, last = await _mean_time(None)
    found, found_last = await _mean_time(CohortPolicy.FAIR_FINISH)
    assert found < 0.95 * mean
    assert found_last <= last + 200 * STEP_S


async def test_fair_finish_lets_a_long_answer_have_its_turn(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Short requests that keep coming do not hold a long one back for ever."""
    times = Arrivals()
    async with stand(_args(CohortPolicy.FAIR_FINISH, 2)) as place, trio.open_nursery() as nursery:
        for i in range(3):
            nursery.start_soon(times.run, place, f"s{i}", 1, 50)
        await trio.sleep(0.01)
        nursery.start_soon(times.run, place, "long", 1, 2000)
        for i in range(3, 1600):
            nursery.start_soon(times.run, place, f"s{i}", 1, 50)
            await trio.sleep(24 * STEP_S)
            if "long" in times and len(times["long"]) > 1:
                break
    assert i < 1500, "it never had its turn"


async def test_fair_finish_gives_a_free_place_to_the_row_with_least_left(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Of two rows whose prompts are read, the shorter one steps first, though it came later."""
    times = Arrivals()
    async with stand(_args(CohortPolicy.FAIR_FINISH, 2)) as place, trio.open_nursery() as nursery:
        nursery.start_soon(times.run, place, "a", 1, 60)
        nursery.start_soon(times.run, place, "b", 1, 90)
        await trio.sleep(0.1)
        nursery.start_soon(times.run, place, "long", 1, 300)
        await trio.sleep(0.1)
        nursery.start_soon(times.run, place, "short", 1, 10)
    assert times["short"][1] < times["long"][1]


def _chosen(depths: Depths, accepts: dict[str, int], position_s: float) -> dict[str, list[int]]:
    """Run 400 steps of rows that accept so many drafts each; return the depths of the last 200."""
    rows = list(accepts)
    found: dict[str, list[int]] = defaultdict(list)
    for step in range(400):
        steps = depths.choose(rows)
        seconds = 1.0 + 0.02 * max(steps.depths) + position_s * sum(steps.depths)
        deltas = [
            RowDelta(row, drafted=depth, accepted=min(depth, accepts[row]))
            for row, depth in zip(rows, steps.depths, strict=True)
        ]
        depths.saw(rows, steps, seconds, deltas)
        if step >= 200:
            for row, depth in zip(rows, steps.depths, strict=True):
                found[row].append(depth)
    return found


def test_depth_drafts_for_the_rows_whose_drafts_are_accepted() -> None:
    """Two rows that accept everything draft deep, six that accept nothing hardly draft."""
    accepts = {f"good {i}": 4 for i in range(2)} | {f"bad {i}": 0 for i in range(6)}
    found = _chosen(RowDepths("mtp", 4), accepts, 0.05)
    assert sum(found["good 0"]) / 200 > 2.5
    assert sum(found["bad 0"]) / 200 < 0.5


def test_depth_commits_more_than_one_depth_for_all() -> None:
    """On such a cohort the tokens a second are well above those of an even depth."""

    def rate(depths: Depths) -> float:
        accepts = {f"good {i}": 4 for i in range(4)} | {f"bad {i}": 0 for i in range(4)}
        rows, tokens, seconds = list(accepts), 0, 0.0
        for _ in range(600):
            steps = depths.choose(rows)
            took = 1.0 + 0.02 * max(steps.depths) + 0.05 * sum(steps.depths)
            kept = [min(d, accepts[row]) for row, d in zip(rows, steps.depths, strict=True)]
            deltas = [
                RowDelta(row, drafted=d, accepted=k)
                for row, d, k in zip(rows, steps.depths, kept, strict=True)
            ]
            depths.saw(rows, steps, took, deltas)
            tokens, seconds = tokens + len(rows) + sum(kept), seconds + took
        return tokens / seconds

    assert rate(RowDepths("mtp", 4)) > 1.15 * rate(Depths("mtp", 4))


def test_depth_forgets_rows_that_left() -> None:
    """What a row's drafts did does not outlive it."""
    depths = RowDepths("mtp", 4)
    depths.saw(["a"], Steps("mtp-b1", 1, (1,)), 1.0, [RowDelta("a", drafted=1, accepted=1)])
    depths.forget("a")
    depths.forget("never seen")
    assert not depths._rows


async def _good_beside_bad(args: ServerArgs) -> Arrivals:
    """Run four rows whose drafts are all accepted beside four whose drafts never are."""

    def accepts(row: Row) -> int:
        return 4 if row.key.startswith("good") else 0

    times = Arrivals()
    nature = Nature(accepts=accepts, position_s=0.0005)
    async with stand(args, nature=nature) as place, trio.open_nursery() as nursery:
        for i in range(4):
            nursery.start_soon(times.run, place, f"good{i}", 1, 400)
            nursery.start_soon(times.run, place, f"bad{i}", 1, 400)
    return times


async def test_depth_of_a_cohort_is_uneven_in_the_whole_server(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Through real actors: good rows end far earlier, and the mean row earlier too."""
    even = await _good_beside_bad(ServerArgs(scheduler_mode=Mode.MTP_BATCH))
    found = await _good_beside_bad(
        ServerArgs(scheduler_mode=Mode.MTP_COHORT_EXPERIMENTAL, cohort_policy=CohortPolicy.DEPTH)
    )

    def spent(times: Arrivals, names: str) -> float:
        every = [t[-1] - t[0] for name, t in times.items() if name.startswith(names)]
        return sum(every) / len(every)

    assert spent(found, "good") < 0.7 * spent(even, "good")
    assert spent(found, "") < 0.97 * spent(even, "")
