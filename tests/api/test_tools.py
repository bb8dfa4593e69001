"""Tools, forms and thoughts over fake lanes: shapes of calls, what is enforced, what is refused."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import trio.testing
from tests.api.conftest import Serving, read_stream
from tests.fakes import END, WORD_BASE, FakeText

from paceline.lanes.base import Row
from paceline.runtime.dialect import Dialect

_CHAT = "/v1/chat/completions"
_ASK = [{"role": "user", "content": "hello"}]
_LOCAL = {"Host": "localhost"}
_LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look at something.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    },
}
_SEE = {"type": "function", "function": {"name": "see"}}
_CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "a \\"b\\""}}\n</tool_call>'
_ARGUMENTS = '{"at": "a \\"b\\""}'
_THINKS = Dialect(think_open="<think>", think_close="</think>", opens=60, closes=(62,))


def says(text: str) -> Callable[[Row], int]:
    """Return a script that says a text, byte by byte, and ends."""

    def script(row: Row) -> int:
        at = len(row.generated)
        return text.encode()[at] if at < len(text.encode()) else END

    return script


async def ask(client: Any, **fields: Any) -> Any:
    answer = await client.post(_CHAT, json={"messages": _ASK, **fields}, headers=_LOCAL)
    return answer.status_code, await answer.get_json()


async def chunks(client: Any, **fields: Any) -> list[Any]:
    body = {"messages": _ASK, "stream": True, **fields}
    raw = await read_stream(client, _CHAT, body)
    assert raw.endswith(b"data: [DONE]\n\n")
    lines = [line[6:] for line in raw.split(b"\n\n") if line.startswith(b"data: {")]
    return [json.loads(line)["choices"][0] for line in lines]


def joined(choices: list[Any]) -> tuple[str, str, list[dict[str, Any]], str]:
    """Put a stream together as strict clients do."""
    content, thought, finish = "", "", ""
    calls: list[dict[str, Any]] = []
    for choice in choices:
        delta = choice["delta"]
        content += delta.get("content") or ""
        thought += delta.get("reasoning_content") or ""
        for call in delta.get("tool_calls") or []:
            if "id" in call:
                assert call["index"] == len(calls)
                assert call["type"] == "function"
                calls.append({"id": call["id"], "name": call["function"]["name"], "arguments": ""})
            else:
                assert "name" not in call["function"]
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return content, thought, calls, finish


async def test_a_call_is_read_from_what_the_model_says(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Content before it, an id, a name, arguments as JSON text, and the finish says so."""
    async with serving(says("I look. " + _CALL)) as (client, _):
        _, body = await ask(client, tools=[_LOOK])
        streamed = joined(await chunks(client, tools=[_LOOK]))
    (choice,) = body["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["message"]["content"] == "I look. "
    assert call["id"].startswith("call_")
    assert call["type"] == "function"
    assert call["function"] == {"name": "look", "arguments": _ARGUMENTS}
    assert choice["finish_reason"] == "tool_calls"
    content, _, calls, finish = streamed
    assert (content, finish) == ("I look. ", "tool_calls")
    assert [(c["name"], c["arguments"]) for c in calls] == [("look", _ARGUMENTS)]
    assert calls[0]["id"] != call["id"]


async def test_arguments_stream_in_pieces(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Arguments come while the model writes them, not all at the end."""
    async with serving(says(_CALL)) as (client, _):
        pieces = [
            call
            for choice in await chunks(client, tools=[_LOOK])
            for call in choice["delta"].get("tool_calls") or []
        ]
    assert len(pieces) > 10
    assert [("id" in piece) for piece in pieces].count(True) == 1


async def test_several_calls_or_just_one(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """All calls of an answer are told; without parallel calls it ends behind the first."""
    async with serving(says(f"{_CALL}\n{_CALL}\n")) as (client, place):
        _, both = await ask(client, tools=[_LOOK])
        _, one = await ask(client, tools=[_LOOK], parallel_tool_calls=False)
        await trio.sleep(1)
        assert place.open_rows == set()
    message = both["choices"][0]["message"]
    assert message["content"] is None
    assert len(message["tool_calls"]) == 2
    assert len({call["id"] for call in message["tool_calls"]}) == 2
    assert len(one["choices"][0]["message"]["tool_calls"]) == 1
    assert one["choices"][0]["finish_reason"] == "tool_calls"
    assert one["usage"]["completion_tokens"] < both["usage"]["completion_tokens"]


async def test_a_call_that_is_cut_off_does_not_count(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A budget that ends inside the arguments is `length`, whatever was streamed of them."""
    async with serving(says(_CALL)) as (client, _):
        _, body = await ask(client, tools=[_LOOK], max_tokens=len(_CALL) - 20)
    assert body["choices"][0]["finish_reason"] == "length"


async def test_what_is_no_call_stays_text(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Broken calls, and any without tools or with tool_choice none, are shown as they stand."""
    broken = "<tool_call>\nlook at it\n</tool_call>"
    async with serving(says(broken)) as (client, _):
        _, body = await ask(client, tools=[_LOOK])
    assert body["choices"][0]["message"]["content"] == broken
    assert body["choices"][0]["finish_reason"] == "stop"
    for fields in ({}, {"tools": [_LOOK], "tool_choice": "none"}):
        async with serving(says(_CALL)) as (client, _):
            _, body = await ask(client, **fields)
        assert body["choices"][0]["message"]["content"] == _CALL
        assert "tool_calls" not in body["choices"][0]["message"]
        assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("choice", "name"),
    [
        ("required", "look"),
        ({"type": "function", "function": {"name": "see"}}, "see"),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "see"}}],
                },
            },
            "see",
        ),
    ],
)
async def test_a_call_can_be_enforced(
    serving: Serving, autojump_clock: trio.testing.MockClock, choice: Any, name: str
) -> None:
    """A model that would rather talk calls what it must, in the form it must."""
    async with serving(says("No, I would rather talk.")) as (client, place):
        _, body = await ask(client, tools=[_LOOK, _SEE], tool_choice=choice)
        streamed = joined(await chunks(client, tools=[_LOOK, _SEE], tool_choice=choice))
        assert place.house.text.last_setting["lead"] == "<tool_call>\n"  # type: ignore[attr-defined]
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert call["function"]["name"] in (name, "see" if choice == "required" else name)
    assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    content, _, calls, finish = streamed
    assert (content, finish) == ("", "tool_calls")
    assert [c["name"] for c in calls] == [call["function"]["name"]]


async def test_only_allowed_tools_are_shown(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Tools that may not be called cost no prompt."""
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "see"}}],
        },
    }
    async with serving(says("ok")) as (client, _):
        _, both = await ask(client, tools=[_LOOK, _SEE])
        _, some = await ask(client, tools=[_LOOK, _SEE], tool_choice=allowed)
        _, none = await ask(client, tools=[_LOOK, _SEE], tool_choice="none")
    sizes = [body["usage"]["prompt_tokens"] for body in (both, some, none)]
    assert sizes == sorted(set(sizes), reverse=True)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "go"}}}, "tool_choice"),
        ({"tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [_LOOK, _SEE, _LOOK]}, "tools[2].function.name"),
        (
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"guided_regex": "(", "tools": None}, "guided_regex"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"not": {}}},
                },
                "tools": None,
            },
            "response_format.json_schema.schema",
        ),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name(
    serving: Serving, autojump_clock: trio.testing.MockClock, fields: Any, param: str
) -> None:
    """Contradictions, unknown functions and schemas that cannot be enforced are 400."""
    tools = [] if fields == {"tool_choice": "required"} else [_LOOK]
    async with serving() as (client, _):
        status, body = await ask(client, **{"tools": tools, **fields})
    assert status == 400
    assert body["error"]["param"] == param
    assert body["error"]["type"] == "invalid_request_error"


async def test_a_strict_tool_binds_a_free_call(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A model that calls a strict tool of its own accord writes arguments of its schema."""
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    strict = {"type": "function", "function": {"name": "add", "strict": True, "parameters": schema}}
    wrong = 'so <tool_call>\n{"name": "add", "arguments": {"n": "seven"}}\n</tool_call>'
    async with serving(says(wrong)) as (client, _):
        _, body = await ask(client, tools=[strict], max_tokens=80)
    message = body["choices"][0]["message"]
    assert message["content"].startswith("so ")
    arguments = json.loads(message["tool_calls"][0]["function"]["arguments"])
    assert isinstance(arguments["n"], int)


@pytest.mark.parametrize(
    ("fields", "check"),
    [
        ({"response_format": {"type": "json_object"}}, lambda t: isinstance(json.loads(t), dict)),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"enum": ["a", "b"]}},
                }
            },
            lambda t: json.loads(t) in ("a", "b"),
        ),
        ({"guided_json": {"type": "boolean"}}, lambda t: isinstance(json.loads(t), bool)),
        ({"guided_regex": "[a-c]{3}"}, lambda t: len(t) == 3 and set(t) <= set("abc")),
        ({"guided_choice": ["yes", "no"]}, lambda t: t in ("yes", "no")),
        ({"guided_grammar": 'start: "x" "y"'}, lambda t: t == "xy"),
    ],
)
async def test_forms_are_kept(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    fields: Any,
    check: Callable[[str], bool],
) -> None:
    """A model that says something else is held to the form, in both completion routes."""
    async with serving(says("Sure! Here it is:")) as (client, _):
        _, body = await ask(client, **fields)
        (choice,) = body["choices"]
        assert check(choice["message"]["content"])
        assert choice["finish_reason"] == "stop"
        if "response_format" not in fields:
            legacy = {"prompt": "a", "max_tokens": 60, **fields}
            answer = await client.post("/v1/completions", json=legacy, headers=_LOCAL)
            assert check((await answer.get_json())["choices"][0]["text"])


async def test_a_form_beside_tools_allows_either(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """With tools at hand an answer has its form or is a call."""
    fields = {"tools": [_LOOK], "response_format": {"type": "json_object"}}
    async with serving(says(_CALL)) as (client, _):
        _, body = await ask(client, **fields)
    assert body["choices"][0]["finish_reason"] == "tool_calls"
    async with serving(says('{"a":1}')) as (client, _):
        _, body = await ask(client, **fields)
    assert body["choices"][0]["message"]["content"] == '{"a":1}'


async def test_thoughts_are_told_apart(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Reasoning has its own field and its own count, streamed or whole, and no stop ends it."""
    said = "<think>\nhm END hm\n</think>\n\nYes END no"
    text = FakeText(_THINKS, "free")
    async with serving(says(said), text=text) as (client, _):
        _, body = await ask(client, stop="END", logprobs=True)
        content, thought, _, finish = joined(await chunks(client, stop="END"))
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm END hm", "Yes ")
    assert (thought, content, finish) == ("hm END hm", "Yes ", "stop")
    details = body["usage"]["completion_tokens_details"]
    assert details["reasoning_tokens"] == said.index("</think>") + len("</think>") - len("<think>")


async def test_a_thought_that_the_prompt_began(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Where the template opens the thought, the answer begins inside it."""
    text = FakeText(_THINKS, "begun")
    async with serving(says("so</think>Yes"), text=text) as (client, _):
        _, body = await ask(client)
    message = body["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "Yes")


async def test_a_form_waits_for_the_thought(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A model that thinks thinks freely and then keeps the form."""
    text = FakeText(_THINKS, "begun")
    async with serving(says("free words</think>more"), text=text) as (client, _):
        _, body = await ask(client, guided_choice=["yes", "no"])
    message = body["choices"][0]["message"]
    assert message["reasoning_content"] == "free words"
    assert message["content"] in ("yes", "no")


async def test_effort_reaches_templates_that_think(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """reasoning_effort none turns thinking off where there is any, and template variables pass."""
    text = FakeText(_THINKS, "free")
    async with serving(says("ok"), text=text) as (client, _):
        await ask(client, reasoning_effort="none", chat_template_kwargs={"mood": "good"})
    options = text.last_setting["options"]
    assert options == {"mood": "good", "enable_thinking": False, "reasoning_effort": "none"}
    plain = FakeText()
    async with serving(says("ok"), text=plain) as (client, _):
        await ask(client, reasoning_effort="high")
    assert plain.last_setting["options"] == {}


async def test_log_probabilities_are_those_of_the_content(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Tokens of thoughts and calls have none; those of the content spell it."""
    said = f"<think>hm</think>Look: {_CALL}"
    text = FakeText(_THINKS, "free")
    async with serving(says(said), text=text) as (client, _):
        _, body = await ask(client, tools=[_LOOK], logprobs=True)
        streamed = await chunks(client, tools=[_LOOK], logprobs=True)
    entries = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "Look: "
    pieces = [e for c in streamed if c["logprobs"] for e in c["logprobs"]["content"]]
    assert pieces == entries


async def test_the_best_of_several(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """The likeliest of best_of are answered with, best first; all are billed."""
    body = {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, "best_of": 4}

    def script(row: Row) -> int:
        return WORD_BASE + int(row.key[-1])  # the fakes like some rows' words better than others

    async with serving(script, scheduler_mode="ar_batch") as (client, _):
        answer = await client.post("/v1/completions", json=body, headers=_LOCAL)
        found = await answer.get_json()
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in found["choices"])
    assert [choice["text"] for choice in found["choices"]] == [f" w{n}" * 4 for n in (1, 2, 4, 5)]
    assert found["usage"]["completion_tokens"] == 2 * 4 * 4
