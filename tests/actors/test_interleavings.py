"""Any interleaving of admit, leave, stall and failure: no row leaks, one terminal event each."""

from typing import Literal

import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes import WORD_BASE, Stand, row_context, stand

from paceline.actors.request import Generation, Outcome, RequestActor
from paceline.actors.speech import Ended, Piece
from paceline.lanes.base import Row
from paceline.runtime.errors import BusyError
from paceline.runtime.modes import CohortPolicy, Mode, Priority
from paceline.runtime.settings import ServerArgs

Op = tuple[Literal["admit", "hang_up", "stall", "slow", "wait"], int, int]

_OPS = st.lists(
    st.one_of(
        st.tuples(st.just("admit"), st.integers(1, 150), st.integers(1, 40)),
        st.tuples(st.just("hang_up"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("stall"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("slow"), st.integers(0, 30), st.just(0)),
        st.tuples(st.just("wait"), st.integers(0, 40), st.just(0)),
    ),
    max_size=40,
)
_MODES = st.sampled_from(
    [
        *((mode, CohortPolicy.DEPTH) for mode in Mode),
        *((Mode.MTP_COHORT_EXPERIMENTAL, trial) for trial in list(CohortPolicy)[1:]),
    ]
)
_PRIORITIES = list(Priority)
_FAILING_PROMPT = 13  # a prompt of this length fails at its third token
_STALL_S = 5.0
_SIP_S = 4.0  # between two reads of a slow client: within the limit


def _script(row: Row) -> int:
    if len(row.context.prompt) == _FAILING_PROMPT and len(row.generated) == 2:
        return -1
    return WORD_BASE + len(row.generated)


class _Client:
    """Reads an actor until it ends, hangs up, or is told to stall."""

    def __init__(self, actor: RequestActor, budget: int, fails: bool) -> None:
        self.actor = actor
        self.budget = budget
        self.fails = fails
        self.stalled = False
        self.slow = False
        self.left = False
        self.ends = 0
        self.seen: list[str] = []

    async def read(self) -> None:
        while True:
            while self.stalled:
                await trio.sleep(_STALL_S)
                if self.actor.outcome is not None:
                    return
            try:
                if self.slow:
                    await trio.sleep(_SIP_S)
                event = await self.actor.events.receive()
            except trio.EndOfChannel:
                return
            if isinstance(event, Ended):
                self.ends += 1
            elif isinstance(event, Piece):
                self.seen.append(event.text)


async def _play(mode: Mode, trial: CohortPolicy, ops: list[Op]) -> tuple[Stand, list[_Client]]:
    args = ServerArgs(
        scheduler_mode=mode,
        cohort_policy=trial,
        max_queue=6,
        client_stall_s=_STALL_S,
        parked_rows_max=2,
    )
    clients: list[_Client] = []
    async with stand(args, _script) as place, trio.open_nursery() as nursery:
        for kind, value, budget in ops:
            if kind == "admit":
                generation = Generation(
                    f"r{len(clients)}",
                    (row_context(value, budget),),
                    priority=_PRIORITIES[value % 3],
                )
                try:
                    actor = place.house.start(generation)
                except BusyError:
                    continue
                fails = value == _FAILING_PROMPT and budget >= 3
                clients.append(_Client(actor, budget, fails))
                nursery.start_soon(clients[-1].read)
            elif kind == "wait":
                await trio.sleep(value * 0.007)
            elif clients:
                client = clients[value % len(clients)]
                if kind == "stall":
                    client.stalled = True
                elif kind == "slow":
                    client.slow = True
                else:
                    client.left = True
                    client.actor.hang_up("client_disconnect")
        await trio.sleep(_STALL_S * len(clients) + 40 * _SIP_S + 200)
        assert place.house.open_requests == 0
        assert place.open_rows == set()
        assert not place.core.rows
        assert not place.core.queued
        assert not place.core.cohorts
    return place, clients


def _check(client: _Client) -> None:
    outcome: Outcome | None = client.actor.outcome
    assert outcome is not None, "every request has its terminal outcome"
    undisturbed = not client.stalled and not client.slow and not client.left
    if undisturbed and not client.fails:
        assert client.ends == 1
        assert "".join(client.seen) == "".join(f" w{i}" for i in range(client.budget))
    if undisturbed and client.fails:
        assert client.ends == 0
        # What a step had chosen before it failed is lost with it.
        assert "".join(client.seen) in (" w0", " w0 w1")
    assert client.ends <= 1


@settings(max_examples=200)
@given(_MODES, _OPS)
def test_nothing_leaks_and_everything_ends_once(
    mode: tuple[Mode, CohortPolicy], ops: list[Op]
) -> None:
    """200 random histories: rows are freed, cohorts dissolved, each request ends exactly once."""
    place, clients = trio.run(_play, *mode, ops, clock=trio.testing.MockClock(autojump_threshold=0))
    for client in clients:
        _check(client)
    for lane in place.lanes.values():
        assert all(width <= lane.spec.geometry for width in lane.step_widths)
