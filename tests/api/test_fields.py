"""The one list of known fields: each is served with an effect, refused by name, or harmless."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
import trio.testing
from tests.api.conftest import Serving, read_stream
from tests.api.test_tools import _LOCAL, _THINKS, says
from tests.fakes import FakeText

from paceline.actors.house import House
from paceline.api.anthropic.bodies import CountRequest, MessagesRequest
from paceline.api.fields import FIELDS, Field, asks_nothing, check_fields, markdown
from paceline.api.known import GROUPS, ROUTES, Route
from paceline.api.problems import decode
from paceline.api.responses.bodies import InputTokensRequest, ResponsesRequest
from paceline.api.schemas import ChatRequest, CompletionRequest, TokenizeRequest
from paceline.runtime.errors import BusyError, CallerError
from paceline.runtime.text import ChatPrompt

_ROOT: Final = Path(__file__).parents[2]
_SENT: Final = _ROOT / "tests" / "clients" / "bodies"
_CAPTURED: Final = _ROOT.parent / "shared" / "clients"  # more of them, where it is there
_BODIES: Final[dict[Route, Any]] = {
    "chat": ChatRequest,
    "text": CompletionRequest,
    "responses": ResponsesRequest,
    "messages": MessagesRequest,
    "count": CountRequest,
    "input": InputTokensRequest,
    "tokenize": TokenizeRequest,
}
_ASK: Final = [{"role": "user", "content": "hello"}]
_OTHER_ASK: Final = [{"role": "user", "content": "goodbye"}]
_BASES: Final[dict[Route, dict[str, Any]]] = {
    "chat": {"messages": _ASK, "seed": 7},
    "text": {"prompt": "hello", "seed": 7, "max_tokens": 100},
    "responses": {"input": "hello", "seed": 7},
    "messages": {"messages": _ASK, "seed": 7, "max_tokens": 100},
    "count": {"messages": _ASK},
    "input": {"input": "hello"},
    "tokenize": {"messages": _ASK},
}
_SCHEMA: Final = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
_FUNCTION: Final = {"name": "look", "parameters": {"type": "object", "properties": {}}}
_CHAT_TOOLS: Final = [{"type": "function", "function": _FUNCTION}]
_RESPONSES_TOOLS: Final = [{"type": "function", **_FUNCTION}]
_MESSAGES_TOOLS: Final = [{"name": "look", "input_schema": {"type": "object"}}]
_TOOLS: Final[dict[Route, Any]] = {
    "chat": _CHAT_TOOLS,
    "responses": _RESPONSES_TOOLS,
    "messages": _MESSAGES_TOOLS,
    "count": _MESSAGES_TOOLS,
    "input": _RESPONSES_TOOLS,
    "tokenize": _CHAT_TOOLS,
}
_CHOSEN: Final[dict[Route, Any]] = {
    "chat": "none",
    "responses": "none",
    "messages": {"type": "none"},
    "count": {"type": "none"},
    "input": "none",
}
# A value that has an effect; where it stands beside something, a pair of both.
_TRIES: Final[dict[str, Any]] = {
    "stream": True,
    "temperature": 0.3,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 8,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "repetition_penalty": 1.5,
    "logit_bias": {"65": 5},
    "stop": ["two"],
    "stop_sequences": ["two"],
    "ignore_eos": ({"max_tokens": 30}, True),
    "guided_json": _SCHEMA,
    "guided_regex": "[0-9]",
    "guided_choice": ["x"],
    "guided_grammar": 'start: "x"',
    "paceline": {"priority": "background"},
    "n": 2,
    "stream_options.include_usage": ({"stream": True}, True),
    "messages": _OTHER_ASK,
    "messages[].reasoning_content": "a thought",
    "messages[].reasoning": "a thought",
    "chat_template_kwargs": {"mood": "good"},
    "max_tokens": 2,
    "max_completion_tokens": 2,
    "max_output_tokens": 2,
    "logprobs": True,
    "response_format": {"type": "json_object"},
    "reasoning_effort": "high",
    "prompt": "goodbye",
    "echo": True,
    "best_of": 2,
    "input": "goodbye",
    "instructions": "Be brief.",
    "system": "Be brief.",
    "text.format": {"type": "json_object"},
    "reasoning.effort": "high",
    "reasoning.enabled": False,
    "store": False,
    "metadata": {"a": "b"},
    "include": ["message.output_text.logprobs"],
    "thinking.type": "enabled",
    "output_config.effort": "low",
    "output_config.format": {"type": "json_schema", "schema": _SCHEMA},
    "add_special_tokens": ({"messages": None, "prompt": "hello"}, False),
}
# Served fields whose effect another test shows.
_ELSEWHERE: Final = {
    "model": "test_any_model_is_served_unless_names_are_strict",
    "previous_response_id": "test_a_conversation_goes_on_by_its_id",
}
_VOLATILE: Final = ("id", "created", "created_at", "call_id", "paceline", "seed")


class PlainText(FakeText):
    """Text whose prompt shows all that reaches a chat template."""

    def chat(self, messages: Any, tools: Any = (), **setting: Any) -> ChatPrompt:
        self.last_setting = setting
        shown = json.dumps([list(messages), list(tools), setting["options"], setting["lead"]])
        return ChatPrompt(self.encode(shown, add_special=False), "over")

    def encode(self, text: str, *, add_special: bool = True, **_: Any) -> list[int]:
        return [*([1] if add_special else []), *super().encode(text)]


def _within(path: str, value: Any) -> dict[str, Any]:
    """Return a body that has a value at a path and nothing else."""
    for step in reversed(path.replace("[]", ".[]").split(".")):
        value = [value] if step == "[]" else {step: value}
    return value  # type: ignore[no-any-return]


def _of(verdict: str) -> list[tuple[Route, str]]:
    return [
        (route, path)
        for route, fields in FIELDS.items()
        for path, field in fields.items()
        if field.verdict == verdict
    ]


def _stable(value: Any) -> Any:
    """Return an answer without what differs between two of the same request."""
    if isinstance(value, dict):
        return {k: _stable(v) for k, v in value.items() if k not in _VOLATILE}
    return [_stable(item) for item in value] if isinstance(value, list) else value


def test_every_group_says_why() -> None:
    """Each reason is written down, each route is a known one, and nothing stands twice."""
    for group in GROUPS:
        assert group.why
        assert set(group.on.split()) <= set(ROUTES)
        assert group.names.split()


@pytest.mark.parametrize("route", ROUTES)
def test_every_field_of_a_body_is_in_the_list(route: Route) -> None:
    """What a route decodes is served or harmless, and what it serves is decoded."""
    known = {path.partition(".")[0].partition("[")[0]: f for path, f in FIELDS[route].items()}
    decoded = set(_BODIES[route].__struct_fields__)
    assert decoded <= set(known)
    for path, field in FIELDS[route].items():
        if field.verdict == "served":
            assert path.partition(".")[0].partition("[")[0] in decoded


@pytest.mark.parametrize("route", ROUTES)
def test_a_refused_field_is_refused_by_its_name(route: Route) -> None:
    """A value that would change the answer names the field; one that asks for nothing passes."""
    decoder = msgspec.json.Decoder(_BODIES[route])
    paths = [path for path, field in FIELDS[route].items() if field.verdict == "refused"]
    assert paths
    for path in paths:
        where = path.replace("[]", "[0]")
        body = {**_BASES[route], **_within(path, "x")}
        with pytest.raises(CallerError) as refusal:
            decode(decoder, json.dumps(body).encode())
        assert refusal.value.param == where
        assert where in refusal.value.message
        for value in (None, "", [], {}, *FIELDS[route][path].neutral):
            check_fields(route, _within(path, value))


def test_numbers_and_truth_values_are_told_apart() -> None:
    """1 and 1.0 are one number in JSON, and true is none."""
    field = Field("refused", "", (1, False))
    assert asks_nothing(1.0, field, "x")
    assert asks_nothing(False, field, "x")
    assert not asks_nothing(True, field, "x")
    assert not asks_nothing(0, field, "x")
    assert not asks_nothing("1", field, "x")


@pytest.mark.parametrize(
    ("edits", "passes"),
    [
        ([], True),
        ([{"type": "clear_thinking_20251015", "keep": "all"}], True),
        ([{"type": "clear_thinking_20251015"}], False),
        ([{"type": "clear_tool_uses_20250919"}], False),
        ("x", False),
    ],
)
def test_context_management_that_edits_nothing_passes(edits: Any, passes: bool) -> None:
    """Claude Code sends an edit that keeps all; any other would change the conversation."""
    field = FIELDS["messages"]["context_management"]
    assert asks_nothing({"edits": edits}, field, "context_management") is passes


def _requests(route: Route, path: str) -> Iterator[dict[str, Any]]:
    """Give a request without a field and the same with it."""
    base: dict[str, Any] = dict(_BASES[route])
    if (route, path) == ("tokenize", "prompt"):
        base = {"prompt": "hello"}
    if path in ("tools", "tool_choice", "parallel_tool_calls"):
        value: Any = {"tools": _TOOLS[route], "tool_choice": _CHOSEN.get(route)}.get(path, False)
        base |= {} if path == "tools" else {"tools": _TOOLS[route]}
    elif path == "top_logprobs":
        value = 2
        base |= {"logprobs": True} if route == "chat" else {}
    elif path == "logprobs" and route == "text":
        value = 2
    elif path == "messages[].reasoning" or path == "messages[].reasoning_content":
        value = None
        said = {"role": "assistant", "content": "hi"}
        base["messages"] = [*_ASK, said, *_ASK]
        yield base
        thought = {**said, path.partition(".")[2]: "a thought"}
        yield {**base, "messages": [*_ASK, thought, *_ASK]}
        return
    else:
        value = _TRIES[path]
    if isinstance(value, tuple):
        more, value = value
        base |= more if route != "responses" else {"max_output_tokens": 30}
    yield base
    yield {**base, **_within(path, value)}


@pytest.mark.parametrize(("route", "path"), [x for x in _of("served") if x[1] not in _ELSEWHERE])
async def test_a_served_field_has_an_effect(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    route: Route,
    path: str,
) -> None:
    """What is run or what is answered is another with the field than without it."""
    started: list[Any] = []
    start = House.start

    def watched(house: House, generation: Any) -> Any:
        rows = [(row.prompt, row.sampling, row.seed, row.budget) for row in generation.rows]
        more = [(row.end_ids, row.grammar is not None) for row in generation.rows]
        manner = msgspec.structs.replace(generation.manner, dialect=None)
        started.append((rows, more, generation.stops, manner, generation.priority))
        return start(house, generation)

    monkeypatch.setattr(House, "start", watched)
    seen = []
    text = PlainText(_THINKS)
    mode = "cooperative" if path == "paceline" else "serial"
    async with serving(says("one two three"), text=text, scheduler_mode=mode) as (client, _):
        for body in _requests(route, path):
            started.clear()
            if body.get("stream"):
                told: Any = (await read_stream(client, ROUTES[route], body)).count(b"usage")
            else:
                answer = await client.post(ROUTES[route], json=body, headers=_LOCAL)
                assert answer.status_code == 200, await answer.get_data()
                told = _stable(await answer.get_json())
            seen.append((list(started), told))
    assert seen[0] != seen[1]


@pytest.mark.parametrize("name", _ELSEWHERE.values())
def test_tests_of_other_effects_are_there(name: str) -> None:
    """A served field without an effect above has a test of its own."""
    files = (_ROOT / "tests" / "api").glob("test_*.py")
    assert any(f"def {name}(" in file.read_text() for file in files)


def test_a_field_nobody_knows_is_let_through() -> None:
    """Agents send extras of their own."""
    for route in ROUTES:
        check_fields(route, {"my_own_extra": {"deep": [1]}, "metadata": {"mine": 1}})


def test_the_docs_show_the_list() -> None:
    """docs/api.md holds the table that the list makes."""
    assert markdown() in (_ROOT / "docs" / "api.md").read_text()


async def test_what_real_agents_send_is_taken(
    serving: Serving, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of the forms that agents send, and captured ones where they are, reach the queue."""

    def full(_: House, generation: Any) -> Any:
        raise BusyError(generation.request_id, 1)

    monkeypatch.setattr(House, "start", full)
    files = sorted(_SENT.glob("*.json"))
    assert files
    files += sorted(_CAPTURED.glob("*.json"))
    async with serving(says("ok"), context=400_000) as (client, _):
        for file in files:
            sent = json.loads(file.read_text())
            body: Any = {} if sent["body"] is None else {"json": sent["body"]}
            path, method = f"{sent['path']}?{sent['query']}", sent["method"]
            answer = await client.open(path, method=method, headers=_LOCAL, **body)
            counted = method != "POST" or "count" in path
            assert answer.status_code == (200 if counted else 503), file.name
