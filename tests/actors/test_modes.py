"""One suite of promises for every mode, in virtual time on fake lanes; smaller, on real ones."""

from typing import Any, NamedTuple

import pytest
import trio
import trio.testing
from tests.actors.arrivals import Arrivals
from tests.fakes import DRAFT_S, READ_S, STEP_S, TILE, WORD_BASE, Nature, stand

from paceline.actors.engine import Engine
from paceline.actors.house import make_core
from paceline.actors.messages import Admit, CohortSealed, Lease, Tokens
from paceline.actors.request import Generation
from paceline.lanes.base import Lane, Row
from paceline.lanes.hyper import HYPER_LANE, HyperLane
from paceline.lanes.install import Installed
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.errors import SettingsError
from paceline.runtime.modes import ONE_AT_A_TIME, CohortPolicy, Mode, Preset
from paceline.runtime.settings import ServerArgs
from paceline.runtime.text import Text


class Kind(NamedTuple):
    """One mode, and one of the ways it has of forming cohorts."""

    mode: Mode
    trial: CohortPolicy = CohortPolicy.DEPTH

    def args(self, **more: Any) -> ServerArgs:
        """Return settings of this mode."""
        return ServerArgs(scheduler_mode=self.mode, cohort_policy=self.trial, **more)


KINDS = [
    *(Kind(mode) for mode in Mode),
    *(Kind(Mode.MTP_COHORT_EXPERIMENTAL, trial) for trial in list(CohortPolicy)[1:]),
]
every_mode = pytest.mark.parametrize(
    "kind", KINDS, ids=lambda kind: f"{kind.mode.value}-{kind.trial.value}"
)


@every_mode
async def test_equal_requests_start_in_the_order_they_came(
    autojump_clock: trio.testing.MockClock, kind: Kind
) -> None:
    """First come, first served, in every mode; one at a time where that is promised."""
    times = Arrivals()
    async with stand(kind.args()) as place, trio.open_nursery() as nursery:
        for i in range(12):
            nursery.start_soon(times.run, place, f"r{i}", 3, 20)
            await trio.sleep(0.0001)
    firsts = [times[f"r{i}"][0] for i in range(12)]
    assert firsts == sorted(firsts)
    if kind.mode in ONE_AT_A_TIME:
        assert all(times[f"r{i}"][-1] < times[f"r{i + 1}"][0] for i in range(11))


@every_mode
async def test_running_rows_have_bounded_gaps(
    autojump_clock: trio.testing.MockClock, kind: Kind
) -> None:
    """While another's long prompt is read, no running row waits longer than its mode allows."""
    times = Arrivals()
    async with stand(kind.args()) as place, trio.open_nursery() as nursery:
        for i in range(4):
            nursery.start_soon(times.run, place, f"r{i}", 1, 300)
        await trio.sleep(0.5)
        nursery.start_soon(times.run, place, "long", 2000, 2)
    step_s = STEP_S + 4 * DRAFT_S
    # One row steps at a time in turns, one cohort of two in turns by length, all rows otherwise.
    turns = 5 if kind.mode is Mode.COOPERATIVE else 2 if kind.trial is CohortPolicy.LENGTH else 1
    bound = turns * step_s + max(TILE * READ_S, turns * step_s)
    assert max(times.longest_gap(f"r{i}") for i in range(4)) <= bound + 1e-9


@every_mode
async def test_one_end_each_and_nothing_left_behind(
    autojump_clock: trio.testing.MockClock, kind: Kind
) -> None:
    """Requests that end, fail or hang up while running or queued: one outcome, no row leaked."""

    def script(row: Row) -> int:
        return -1 if row.key.startswith("fails") and len(row.generated) == 5 else WORD_BASE

    async with stand(kind.args(), nature=Nature(script)) as place:
        actors = []
        for i in range(16):
            name = f"{('ends', 'fails', 'leaves')[i % 3]}{i}"
            context = RowContext((7,) * 40, Sampling(), i, 30, frozenset())
            actors.append(place.house.start(Generation(name, (context,))))
        async with trio.open_nursery() as nursery:

            async def read(at: int) -> None:
                seen = 0
                async for _ in actors[at].events:
                    seen += 1
                    if at % 3 == 2 and seen == 1 + at % 4:
                        actors[at].hang_up("client_disconnect")

            for i in range(16):
                nursery.start_soon(read, i)
            await trio.sleep(0.05)
            actors[14].hang_up("client_disconnect")  # queued still where one runs at a time
        codes = [getattr(actor.outcome, "code", "finished") for actor in actors]
        await trio.sleep(1)
        assert place.open_rows == set()
        assert not place.core.rows
        assert not place.core.cohorts
    assert codes == [("finished", "row_failed", "client_disconnect")[i % 3] for i in range(16)]
    for lane in place.lanes.values():
        assert all(width <= lane.spec.geometry for width in lane.step_widths)


@every_mode
async def test_health_proves_what_ran(autojump_clock: trio.testing.MockClock, kind: Kind) -> None:
    """Width, lane and histogram are those of the mode: eight together, or one at a time."""
    times = Arrivals()
    async with stand(kind.args()) as place, trio.open_nursery() as nursery:
        for i in range(8):
            nursery.start_soon(times.run, place, f"r{i}", 1, 40)
    meter = place.house.meter
    alone = kind.mode in ONE_AT_A_TIME or kind.mode is Mode.COOPERATIVE
    assert max(w for lane in place.lanes.values() for w in lane.step_widths) == (1 if alone else 8)
    assert (meter.batch_histogram == {}) == alone
    assert meter.rows_peak == (1 if kind.mode in ONE_AT_A_TIME else 8)
    assert meter.tokens_committed == 8 * 40
    if kind.mode is Mode.HYPER:
        assert place.lanes[HYPER_LANE].step_widths
        assert {receipt.branches for receipt in meter.branches} == {2}


_REFUSED: dict[Mode, list[dict[str, Any]]] = {
    Mode.SERIAL: [{"numerics": "b1-exact"}, {"cohort_policy": "length"}],
    Mode.COOPERATIVE: [{"numerics": "balanced"}, {"cohort_policy": "fair-finish"}],
    Mode.AR_BATCH: [{"speculative_depth": 2}, {"acceptance": "rejection"}],
    Mode.MTP_BATCH: [{"mtp": False}, {"cohort_policy": "length"}],
    Mode.MTP_COHORT_EXPERIMENTAL: [{"mtp": False}, {"cohort_policy": "fastest"}],
    Mode.HYPER: [
        {"max_active_requests": 1},
        {"decode_batch_max": 8},
        {"batch_wait_ms": 1.0},
        {"preset": Preset.AGENT},
        {"preset": Preset.THROUGHPUT},
        {"acceptance": "rejection"},
        {"mtp": False},
        {"numerics": "balanced"},
    ],
}


@pytest.mark.parametrize("mode", list(Mode))
def test_settings_that_contradict_the_mode_are_refused(mode: Mode) -> None:
    """One line that begins with the setting; every mode has some, and none is ignored."""
    for more in _REFUSED[mode]:
        (name,) = more
        with pytest.raises(SettingsError, match=f"^{name}="):
            ServerArgs(scheduler_mode=mode, **more)


def _contexts(text: Text) -> list[RowContext]:
    samplers = (
        Sampling(temperature=0),
        Sampling(temperature=0.8),
        Sampling(temperature=1.0, top_p=0.9),
        Sampling(temperature=0.7, frequency_penalty=0.5),
    )
    found = []
    for i, sampling in enumerate(samplers):
        ask = f"Write {i + 2} lines about rain. " * (1, 6)[i % 2]
        prompt = tuple(text.encode_chat([{"role": "user", "content": ask}]))
        found.append(RowContext(prompt, sampling, i, 10, frozenset()))
    return found


def _play(
    kind: Kind, lanes: list[Lane], contexts: list[RowContext]
) -> tuple[list[list[int]], set[int]]:
    """Run rows through a mode's own core and engine; return their tokens and the widths seen."""
    now = [0.0]

    def clock() -> float:
        now[0] += 0.01
        return now[0]

    engine = Engine(make_core(kind.args(), lanes), {lane.spec.name: lane for lane in lanes}, clock)
    for i, context in enumerate(contexts):
        engine.feed(Admit(Lease(str(i), i), str(i), context, 10**6, 0.0))
    gained: list[list[int]] = [[] for _ in contexts]
    widths = set()
    while (turn := engine.turn()) is not None:
        for message in turn.messages:
            if isinstance(message, Tokens):
                gained[int(message.lease.row)] += message.tokens
        widths |= {len(note.rows) for note in turn.notes if isinstance(note, CohortSealed)}
    return gained, widths


@pytest.fixture(scope="module")
def plain(installed: Installed, text: Text) -> list[list[int]]:
    """The tokens of serial without a head."""
    return _play(Kind(Mode.SERIAL), list(installed.lanes[:1]), _contexts(text))[0]


@pytest.mark.slow
@every_mode
def test_the_same_seed_gives_the_same_tokens_on_the_real_model(
    drafting: Installed, installed: Installed, text: Text, plain: list[list[int]], kind: Kind
) -> None:
    """Every mode on its real lanes has the tokens of serial without a head, at its own width."""
    lanes: list[Lane] = list(drafting.lanes)
    if kind.mode is Mode.AR_BATCH:
        lanes = list(installed.lanes)
    elif kind.mode in (Mode.SERIAL, Mode.COOPERATIVE):
        lanes = lanes[:1]
    elif kind.mode is Mode.HYPER:
        narrow: Any = lanes[0]
        trunk, head = narrow.trunk, narrow._drafting
        lanes = [narrow, HyperLane(trunk, "float32", narrow.receipt, head)]
    found, widths = _play(kind, lanes, _contexts(text))
    assert found == plain
    assert max(widths) == (1 if len(lanes) < 3 else 4)
