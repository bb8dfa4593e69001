"""/v1/messages over fake lanes: blocks and events in order, errors in Anthropic's words."""

import json
from typing import Any

import pytest
import trio.testing
from tests.api.conftest import Serving, named_events, read_stream
from tests.api.test_tools import _ARGUMENTS, _CALL, _LOCAL, _THINKS, says
from tests.fakes import FakeText, Nature

_PATH = "/v1/messages"
_ASK = [{"role": "user", "content": "hello"}]
_LOOK = {
    "name": "look",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}


async def ask(client: Any, /, path: str = _PATH, **fields: Any) -> Any:
    body = {"messages": _ASK, "max_tokens": 200, **fields}
    answer = await client.post(path, json=body, headers=_LOCAL)
    return answer.status_code, await answer.get_json()


async def events(client: Any, **fields: Any) -> list[Any]:
    """Return a stream's events, each under its own name."""
    body = {"messages": _ASK, "max_tokens": 200, "stream": True, **fields}
    return named_events(await read_stream(client, _PATH, body))


async def test_an_answer_is_a_message(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A whole answer has Anthropic's shape, and input counts what was computed."""
    async with serving(says("Hi there"), nature=None) as (client, _):
        status, body = await ask(client, path=_PATH + "?beta=true", system="Be brief.")
    assert status == 200
    assert (body["type"], body["role"]) == ("message", "assistant")
    assert body["content"] == [{"type": "text", "text": "Hi there"}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    assert body["usage"]["input_tokens"] == len("system:Be brief.\nuser:hello\n")
    assert body["usage"]["output_tokens"] == len("Hi there") + 1
    assert body["id"].startswith("msg_")


async def test_blocks_come_in_order(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Thought, text, call: each block begins, grows and stops before the next."""
    said = f"<think>hm</think>Look.{_CALL}"
    text = FakeText(_THINKS, "free")
    async with serving(says(said), text=text) as (client, _):
        found = await events(client, tools=[_LOOK])
        _, whole = await ask(client, tools=[_LOOK])
    kinds = [(event["type"], event.get("index")) for event in found]
    runs = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    assert runs == [
        ("message_start", None),
        *[
            (f"content_block_{part}", index)
            for index in range(3)
            for part in ("start", "delta", "stop")
        ],
        ("message_delta", None),
        ("message_stop", None),
    ]
    begun = [e["content_block"]["type"] for e in found if e["type"] == "content_block_start"]
    assert begun == ["thinking", "text", "tool_use"]
    deltas = [event["delta"] for event in found if event["type"] == "content_block_delta"]
    assert "".join(d.get("thinking", "") for d in deltas) == "hm"
    assert "".join(d.get("text", "") for d in deltas) == "Look."
    assert "".join(d.get("partial_json", "") for d in deltas) == _ARGUMENTS
    assert [d["type"] for d in deltas].count("signature_delta") == 1
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]
    assert whole["content"][2]["input"] == json.loads(_ARGUMENTS)
    assert whole["stop_reason"] == "tool_use"


async def test_each_call_is_a_block_of_its_own(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Two calls behind each other are two blocks, each with its own input."""
    async with serving(says(f"{_CALL}\n{_CALL}")) as (client, _):
        found = await events(client, tools=[_LOOK])
    begun = [e["content_block"]["id"] for e in found if e["type"] == "content_block_start"]
    assert len(set(begun)) == 2
    for index in range(2):
        deltas = [e["delta"] for e in found if e.get("index") == index and "delta" in e]
        assert "".join(d["partial_json"] for d in deltas) == _ARGUMENTS


@pytest.mark.parametrize(
    ("arguments", "input"),
    [
        ("{}", {}),
        ('{"a": 1e400}', {"INVALID_JSON": '{"a": 1e400}'}),
        ('{"a": NaN}', {"INVALID_JSON": '{"a": NaN}'}),
        ('{"a": }', {"INVALID_JSON": '{"a": }'}),
        ("{" + '"a":{' * 150 + "}" * 151, {"INVALID_JSON": "{" + '"a":{' * 150 + "}" * 151}),
    ],
)
async def test_input_that_is_no_json_is_shown_and_not_dropped(
    serving: Serving, autojump_clock: trio.testing.MockClock, arguments: str, input: Any
) -> None:
    """A client must see that a call went wrong, and never a call without arguments instead."""
    call = f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>'
    async with serving(says(call)) as (client, _):
        status, body = await ask(client, tools=[_LOOK], max_tokens=2_000)
    assert status == 200
    (block,) = body["content"]
    assert block["type"] == "tool_use"
    assert block["input"] == input
    assert body["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "reason", "stop"),
    [
        ({"max_tokens": 3}, "max_tokens", None),
        ({"stop_sequences": ["w3"]}, "stop_sequence", "w3"),
    ],
)
async def test_how_it_ended(
    serving: Serving, autojump_clock: trio.testing.MockClock, fields: Any, reason: str, stop: Any
) -> None:
    """Budget and stop sequences are told apart, and which sequence it was."""
    async with serving() as (client, _):
        _, body = await ask(client, **fields)
        found = await events(client, **fields)
    assert (body["stop_reason"], body["stop_sequence"]) == (reason, stop)
    assert found[-2]["delta"] == {"stop_reason": reason, "stop_sequence": stop}


async def test_what_came_from_the_bank_is_told_apart(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Input tokens leave out what was cached, and the sum is the prompt."""
    async with serving(nature=Nature(cached=5)) as (client, _):
        _, body = await ask(client, max_tokens=2)
    usage = body["usage"]
    assert usage["cache_read_input_tokens"] == 5
    assert usage["input_tokens"] + 5 == len("user:hello\n")


async def test_a_tool_turn_as_agents_send_it(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """System blocks, instructions between turns, calls, results and thoughts are understood."""
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "system", "content": "s"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "t", "signature": ""},
                {"type": "tool_use", "id": "1", "name": "look", "input": {"at": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "r"}],
                    "is_error": True,
                    "cache_control": {"type": "ephemeral"},
                },
                {"type": "text", "text": "c"},
            ],
        },
    ]
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
        {"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}},
    ]
    fields: dict[str, Any] = {"messages": messages, "system": system, "tools": [_LOOK]}
    extras: dict[str, Any] = {
        "thinking": {"type": "adaptive"},
        "context_management": {"edits": []},
        "output_config": {"effort": "high"},
        "metadata": {"user_id": "u"},
    }
    async with serving(says("ok")) as (client, _):
        status, body = await ask(client, **fields, **extras)
        _, counted = await ask(client, path=_PATH + "/count_tokens", **fields)
    assert status == 200
    wanted = "tool:look\nsystem:S\nuser:a\nb\nsystem:s\nassistant:\ntool:Error:\nr\nuser:c\n"
    assert body["usage"]["input_tokens"] == len(wanted)
    assert counted == {"input_tokens": len(wanted)}


async def test_a_call_can_be_enforced_and_a_format_kept(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """tool_choice and output_config.format bind the model here too."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    formed: dict[str, Any] = {
        "output_config": {"format": {"type": "json_schema", "schema": schema}}
    }
    async with serving(says("no")) as (client, _):
        for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
            _, body = await ask(client, tools=[_LOOK], tool_choice=choice)
            assert body["content"][0]["name"] == "look"
            assert isinstance(body["content"][0]["input"], dict)
        _, body = await ask(client, tools=[_LOOK], tool_choice={"type": "none"})
        assert body["content"][0]["text"] == "no"
        _, body = await ask(client, **formed)
        assert json.loads(body["content"][0]["text"])["a"] == 1


async def test_an_answer_can_go_on_with_the_last_message(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A conversation that ends with the assistant's words is continued, not answered."""
    text = FakeText()
    async with serving(says("ok"), text=text) as (client, _):
        await ask(client)
        assert text.last_setting["go_on"] is False
        await ask(client, messages=[*_ASK, {"role": "assistant", "content": "I say"}])
        assert text.last_setting["go_on"] is True


async def test_thinking_is_the_callers_choice(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Without thinking in the request the template is told not to think."""
    text = FakeText(_THINKS, "over")
    async with serving(says("ok"), text=text) as (client, _):
        await ask(client)
        assert text.last_setting["options"] == {"enable_thinking": False}
        await ask(client, thinking={"type": "enabled", "budget_tokens": 1024})
        assert text.last_setting["options"] == {"enable_thinking": True}


_TEXT = {"type": "text", "text": "t"}
_RESULT = {"type": "tool_result", "tool_use_id": "c", "content": [_TEXT, {"type": "document"}]}
_SAID = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "messages[0].content[0]",
        ),
        (
            {"system": "s", "messages": [*_SAID, {"role": "user", "content": [_RESULT]}]},
            "messages[2].content[0].content[1]: a text model cannot take 'document'",
        ),
        (
            {"messages": [{"role": "user", "content": [_RESULT, {"type": "image"}]}]},
            "messages[0].content[0].content[1]",
        ),
        (
            {"messages": [*_SAID, {"role": "user", "content": [_TEXT, {"type": "image"}]}]},
            "messages[2].content[1]: a text model cannot take 'image'",
        ),
        ({"tools": [{"name": "bash", "type": "bash_20250124"}]}, "tools[0].type"),
        ({"tools": [_LOOK], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tools": [_LOOK, _LOOK]}, "tools[1].name: 'look' is the name of tools[0]"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
    ],
)
async def test_errors_are_in_anthropics_words(
    serving: Serving, autojump_clock: trio.testing.MockClock, fields: Any, named: str
) -> None:
    """Bad input is a 400 with type error, and the message names the field."""
    async with serving() as (client, _):
        status, body = await ask(client, **fields)
    assert status == 400
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert named in body["error"]["message"]


async def test_other_errors_too(serving: Serving, autojump_clock: trio.testing.MockClock) -> None:
    """An over-long prompt, a wrong method, a missing key and a failed row are said so as well."""
    async with serving(context=8) as (client, _):
        status, body = await ask(client)
        assert status == 400
        assert "maximum context length is 8 tokens" in body["error"]["message"]
        wrong = await client.get(_PATH, headers=_LOCAL)
        assert (await wrong.get_json())["type"] == "error"
    async with serving(api_key="k") as (client, _):
        status, body = await ask(client)
        assert (status, body["error"]["type"]) == (401, "authentication_error")
    async with serving(lambda row: -1) as (client, _):
        found = await events(client)
        assert (found[-1]["type"], found[-1]["error"]["type"]) == ("error", "api_error")
        status, body = await ask(client)
        assert (status, body["type"]) == (500, "error")
