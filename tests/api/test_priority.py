"""A request's priority: in the body or its header, where the mode knows it, refused elsewhere."""

from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from tests.api.conftest import Serving

_BODY = {"prompt": "ab", "max_tokens": 60}


async def _post(client: Any, body: dict[str, Any], **headers: str) -> Any:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return await client.post(path, json=body, headers={"Host": "localhost", **headers})


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"paceline": {"priority": "interactive"}}, {}),
        ({}, {"X-Paceline-Priority": "Interactive"}),
        ({"paceline": {"priority": "interactive"}}, {"X-Paceline-Priority": "background"}),
    ],
)
async def test_an_urgent_request_gets_four_times_the_turns(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    body: dict[str, Any],
    headers: dict[str, str],
) -> None:
    """Beside an equal request of no priority it ends when that has a quarter of its tokens."""
    ends: dict[str, float] = {}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 60}
    async with serving(scheduler_mode="cooperative") as (client, _):

        async def ask(name: str, asked: dict[str, Any], **more: str) -> None:
            answer = await _post(client, asked, **more)
            assert answer.status_code == 200
            ends[name] = trio.current_time()

        for kind in (_BODY, chat):
            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask, "normal", {**kind, "paceline": None})
                nursery.start_soon(partial(ask, "urgent", {**kind, **body}, **headers))
            urgent, normal = (ends[name] - began for name in ("urgent", "normal"))
            assert urgent < 0.7 * normal


@pytest.mark.parametrize("mode", ["serial", "ar_batch", "mtp_batch", "hyper"])
async def test_a_mode_without_priorities_refuses_them(
    serving: Serving, autojump_clock: trio.testing.MockClock, mode: str
) -> None:
    """`normal` is served; another one is a 400 that names field and mode."""
    async with serving(scheduler_mode=mode) as (client, _):
        usual = await _post(client, {**_BODY, "paceline": {"priority": "normal"}})
        in_body = await _post(client, {**_BODY, "paceline": {"priority": "background"}})
        in_header = await _post(client, _BODY, **{"X-Paceline-Priority": "interactive"})
        answers = [(await answer.get_json())["error"] for answer in (in_body, in_header)]
    assert usual.status_code == 200
    assert (in_body.status_code, in_header.status_code) == (400, 400)
    assert [a["param"] for a in answers] == ["paceline.priority", "X-Paceline-Priority"]
    assert all(mode in a["message"] and "cooperative" in a["message"] for a in answers)


@pytest.mark.parametrize(
    ("body", "headers", "param"),
    [
        ({"paceline": {"priority": "high"}}, {}, "paceline.priority"),
        ({"paceline": {"urgency": 1}}, {}, "paceline"),
        ({}, {"X-Paceline-Priority": "high"}, "X-Paceline-Priority"),
    ],
)
async def test_an_unknown_priority_is_refused(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    body: dict[str, Any],
    headers: dict[str, str],
    param: str,
) -> None:
    """A wrong name is a 400 that names the field, and so is a field that paceline has not."""
    async with serving(scheduler_mode="cooperative") as (client, _):
        answer = await _post(client, {**_BODY, **body}, **headers)
        error = (await answer.get_json())["error"]
    assert answer.status_code == 400
    assert error["param"] == param


async def test_hyper_keeps_receipts_of_its_branches(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """/health says what was reserved, what recent steps carried, and who waits; others do not."""
    async with serving(scheduler_mode="hyper") as (client, _):
        assert (await _post(client, _BODY)).status_code == 200
        found = (await (await client.get("/health", headers={"Host": "localhost"})).get_json())[
            "scheduler"
        ]
    async with serving(scheduler_mode="serial") as (client, _):
        other = await (await client.get("/health", headers={"Host": "localhost"})).get_json()
    hyper = found["hyper"]
    assert (hyper["admission_limit"], hyper["reserved_width"], hyper["queue_depth"]) == (1, 8, 0)
    assert 0 < len(hyper["receipts"]) <= 32
    assert all(
        set(receipt) == {"branches", "nodes", "accepted_branch", "tokens"}
        for receipt in hyper["receipts"]
    )
    assert found["telemetry"]["batch_histogram"] == {}
    assert {lane["name"] for lane in found["installed_lanes"]} == {"mtp-b1", "hyper-b8"}
    assert "hyper" not in other["scheduler"]


async def test_a_mode_under_trial_says_so(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """/health marks it experimental and names its policy."""
    settings = {"scheduler_mode": "mtp_cohort_experimental", "cohort_policy": "length"}
    async with serving(**settings) as (client, _):
        found = await (await client.get("/health", headers={"Host": "localhost"})).get_json()
    assert found["scheduler"]["experimental"] is True
    assert found["scheduler"]["config"]["cohort_policy"] == "length"
