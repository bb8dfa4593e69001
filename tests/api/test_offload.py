"""Long answers are written beside the event loop, and one that cannot be written says so once."""

import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import trio.testing
from tests.api.conftest import Serving, read_stream
from tests.api.test_tools import says
from tests.fakes import FakeText

from paceline.api import answers, problems, sse
from paceline.api.anthropic.route import MessageShape
from paceline.api.chat import ChatShape
from paceline.api.completions import TextShape
from paceline.api.offload import ANSWERS, COUNTS, FORMS, PROMPTS, at_length
from paceline.api.responses.shape import ResponseShape
from paceline.runtime.errors import BusyError

_LOCAL = {"Host": "localhost", "Content-Type": "application/json"}
_ASK = [{"role": "user", "content": "hi"}]
_CHAT = "/v1/chat/completions"
_TEXT = "/v1/completions"
_LONG = 1_100  # tokens whose log probabilities are long to write


@pytest.fixture
def encoded_here(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Note of each answer, or part of one, whether it was made on the event loop, and its bytes."""
    here = threading.get_ident()
    made: list[tuple[bool, int]] = []

    def watched(work: Callable[..., bytes]) -> Callable[..., bytes]:
        def wrapper(*args: Any, **options: Any) -> bytes:
            found = work(*args, **options)
            made.append((threading.get_ident() == here, len(found)))
            return found

        return wrapper

    monkeypatch.setattr(answers, "encoded", watched(problems.encoded))
    monkeypatch.setattr(sse, "event_bytes", watched(sse.event_bytes))
    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        (_CHAT, {"messages": _ASK, "logprobs": True}),
        (_TEXT, {"prompt": "hi", "logprobs": 1}),
        (_TEXT, {"prompt": ["x" * 4_000, "y"], "echo": True, "n": 2, "max_tokens": 2}),
        ("/v1/responses", {"input": "hi", "include": ["message.output_text.logprobs"]}),
        ("/v1/responses", {"input": "x" * 20_000, "max_output_tokens": 3}),
    ],
)
async def test_long_answers_are_written_beside_the_event_loop(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    encoded_here: list[tuple[bool, int]],
    path: str,
    body: dict[str, Any],
    stream: bool,
) -> None:
    """Whole ones, and the long parts of streams: nothing of 30 kB is made on the loop."""
    budget = "max_output_tokens" if path == "/v1/responses" else "max_tokens"
    body = {budget: _LONG, **body, "stream": stream}
    async with serving(context=40_000) as (client, _):
        if stream:
            await read_stream(client, path, body)
        else:
            answer = await client.post(path, json=body, headers=_LOCAL)
            assert answer.status_code == 200
    if stream:
        assert any(not here for here, _ in encoded_here)
        assert all(size < 30_000 for here, size in encoded_here if here)
    else:
        assert [here for here, _ in encoded_here] == [False]


async def test_each_prompt_is_read_back_once(
    serving: Serving, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many choices repeat it."""
    read: list[int] = []
    decode = FakeText.decode

    def watched(self: FakeText, tokens: Any) -> str:
        read.append(1)
        return decode(self, tokens)

    monkeypatch.setattr(FakeText, "decode", watched)
    body = {"prompt": ["a", "b"], "echo": True, "n": 8, "max_tokens": 1}
    async with serving() as (client, _):
        answer = await client.post(_TEXT, json=body, headers=_LOCAL)
        texts = [choice["text"] for choice in (await answer.get_json())["choices"]]
        assert len(read) == 2
        await read_stream(client, _TEXT, {**body, "stream": True})
    assert [text[0] for text in texts] == ["a"] * 8 + ["b"] * 8
    assert len(read) == 4


_SHAPES = [
    (_CHAT, {"messages": _ASK}, ChatShape),
    (_TEXT, {"prompt": "hi"}, TextShape),
    ("/v1/responses", {"input": "hi"}, ResponseShape),
    ("/v1/messages", {"messages": _ASK, "max_tokens": 999}, MessageShape),
]


@pytest.mark.parametrize("fails", ["opening", "piece", "ended", "closing"])
@pytest.mark.parametrize(("path", "body", "shape"), _SHAPES)
async def test_a_stream_that_cannot_be_written_ends_with_one_error(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    shape: Any,
    fails: str,
) -> None:
    """In its dialect's words, with nothing behind it, and its rows are given back."""

    def broken(*_: Any) -> Any:
        raise ValueError("cannot be written")

    monkeypatch.setattr(shape, fails, broken)
    script = says("one two") if fails in ("ended", "closing") else None
    async with serving(script) as (client, place):
        raw = await read_stream(client, path, {**body, "stream": True})
        await trio.sleep(1)
        assert not place.open_rows
        assert place.house.open_requests == 0
        assert script or place.house.meter.requests == {"failed": 1}
    assert b"[DONE]" not in raw
    last = json.loads(raw.strip().split(b"\n\n")[-1].rpartition(b"data: ")[2])
    assert raw.count(b"internal_error") + raw.count(b"could not be written") >= 1
    match path:
        case "/v1/responses":
            assert last["type"] == "response.failed"
            assert last["response"]["error"]["message"] == "the answer could not be written"
        case "/v1/messages":
            assert (last["type"], last["error"]["type"]) == ("error", "api_error")
        case _:
            assert last["error"]["code"] == "internal_error"


@pytest.mark.parametrize(("path", "body", "shape"), _SHAPES)
async def test_a_stream_whose_error_repeats_what_cannot_be_written_ends_with_a_plain_one(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    shape: Any,
) -> None:
    """Never with nothing."""

    def broken(*_: Any) -> Any:
        raise ValueError("cannot be written")

    monkeypatch.setattr(shape, "piece", broken)
    monkeypatch.setattr(shape, "failing", broken)
    async with serving() as (client, _):
        raw = await read_stream(client, path, {**body, "stream": True})
    last = json.loads(raw.strip().split(b"\n\n")[-1].rpartition(b"data: ")[2])
    assert last["error"]["message"] == "the answer could not be written"


@pytest.mark.parametrize(("path", "body", "shape"), _SHAPES)
async def test_a_whole_answer_that_cannot_be_written_is_an_error(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    shape: Any,
) -> None:
    """A 500 in the dialect's words."""

    def broken(*_: Any) -> Any:
        raise ValueError("cannot be written")

    monkeypatch.setattr(shape, "whole", broken)
    async with serving(says("one two")) as (client, place):
        answer = await client.post(path, json=body, headers=_LOCAL)
        assert answer.status_code == 500
        assert "error" in await answer.get_json()
        assert place.house.open_requests == 0


async def test_queues_keep_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its threads and its bound; an answer that was paid for always waits its turn."""
    gate = trio.Event()

    async def run_sync(work: Any, *args: Any, limiter: trio.CapacityLimiter) -> Any:
        async with limiter:
            await gate.wait()
        return work(*args)

    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync)
    refused: dict[str, int] = {}
    queues = {"prompts": PROMPTS, "counts": COUNTS, "forms": FORMS, "answers": ANSWERS}

    async def one(name: str) -> None:
        try:
            await at_length(lambda: None, True, queues[name])
        except BusyError:
            refused[name] = refused.get(name, 0) + 1

    async with trio.open_nursery() as nursery:
        for name in queues:
            for _ in range(80):
                nursery.start_soon(one, name)
        await trio.testing.wait_all_tasks_blocked()
        assert await at_length(lambda: "short", False) == "short"
        gate.set()
    assert refused == {"prompts": 80 - 2 - 64, "counts": 80 - 1 - 64, "forms": 80 - 2 - 64}
