"""What is kept of a response: its items by reference, its input in pages, its events once more."""

import json
from typing import Any

import pytest
import trio.testing
from openai.pagination import SyncCursorPage
from openai.types.responses import ResponseItem
from openai.types.responses.input_token_count_response import InputTokenCountResponse
from tests.api.conftest import Serving, named_events, read_stream
from tests.api.test_responses import _LOOK, _PATH, ask
from tests.api.test_tools import _CALL, _LOCAL, _THINKS, says
from tests.fakes import FakeText

from paceline.api import offload
from paceline.api.anthropic import route as messages_route
from paceline.api.responses import route, store
from paceline.api.responses.items import KeptItem, listed, messages_of
from paceline.api.responses.replies import ResponseReply
from paceline.api.responses.store import MOST_REFERENCES, MOST_REFERRED, ResponseStore
from paceline.api.schemas import AssistantMessage
from paceline.runtime.errors import CallerError


async def get(client: Any, path: str) -> Any:
    answer = await client.get(f"{_PATH}/{path}", headers=_LOCAL)
    return answer.status_code, await answer.get_json()


async def test_an_item_can_be_referred_to(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A reference is the same as the item: of an output, of an input, with or without its type."""
    async with serving(says(f"Look.{_CALL}")) as (client, _):
        _, first = await ask(client, tools=[_LOOK])
        _, page = await get(client, f"{first['id']}/input_items")
        items = [*page["data"], *first["output"]]
        output = {"type": "function_call_output", "call_id": items[-1]["call_id"], "output": "x"}
        references = [{"type": "item_reference", "id": item["id"]} for item in items]
        counts = []
        for given in (items, references, [{"id": item["id"]} for item in items]):
            status, body = await ask(client, input=[*given, output], tools=[_LOOK])
            assert status == 200
            counts.append(body["usage"]["input_tokens"])
        await client.delete(f"{_PATH}/{first['id']}", headers=_LOCAL)
        unknown = [{"type": "item_reference", "id": "x" * 1_000_000}]
        status, body = await ask(client, input=unknown)
    assert len(set(counts)) == 1
    assert (status, body["error"]["param"]) == (400, "input[0].id")
    assert len(json.dumps(body)) < 600


async def test_an_item_is_referred_to_once(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A few bytes stand for no more than one text, and only what is referred to is decoded."""
    decoded: list[bytes] = []

    class Counted:
        @staticmethod
        def decode(raw: bytes) -> Any:
            decoded.append(raw)
            return json.loads(raw)

    monkeypatch.setattr(store, "_ITEM", Counted)
    given = [{"role": "user", "content": f"{n}"} for n in range(20)]
    async with serving(says("ok")) as (client, _):
        _, first = await ask(client, input=given)
        _, page = await get(client, f"{first['id']}/input_items")
        references = [{"type": "item_reference", "id": item["id"]} for item in page["data"]]
        status, _ = await ask(client, input=references[:3])
        twice, body = await ask(client, input=[*references, references[3]])
    assert status == 200
    assert list(map(json.loads, decoded)) == page["data"][:3]
    assert (twice, body["error"]["param"]) == (400, "input[20].id")


def _kept(number: int, items: tuple[KeptItem, ...]) -> ResponseStore:
    made = ResponseStore()
    reply = ResponseReply(id=f"resp_{number}", created_at=0, model="m", status="completed")
    made.put(reply, [], items)
    return made


def test_references_are_bounded() -> None:
    """By their number and by the bytes they stand for, before anything is decoded."""
    text = json.dumps({"text": "x" * (MOST_REFERRED // 4)}).encode()
    made = _kept(0, tuple(KeptItem(f"msg_{n}", True, text) for n in range(5)))
    four = [{"type": "item_reference", "id": f"msg_{n}"} for n in range(4)]
    assert made.find(four[:3], None).size == 3 * len(text)
    with pytest.raises(CallerError) as refused:
        made.find(four, None)
    assert refused.value.param == "input[3].id"
    with pytest.raises(CallerError) as refused:
        made.find([{"type": "item_reference", "id": "msg_0"}] * (MOST_REFERENCES + 1), None)
    assert refused.value.param == "input"
    assert str(MOST_REFERENCES) in refused.value.message


@pytest.mark.parametrize(
    "item",
    [
        {"role": "user", "content": "u"},
        {"role": "user", "content": [{"type": "input_text", "text": "u"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "o"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "text", "text": "o"}]},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "t"}]},
    ],
)
def test_what_nobody_knows_is_not_kept(item: Any) -> None:
    """Fields beside those of an item and of its pieces are dropped; the rest stays."""
    junk = {"junk": "x" * 100_000, "annotations": [["x" * 100_000]], "id": ["x" * 100_000]}
    full = {**item, **junk, "status": "x" * 100_000}
    for name in ("content", "output", "summary"):
        if isinstance(item.get(name), list):
            full[name] = [{**piece, **junk} for piece in item[name]]
    (kept,) = listed([full], "1")
    assert len(kept.raw) < 300
    assert kept.made
    (bare,) = listed([item], "1")
    assert kept.raw == bare.raw
    assert messages_of([json.loads(kept.raw)]) or item.get("type") == "reasoning"


async def test_an_id_that_a_caller_chose_is_its_conversations_own(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Another's item cannot be read by an id that may be guessed; its own conversation finds it."""
    reference = [{"type": "item_reference", "id": "msg_1"}]
    async with serving(says("ok")) as (client, _):
        _, one = await ask(client, input=[{"role": "user", "content": "secret", "id": "msg_1"}])
        _, two = await ask(client, previous_response_id=one["id"])
        _, other = await ask(client)
        answers = [
            await ask(client, input=reference, **more)
            for more in (
                {},
                {"previous_response_id": other["id"]},
                {"previous_response_id": one["id"]},
                {"previous_response_id": two["id"]},
            )
        ]
        _, own = await ask(client, input=[{"role": "user", "content": "mine", "id": "msg_1"}])
        mine = await ask(client, input=reference, previous_response_id=own["id"])
    assert [status for status, _ in answers] == [400, 400, 200, 200]
    assert answers[0][1]["error"]["code"] == "item_not_found"
    assert mine[1]["usage"]["input_tokens"] == len("user:mine\nassistant:ok\nuser:mine\n")


async def test_what_is_referred_to_is_decoded_off_the_event_loop(
    serving: Serving, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A short body that stands for a long text is long work, by reference or by conversation."""
    long: list[bool] = []
    at_length = offload.at_length

    async def watched(work: Any, is_long: bool, *queue: Any) -> Any:
        long.append(is_long)
        return await at_length(work, is_long, *queue)

    monkeypatch.setattr(route, "at_length", watched)
    async with serving(says("ok"), context=200_000) as (client, _):
        _, first = await ask(client, input=[{"role": "user", "content": "x" * 70_000}])
        _, page = await get(client, f"{first['id']}/input_items")
        await ask(client)
        await ask(client, input=[{"type": "item_reference", "id": page["data"][0]["id"]}])
        await ask(client, previous_response_id=first["id"])
    assert long == [True, False, True, True]


@pytest.mark.parametrize("path", ["/v1/chat/completions", _PATH, "/v1/messages"])
async def test_more_messages_than_tokens_are_refused_before_work_on_them(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
) -> None:
    """Each needs a token, so their number alone says that they do not fit."""

    def worked(*_: Any, **__: Any) -> Any:
        raise AssertionError("work on messages that cannot fit")

    said = [{"role": "user", "content": ""}] * 101
    name = "input" if path == _PATH else "messages"
    async with serving(says("ok"), context=100, text=FakeText()) as (client, place):
        monkeypatch.setattr(route, "understood", worked)
        monkeypatch.setattr(messages_route, "understood", worked)
        monkeypatch.setattr(place.house.text, "chat", worked)
        sent = {"max_tokens": 1} if path == "/v1/messages" else {}
        answer = await client.post(path, json={name: said, **sent}, headers=_LOCAL)
        body = await answer.get_json()
    assert answer.status_code == 400
    assert "more than 100 tokens" in body["error"]["message"]


@pytest.mark.parametrize("kind", ["input_image", "input_file"])
@pytest.mark.parametrize("result", [False, True])
async def test_an_image_is_named_by_the_item_it_stands_in(
    serving: Serving, autojump_clock: trio.testing.MockClock, kind: str, result: bool
) -> None:
    """By its place in the input, whatever stands before it in the conversation."""
    parts = [{"type": "input_text", "text": "a"}, {"type": kind}]
    item: Any = {"role": "user", "content": parts}
    if result:
        item = {"type": "function_call_output", "call_id": "c", "output": parts}
    thought = {"type": "reasoning", "summary": []}
    async with serving(says("ok")) as (client, _):
        _, first = await ask(client)
        more = {"instructions": "be brief", "previous_response_id": first["id"]}
        status, body = await ask(client, input=[thought, item], **more)
    named = "input[1].output[1]" if result else "input[1].content[1]"
    assert (status, body["error"]["param"]) == (400, named)
    assert kind in body["error"]["message"]


async def test_an_input_is_listed_in_pages(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Items have ids and OpenAI's shape, newest first; pages follow each other."""
    given = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "d"},
        {"type": "reasoning", "id": "rs_1", "summary": []},
        {"role": "user", "content": [{"type": "input_text", "text": "e"}]},
    ]
    async with serving(says("ok")) as (client, _):
        _, body = await ask(client, input=given)
        path = f"{body['id']}/input_items"
        _, newest = await get(client, path)
        _, oldest = await get(client, path + "?order=asc&limit=2")
        _, rest = await get(client, f"{path}?order=asc&after={oldest['last_id']}")
        for query in ("limit=0", "limit=x", "limit=101", "order=up", "after=none"):
            status, wrong = await get(client, f"{path}?{query}")
            assert (status, wrong["error"]["param"]) == (400, query.partition("=")[0])
        assert (await get(client, "resp_none/input_items"))[0] == 404
    page: Any = SyncCursorPage[ResponseItem].model_validate(newest)
    assert page.data[0].type == "message"
    assert newest["data"] == [*oldest["data"], *rest["data"]][::-1]
    assert (oldest["has_more"], rest["has_more"]) == (True, False)
    assert len({item["id"] for item in newest["data"]}) == len(given)
    assert (newest["first_id"], newest["last_id"]) == (
        newest["data"][0]["id"],
        newest["data"][-1]["id"],
    )


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_kept_response_is_told_again(
    serving: Serving, autojump_clock: trio.testing.MockClock, streamed: bool
) -> None:
    """The events of a streamed response come again as they were, from any number on."""
    text = FakeText(_THINKS, "free")
    async with serving(says(f"<think>hm</think>Look.{_CALL}"), text=text) as (client, _):
        asked = {"input": "hello", "tools": [_LOOK], "top_logprobs": 1}
        if streamed:
            told = named_events(await read_stream(client, _PATH, {**asked, "stream": True}))
            kept = told[-1]["response"]
        else:
            _, kept = await ask(client, **asked)
        path = f"{_PATH}/{kept['id']}?stream=true"
        answer = await client.get(path, headers=_LOCAL)
        again = named_events(await answer.get_data(as_text=False))
        answer = await client.get(path + "&starting_after=3", headers=_LOCAL)
        later = named_events(await answer.get_data(as_text=False))
        wrong = await client.get(path + "&starting_after=x", headers=_LOCAL)
        _, whole = await get(client, kept["id"])
    if streamed:
        assert again == told
    assert [event["sequence_number"] for event in again] == list(range(len(again)))
    assert again[-1]["response"] == kept == whole
    assert later == again[4:]
    assert wrong.status_code == 400


async def test_an_input_is_counted(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """The count is what the response would cost; names of routes are not taken for ids."""
    async with serving(says("ok")) as (client, _):
        asked = {"input": "hello there", "instructions": "Be brief.", "tools": [_LOOK]}
        _, body = await ask(client, **asked)
        answer = await client.post(f"{_PATH}/input_tokens", json=asked, headers=_LOCAL)
        counted = await answer.get_json()
        more = {"input": "more", "previous_response_id": body["id"]}
        _, after = await ask(client, **more)
        answer = await client.post(f"{_PATH}/input_tokens", json=more, headers=_LOCAL)
        counted_after = await answer.get_json()
        compact = await client.post(f"{_PATH}/compact", json=asked, headers=_LOCAL)
        known = await client.post(f"{_PATH}/{body['id']}/cancel", json={}, headers=_LOCAL)
        unknown = await client.post(f"{_PATH}/resp_none/cancel", json={}, headers=_LOCAL)
    InputTokenCountResponse.model_validate(counted)
    assert counted["input_tokens"] == body["usage"]["input_tokens"]
    assert counted_after["input_tokens"] == after["usage"]["input_tokens"]
    assert compact.status_code == 404
    assert (known.status_code, unknown.status_code) == (400, 404)


def _thought(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": text}]}


_USER = {"role": "user", "content": "u"}
_SAYS = {"role": "assistant", "content": "a"}
_CALLS = {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"}
_BROUGHT = {"type": "function_call_output", "call_id": "c", "output": "o"}


@pytest.mark.parametrize(
    ("items", "thoughts"),
    [
        ([_USER, _thought("1"), _SAYS], ["1"]),
        ([_USER, _thought("1"), _USER, _SAYS], [None]),
        ([_USER, _thought("1"), _thought("2"), _SAYS], ["1\n2"]),
        ([_USER, _SAYS, _thought("2"), _CALLS, _BROUGHT, _SAYS], ["2", None]),
        ([_USER, _thought("1"), _SAYS, _thought("2"), _CALLS, _BROUGHT], ["1\n2"]),
        ([_USER, _thought("1"), _CALLS, _BROUGHT, _thought("2"), _SAYS], ["1", "2"]),
        ([_USER, _thought("1"), _CALLS, _CALLS, _BROUGHT, _SAYS], ["1", None]),
        ([_SAYS, _thought("1")], [None]),
    ],
)
def test_a_thought_stays_in_its_turn(items: Any, thoughts: list[str | None]) -> None:
    """It belongs to what the assistant says or calls behind it in the same turn."""
    said = [m for m in messages_of(items) if isinstance(m, AssistantMessage)]
    assert [message.reasoning_content for message in said] == thoughts


async def test_some_of_the_tools_may_be_called(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """allowed_tools narrows the tools that the model is told of, as in chat."""
    text = FakeText()
    tools = [_LOOK, {"type": "function", "name": "see"}]
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "look"}],
    }
    async with serving(text=text) as (client, _):
        _, body = await ask(client, tools=tools, tool_choice=choice)
        choice["tools"] = [{"type": "function", "name": "hear"}]
        status, wrong = await ask(client, tools=tools, tool_choice=choice)
    assert [item["name"] for item in body["output"] if item["type"] == "function_call"] == ["look"]
    assert (status, wrong["error"]["param"]) == (400, "tool_choice")


@pytest.mark.parametrize(
    ("metadata", "passes"),
    [
        ({str(n): "v" for n in range(16)}, True),
        ({str(n): "v" for n in range(17)}, False),
        ({"k" * 64: "v" * 512}, True),
        ({"k" * 65: "v"}, False),
        ({"k": "v" * 513}, False),
        ({"k": 1}, False),
    ],
)
async def test_metadata_has_limits(
    serving: Serving, autojump_clock: trio.testing.MockClock, metadata: Any, passes: bool
) -> None:
    """OpenAI's limits hold, since all of it is kept."""
    async with serving(says("ok")) as (client, _):
        status, body = await ask(client, metadata=metadata)
    assert status == (200 if passes else 400)
    assert passes or body["error"]["param"].startswith("metadata")
