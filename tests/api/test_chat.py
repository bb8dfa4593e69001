"""POST /v1/chat/completions over fake lanes: shapes, streams, refusals."""

import json
from typing import Any

import pytest
import trio.testing
from tests.api.conftest import Serving, read_stream
from tests.fakes import END, WORD_BASE, row_context

from paceline.actors.request import Generation
from paceline.lanes.base import Row

_HELLO = [{"role": "user", "content": "hello"}]
_LOCAL = {"Host": "localhost:8000"}
_CHAT = "/v1/chat/completions"


def _events(raw: bytes) -> list[Any]:
    lines = [line[6:] for line in raw.split(b"\n\n") if line.startswith(b"data: ")]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


async def _post(client: Any, body: dict[str, Any], path: str = "/v1/chat/completions") -> Any:
    return await client.post(path, json=body, headers=_LOCAL)


async def test_an_answer_has_openais_shape_and_says_what_ran(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """The body carries choice, usage, nullable fields, request id and the paceline object."""
    async with serving() as (client, _):
        answer = await _post(client, {"messages": _HELLO, "max_tokens": 3, "seed": 11})
        body = await answer.get_json()
    assert answer.status_code == 200
    assert answer.headers["x-request-id"].startswith("req-")
    assert body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": " w0 w1 w2", "refusal": None}
    assert choice["finish_reason"] == "length"
    assert choice["logprobs"] is None
    assert body["usage"]["prompt_tokens"] == len("user:hello\n")
    assert body["usage"]["completion_tokens"] == 3
    told = body["paceline"]
    assert (told["mode"], told["lanes"], told["widths"]) == ("serial", ["ar-b1"], [1])
    assert (told["seed"], told["max_tokens"]) == (11, 3)
    assert told["time_to_first_token_s"] > 0


async def test_a_stream_is_well_formed(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Role first, text pieces, one finish, one usage chunk with no choices, then the mark."""
    body = {"messages": _HELLO, "max_tokens": 4, "stream": True, "n": 2}
    async with serving(scheduler_mode="ar_batch") as (client, _):
        asked = {**body, "stream_options": {"include_usage": True}}
        events = _events(await read_stream(client, _CHAT, asked))
    assert events.pop() == b"[DONE]"
    assert len({(e["id"], e["created"], e["model"]) for e in events}) == 1
    usage = events.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert usage["paceline"]["widths"] == [1, 2] or usage["paceline"]["widths"] == [2]
    assert all(e["usage"] is None for e in events)
    for index in (0, 1):
        own = [e["choices"][0] for e in events if e["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == " w0 w1 w2 w3"
        assert [c["finish_reason"] for c in own if c["finish_reason"]] == ["length"]
        assert own[-1]["finish_reason"] == "length"


async def test_without_usage_the_last_chunk_carries_what_ran(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """No chunk has empty choices unless usage was asked for; the finish chunk has `paceline`."""
    async with serving() as (client, _):
        body = {"messages": _HELLO, "max_tokens": 2, "stream": True}
        events = _events(await read_stream(client, _CHAT, body))
    chunks = events[:-1]
    assert all(e["choices"] for e in chunks)
    assert not any("usage" in e for e in chunks)
    assert chunks[-1]["paceline"]["mode"] == "serial"
    assert not any("paceline" in e for e in chunks[:-1])


async def test_a_failure_after_the_first_token_ends_the_stream_with_an_error(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A broken stream has an error event and no done mark: it cannot be taken for success."""

    def script(row: Row) -> int:
        return -1 if len(row.generated) == 2 else WORD_BASE

    async with serving(script) as (client, _):
        body = {"messages": _HELLO, "max_tokens": 9, "stream": True}
        events = _events(await read_stream(client, _CHAT, body))
        whole = await _post(client, {"messages": _HELLO, "max_tokens": 9})
    assert events[-1]["error"]["code"] == "row_failed"
    assert b"[DONE]" not in events
    assert not any(c["finish_reason"] for e in events[:-1] for c in e["choices"])
    assert whole.status_code == 500
    assert (await whole.get_json())["error"]["type"] == "server_error"


async def test_alternatives_without_logprobs_are_refused(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """top_logprobs alone means nothing and is a 400, as OpenAI has it."""
    async with serving() as (client, _):
        answer = await _post(client, {"messages": _HELLO, "max_tokens": 2, "top_logprobs": 2})
    assert answer.status_code == 400
    assert (await answer.get_json())["error"]["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 3}, "top_p"),
        ({"n": 0}, "n"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 2**64}, "seed"),
        ({"stream": "yes"}, "stream"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logit_bias": {"99999999": 1}}, "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"1": 101}}, "logit_bias"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": None}},
            "response_format.json_schema",
        ),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"modalities": ["audio"]}, "modalities"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0]",
        ),
    ],
)
async def test_bad_input_is_a_400_that_names_the_field(
    serving: Serving, autojump_clock: trio.testing.MockClock, change: dict[str, Any], param: str
) -> None:
    """Wrong types, ranges and unsupported fields are OpenAI-shaped 400s with `param`."""
    async with serving() as (client, place):
        answer = await _post(client, {"messages": _HELLO, **change})
        error = (await answer.get_json())["error"]
        assert place.house.open_requests == 0
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert set(error) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("raw", [b"", b"[]", b"true", b"{", b'{"messages": "\xff"}', b"[" * 9000])
async def test_a_body_that_is_no_json_object_is_a_400(
    serving: Serving, autojump_clock: trio.testing.MockClock, raw: bytes
) -> None:
    """Broken, deep and non-object bodies get an error object, never a 500."""
    headers = {**_LOCAL, "Content-Type": "application/json"}
    async with serving() as (client, _):
        answer = await client.post("/v1/chat/completions", data=raw, headers=headers)
        assert "error" in await answer.get_json()
    assert answer.status_code == 400


async def test_a_prompt_over_the_window_is_refused_with_the_numbers(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """context_length_exceeded says the window and the prompt; max_tokens is clamped to the rest."""
    async with serving(context=64) as (client, _):
        long = await _post(client, {"messages": [{"role": "user", "content": "x" * 80}]})
        error = (await long.get_json())["error"]
        fits = await _post(client, {"messages": _HELLO, "max_tokens": 1000})
        body = await fits.get_json()
    assert (long.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "64" in error["message"]
    assert "86" in error["message"]
    assert body["paceline"]["max_tokens"] == 64 - len("user:hello\n")
    assert body["choices"][0]["finish_reason"] == "length"


async def test_a_full_queue_is_a_503_with_retry_after(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Rows beyond places and queue are refused at once; more than both hold is a bad request."""
    async with serving(max_queue=1) as (client, place):
        place.house.start(Generation("a", (row_context(1, 500),)))
        answer = await _post(client, {"messages": _HELLO, "n": 2})
        assert int(answer.headers["Retry-After"]) >= 1
        assert (await answer.get_json())["error"]["code"] == "overloaded"
        never = await _post(client, {"messages": _HELLO, "n": 3})
        assert (await never.get_json())["error"]["param"] == "n"
    assert (answer.status_code, never.status_code) == (503, 400)


async def test_ignore_eos_runs_to_the_budget(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """The extension field keeps an end token from ending the answer."""
    async with serving(lambda row: END if len(row.generated) == 1 else WORD_BASE) as (client, _):
        plain = await (await _post(client, {"messages": _HELLO, "max_tokens": 5})).get_json()
        body = {"messages": _HELLO, "max_tokens": 5, "ignore_eos": True}
        forced = await (await _post(client, body)).get_json()
    assert plain["choices"][0]["finish_reason"] == "stop"
    assert plain["usage"]["completion_tokens"] == 2
    assert forced["choices"][0]["finish_reason"] == "length"
    assert forced["usage"]["completion_tokens"] == 5
