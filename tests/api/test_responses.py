"""/v1/responses over fake lanes: items and events in order, what is kept, what is refused."""

import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio.testing
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from tests.api.conftest import Serving, named_events, read_stream
from tests.api.test_tools import _ARGUMENTS, _CALL, _LOCAL, _THINKS, says
from tests.fakes import FakeText

from paceline.api.responses.items import KeptItem
from paceline.api.responses.replies import ResponseReply
from paceline.api.responses.store import ResponseStore
from paceline.api.schemas import UserMessage
from paceline.runtime.errors import UnknownThing

_PATH = "/v1/responses"
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_LOOK = {
    "type": "function",
    "name": "look",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
}

_BAD_FORMAT = {"type": "json_schema", "name": "x", "schema": {"not": {}}}


_SEE = {"type": "function", "name": "see"}
_NO_OBJECT = {"type": "function", "name": "odd", "parameters": {"type": "string"}}


def _space(name: str, *tools: Any) -> Any:
    return {"type": "namespace", "name": name, "tools": list(tools)}


async def ask(client: Any, **fields: Any) -> Any:
    answer = await client.post(_PATH, json={"input": "hello", **fields}, headers=_LOCAL)
    return answer.status_code, await answer.get_json()


async def events(client: Any, **fields: Any) -> list[Any]:
    """Return a stream's events; each must be one of OpenAI's and carry its name."""
    raw = await read_stream(client, _PATH, {"input": "hello", "stream": True, **fields})
    found = named_events(raw)
    for event in found:
        _EVENT.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_an_answer_is_a_response(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A whole answer has OpenAI's shape: a message, its text, its usage."""
    async with serving(says("Hi there")) as (client, _):
        status, body = await ask(client, instructions="Be brief.", metadata={"a": "b"})
    assert status == 200
    Response.model_validate(body)
    (item,) = body["output"]
    assert item["content"][0]["text"] == "Hi there"
    assert (body["status"], body["object"]) == ("completed", "response")
    assert body["usage"]["output_tokens"] == len("Hi there") + 1
    assert body["usage"]["input_tokens"] == len("system:Be brief.\nuser:hello\n")
    assert body["metadata"] == {"a": "b"}


async def test_events_come_in_order(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Thought, text, call: each item begins, grows and ends before the next, then all is said."""
    said = f"<think>hm</think>Look.{_CALL}"
    text = FakeText(_THINKS, "free")
    async with serving(says(said), text=text) as (client, _):
        found = await events(client, tools=[_LOOK])
        _, whole = await ask(client, tools=[_LOOK])
    kinds = [event["type"] for event in found]
    runs = [kind for kind, before in zip(kinds, [None, *kinds], strict=False) if kind != before]
    assert runs == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.completed",
    ]
    added = [event["item"] for event in found if event["type"] == "response.output_item.added"]
    assert [item["type"] for item in added] == ["reasoning", "message", "function_call"]
    assert (added[0]["content"], added[1]["content"], added[2]["arguments"]) == ([], [], "")
    assert all(item["status"] == "in_progress" for item in added)
    final = found[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message", "function_call"]
    assert final["output"][2]["arguments"] == _ARGUMENTS
    joined = "".join(e["delta"] for e in found if e["type"].endswith("arguments.delta"))
    assert joined == _ARGUMENTS
    deltas = [e for e in found if e["type"].endswith("arguments.delta")]
    assert {e["item_id"] for e in deltas} == {final["output"][2]["id"]}
    assert {e["output_index"] for e in deltas} == {2}
    assert final["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
    for mine, other in zip(final["output"], whole["output"], strict=True):
        assert {**mine, "id": 0, "call_id": 0} == {**other, "id": 0, "call_id": 0}


async def test_a_cut_answer_is_incomplete(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A budget that ends an answer is said so, streamed or whole."""
    async with serving() as (client, _):
        _, body = await ask(client, max_output_tokens=3)
        found = await events(client, max_output_tokens=3)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert found[-1]["type"] == "response.incomplete"
    assert found[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_a_failure_ends_a_stream_as_failed(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A row that fails ends its stream with response.failed, and a whole answer with an error."""
    async with serving(lambda row: -1) as (client, _):
        found = await events(client)
        status, body = await ask(client)
    assert found[-1]["type"] == "response.failed"
    assert found[-1]["response"]["error"]["code"] == "server_error"
    assert status == 500
    assert body["error"]["code"] == "row_failed"


async def test_a_failure_leaves_no_item_open(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """What grew when a row failed is told as incomplete, and what was over before as completed."""
    said = f"<think>hm</think>Look.{_CALL[:30]}"
    for cut in ("<think>h", "<think>hm</think>Lo", said):
        script = says(cut)
        text = FakeText(_THINKS, "free")

        def fails(row: Any, script: Any = script, cut: str = cut) -> int:
            return -1 if len(row.generated) >= len(cut) else int(script(row))

        async with serving(fails, text=text) as (client, _):
            found = await events(client, tools=[_LOOK])
        opened = [e["item"]["id"] for e in found if e["type"] == "response.output_item.added"]
        over = [e["item"] for e in found if e["type"] == "response.output_item.done"]
        assert found[-1]["type"] == "response.failed"
        assert found[-2]["type"] == "response.output_item.done"
        assert [item["id"] for item in over] == opened
        assert found[-1]["response"]["output"] == over
        *before, last = [item["status"] for item in over]
        assert last == "incomplete"
        assert set(before) <= {"completed"}


async def test_a_conversation_goes_on_by_its_id(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """The next turn sees what was said before, but not the instructions of that time."""
    async with serving(says("Hi")) as (client, _):
        _, first = await ask(client, instructions="Be brief.")
        _, second = await ask(client, input="again", previous_response_id=first["id"])
        _, shown = await ask(client, input="more", previous_response_id=second["id"], store=False)
        wanted = "user:hello\nassistant:Hi\nuser:again\n"
        assert second["usage"]["input_tokens"] == len(wanted)
        assert second["previous_response_id"] == first["id"]
        assert shown["store"] is False
        kept = await client.get(f"{_PATH}/{second['id']}", headers=_LOCAL)
        assert (await kept.get_json())["id"] == second["id"]
        gone = await client.get(f"{_PATH}/{shown['id']}", headers=_LOCAL)
        assert gone.status_code == 404
        deleted = await client.delete(f"{_PATH}/{second['id']}", headers=_LOCAL)
        assert (await deleted.get_json())["deleted"] is True
        status, body = await ask(client, previous_response_id=second["id"])
    assert status == 400
    assert body["error"]["param"] == "previous_response_id"


async def test_a_tool_turn_as_agents_send_it(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Calls and their results, thoughts, parts, namespaces and untold tools are understood."""
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "d"}]},
        {"role": "user", "content": "u"},
        {"type": "reasoning", "summary": [], "encrypted_content": "x"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}", "id": "fc"},
        {"type": "function_call_output", "call_id": "c", "output": "seen"},
    ]
    tools = [
        {"type": "namespace", "name": "team", "tools": [_LOOK]},
        {"type": "web_search", "external_web_access": False},
    ]
    async with serving(says(_CALL)) as (client, _):
        status, body = await ask(client, input=items, tools=tools, store=False)
    assert status == 200
    assert body["usage"]["input_tokens"] == len(
        "tool:look\nsystem:d\nuser:u\nassistant:\ntool:seen\n"
    )
    assert body["output"][0]["namespace"] == "team"


async def test_a_call_can_be_enforced_and_a_format_kept(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """tool_choice and text.format bind the model here too."""
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
    strict = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    async with serving(says("no")) as (client, _):
        _, called = await ask(
            client, tools=[_LOOK], tool_choice={"type": "function", "name": "look"}
        )
        _, formed = await ask(client, text=strict, max_output_tokens=80)
    assert called["output"][0]["name"] == "look"
    assert json.loads(formed["output"][0]["content"][0]["text"])["a"] == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "message", "role": "boss", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].id"),
        ({"input": [{"id": "x"}]}, "input[0].id"),
        ({"input": [{"type": "web_search_call", "id": "x"}]}, "input[0].type"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input[0].content[0]",
        ),
        ({"tools": [{"type": "computer"}]}, "tools[0].type"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tools": [{"type": "web_search"}, _LOOK, _LOOK]}, "tools[2].name"),
        ({"tools": [_LOOK, _space("a", _LOOK)]}, "tools[1].tools[0].name"),
        ({"tools": [_space("a", _SEE), _space("b", _LOOK, _SEE)]}, "tools[1].tools[1].name"),
        (
            {"tools": [{"type": "web_search"}, _space("a", _LOOK, _NO_OBJECT)]},
            "tools[1].tools[1].parameters",
        ),
        ({"background": True}, "background"),
        ({"n": 2}, "n"),
        ({"truncation": "auto"}, "truncation"),
        (
            {"text": {"format": _BAD_FORMAT}},
            "text.format.schema",
        ),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"previous_response_id": "resp_none"}, "previous_response_id"),
    ],
)
async def test_what_cannot_be_is_refused_by_its_name(
    serving: Serving, autojump_clock: trio.testing.MockClock, fields: Any, param: str
) -> None:
    """Bad items, foreign tools and what is not served are 400 and name this route's field."""
    async with serving() as (client, _):
        status, body = await ask(client, **fields)
    assert status == 400
    assert body["error"]["param"] == param
    assert body["error"]["message"].startswith(param)


def _reply(number: int, **fields: Any) -> ResponseReply:
    return ResponseReply(id=f"resp_{number}", created_at=0, model="m", status="completed", **fields)


def test_the_store_is_bounded() -> None:
    """The least recently used goes first, by number and by size; the rest is still there."""
    store = ResponseStore(most=3)
    for number in range(3):
        store.put(_reply(number), [UserMessage("x")])
    store.get("resp_0")
    store.put(_reply(3), [UserMessage("x")])
    with pytest.raises(UnknownThing):
        store.get("resp_1")
    assert store.find("y", "resp_0").decoded()[1] == (UserMessage("x"),)


_WORD = "y" * 600


@pytest.mark.parametrize(
    "kept",
    [
        lambda number: (_reply(number), [UserMessage(_WORD)]),
        lambda number: (_reply(number, metadata={"k": _WORD}), []),
        lambda number: (_reply(number, tools=[{"type": "web_search", "x": _WORD}]), []),
        lambda number: (_reply(number, instructions=_WORD), []),
        lambda number: (_reply(number), [], [KeptItem(f"m{number}", True, _WORD[:500].encode())]),
        lambda number: (_reply(number), [], [KeptItem("m", False, b"")] * 5),
        lambda number: (_reply(number), [], [], [[(1, 0)] * (len(_WORD) // 64 + 1)]),
    ],
)
def test_all_of_a_response_counts(kept: Callable[[int], Any]) -> None:
    """Whatever is kept of a response is counted, and what is forgotten is not any more."""
    size = len(msgspec.json.encode(_reply(0))) + len(_WORD) + 100
    store = ResponseStore(most_bytes=2 * size)
    for number in range(4):
        store.put(*kept(number))
    for number in (0, 1):
        with pytest.raises(UnknownThing):
            store.get(f"resp_{number}")
    store.get("resp_2")
    store.drop("resp_2")
    store.put(*kept(5))
    store.get("resp_3")
    too_large = kept(9)
    too_large[0].instructions = 2 * size * "z"
    store.put(*too_large)
    assert not too_large[0].store
    with pytest.raises(UnknownThing):
        store.get("resp_9")
    store.get("resp_3")
