"""What every answer and refusal carries, in the shape that its client reads; broken HTTP too."""

import json
from typing import Any

import pytest
import trio
import trio.testing
from openai.types import Model
from tests.api.conftest import Serving
from tests.api.test_connection import _connected
from tests.api.test_tools import _LOCAL, _THINKS, says
from tests.fakes import FakeText

_MESSAGES = "/v1/messages"
_ASK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
_CLAUDE = {**_LOCAL, "anthropic-version": "2023-06-01"}


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", _MESSAGES, _ASK, 200),
        ("POST", _MESSAGES, {}, 400),
        ("POST", f"{_MESSAGES}/count_tokens", _ASK, 200),
        ("GET", _MESSAGES, None, 405),
        ("GET", f"{_MESSAGES}/batches/x", None, 404),
        ("GET", "/v1/models", None, 200),
        ("GET", "/v1/models/none", None, 404),
        ("POST", "/v1/chat/completions", {}, 400),
        ("GET", "/v1/chat/completions", None, 405),
        ("GET", "/nowhere", None, 404),
    ],
)
async def test_every_answer_has_an_id(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    method: str,
    path: str,
    body: Any,
    status: int,
) -> None:
    """x-request-id stands on all; a client of Anthropic's reads request-id and its own errors."""
    async with serving(says("ok")) as (client, _):
        more: Any = {} if body is None else {"json": body}
        answer = await client.open(path, method=method, headers=_CLAUDE, **more)
        told = await answer.get_json()
    assert answer.status_code == status
    request_id = answer.headers["x-request-id"]
    assert request_id.startswith("req-")
    anthropic = not path.startswith("/v1/chat")
    assert answer.headers.get("request-id") == (request_id if anthropic else None)
    if status >= 400 and anthropic:
        assert (told["type"], told["request_id"]) == ("error", request_id)
    elif status >= 400:
        assert set(told["error"]) == {"message", "type", "param", "code"}


async def test_models_are_listed_for_both(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """OpenAI's shape without the header, Anthropic's with it."""
    async with serving() as (client, _):
        openai = await (await client.get("/v1/models", headers=_LOCAL)).get_json()
        Model.model_validate(openai["data"][0])
        page = await (await client.get("/v1/models", headers=_CLAUDE)).get_json()
        (model,) = page["data"]
        one = await (await client.get(f"/v1/models/{model['id']}", headers=_CLAUDE)).get_json()
        path = f"/v1/models?after_id={model['id']}"
        after = await (await client.get(path, headers=_CLAUDE)).get_json()
    assert (page["has_more"], page["first_id"], page["last_id"]) == (
        False,
        model["id"],
        model["id"],
    )
    assert one == model
    assert (model["type"], model["display_name"]) == ("model", model["id"])
    assert model["created_at"].endswith("Z")
    assert after["data"] == []


async def test_a_thread_is_refused_so_that_sdks_go_on(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """The error says what Anthropic's SDK goes on without a thread on."""
    async with serving() as (client, _):
        body = {**_ASK, "thread": {"type": "create"}}
        answer = await client.post(_MESSAGES, json=body, headers=_CLAUDE)
        error = (await answer.get_json())["error"]
    assert answer.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert "thread" in error["message"]


async def test_effort_of_messages_reaches_the_template(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """output_config.effort is the template's reasoning_effort; thinking stays the caller's."""
    text = FakeText(_THINKS)
    async with serving(says("ok"), text=text) as (client, _):
        body = {**_ASK, "output_config": {"effort": "low"}, "thinking": {"type": "adaptive"}}
        await client.post(_MESSAGES, json=body, headers=_LOCAL)
    assert text.last_setting["options"] == {"enable_thinking": True, "reasoning_effort": "low"}


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"type": "object"}}}},
            "output_config.format",
        ),
        ({"guided_regex": "[a-z]+"}, "guided_regex"),
        ({"guided_choice": ["a"]}, "guided_choice"),
    ],
)
async def test_a_form_and_a_beginning_exclude_each_other(
    serving: Serving, autojump_clock: trio.testing.MockClock, fields: Any, named: str
) -> None:
    """An answer that goes on with the assistant's words would begin its form anew."""
    messages = [*_ASK["messages"], {"role": "assistant", "content": "{"}]  # type: ignore[misc]
    async with serving() as (client, _):
        body = {**_ASK, "messages": messages, **fields}
        answer = await client.post(_MESSAGES, json=body, headers=_LOCAL)
        error = (await answer.get_json())["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(named)


_LONG = "x" * 1_000_000


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "a", "previous_response_id": _LONG}),
        ("/v1/responses", {"input": [{"type": "item_reference", "id": _LONG}]}),
        ("/v1/responses", {"input": "a", "metadata": {_LONG: "a"}}),
        ("/v1/responses", {"input": "a", "tools": [{"type": _LONG}]}),
        ("/v1/chat/completions", {**_ASK, "logit_bias": {_LONG: 1}}),
        ("/v1/chat/completions", {**_ASK, "chat_template_kwargs": {_LONG + "-": 1}}),
        ("/v1/chat/completions", {"messages": [{"role": _LONG, "content": "a"}]}),
        ("/v1/messages", {**_ASK, "tools": [{"name": "a", "type": _LONG}]}),
        ("/v1/completions", {"prompt": "a", "guided_regex": "(" + _LONG[:900]}),
    ],
)
async def test_an_error_repeats_little(
    serving: Serving, autojump_clock: trio.testing.MockClock, path: str, body: Any
) -> None:
    """However long what a caller sent is, its error is short."""
    async with serving() as (client, _):
        answer = await client.post(path, json=body, headers=_LOCAL)
        raw = await answer.get_data(as_text=False)
    assert answer.status_code == 400
    assert len(raw) < 1200
    assert raw.count(b"x") < 450


_HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nContent-Type: application/json\r\n"


@pytest.mark.parametrize(
    ("sent", "status", "anthropic"),
    [
        (_HEAD + b"Host: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400, False),
        (_HEAD + b"Host: a\r\nContent-Length: -5\r\n\r\n", 400, False),
        (_HEAD + b"Content-Length: 2\r\n\r\n{}", 400, False),
        (b"nonsense\r\n\r\n", 400, False),
        (_HEAD + b"Host: a\r\nX: " + b"x" * 200_000, 431, False),
        (_HEAD + b"Host: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", 400, False),
        (
            b"POST /v1/messages HTTP/1.1\r\nContent-Type: application/json\r\nHost: localhost\r\n"
            b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
            400,
            True,
        ),
    ],
)
async def test_broken_http_gets_json(
    autojump_clock: trio.testing.MockClock, sent: bytes, status: int, anthropic: bool
) -> None:
    """What is no HTTP is refused in the same words as what is no request."""
    async with _connected() as (client, _, _):
        await client.send_all(sent)
        answer = b""
        while part := await client.receive_some(65536):
            answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    assert b"x-request-id: req-" in head.lower()
    told = json.loads(body)
    assert told["error"]["type"] == "invalid_request_error"
    assert told["error"]["message"]
    assert ("request_id" in told) is anthropic


async def test_a_body_that_does_not_come_is_told_so(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A 408 speaks to a program, not to somebody at a browser."""
    async with _connected() as (client, _, _):
        await client.send_all(_HEAD + b"Host: localhost\r\nContent-Length: 5\r\n\r\n{")
        answer = await client.receive_some(65536)
        while part := await client.receive_some(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 408 ")
    assert b"browser" not in answer
    assert b'"message":"the body did not arrive in time' in answer
