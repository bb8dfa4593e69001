"""Bodies are bounded before they are decoded: in depth, in number, and in bytes together."""

import gc
import importlib
import json
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from quart import Quart
from tests.api.conftest import Serving

from paceline.api import problems
from paceline.api.anthropic.route import _input
from paceline.api.intake import (
    MOST_CONTAINERS,
    MOST_KEYS,
    MOST_NESTING,
    MOST_VALUES,
    Intake,
    JsonBounds,
    prepared,
)
from paceline.api.offload import INLINE_BYTES, is_long
from paceline.runtime.errors import CallerError
from paceline.runtime.memory import Trimmer

_LOCAL = {"Host": "localhost:8000", "Content-Type": "application/json"}
_ASK = [{"role": "user", "content": "hi"}]
_CHAT = "/v1/chat/completions"
_TALK: Any = {"messages": _ASK}


def _deep(levels: int) -> Any:
    value: Any = {"type": "string"}
    for _ in range(levels):
        value = {"type": "object", "properties": {"a": value}}
    return value


def _arrays(levels: int) -> str:
    return "[" * levels + "]" * levels


def _called(arguments: str) -> list[Any]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    result = {"role": "tool", "tool_call_id": "c", "content": "r"}
    return [*_ASK, {"role": "assistant", "content": "", "tool_calls": [call]}, result]


_DEEP: list[tuple[str, Callable[[int], Any], str | None]] = [
    (_CHAT, lambda n: {"messages": _ASK, "tools": [_tool(_deep(n))]}, None),
    (_CHAT, lambda n: {"messages": _ASK, "chat_template_kwargs": {"a": _deep(n)}}, None),
    (_CHAT, lambda n: {"messages": _ASK, "response_format": _form(_deep(n))}, None),
    (_CHAT, lambda n: {"messages": _ASK, "guided_json": _deep(n)}, None),
    (_CHAT, lambda n: {"messages": _ASK, "some_extra": _deep(n)}, None),
    (
        _CHAT,
        lambda n: {"messages": _called(_arrays(n))},
        "messages[1].tool_calls[0].function.arguments",
    ),
    ("/v1/completions", lambda n: {"prompt": "a", "guided_json": _deep(n)}, None),
    ("/v1/tokenize", lambda n: {"messages": _ASK, "tools": [_tool(_deep(n))]}, None),
    ("/v1/responses", lambda n: {"input": "a", "metadata": {"a": _deep(n)}}, None),
    ("/v1/responses", lambda n: {"input": _items(_arrays(n))}, "input[2].arguments"),
    ("/v1/messages", lambda n: {"max_tokens": 1, "messages": _used(_deep(n))}, None),
    ("/v1/messages/count_tokens", lambda n: {"messages": _used(_deep(n))}, None),
]


def _tool(schema: Any) -> Any:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def _form(schema: Any) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def _items(arguments: str) -> Any:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments}
    thought = {"type": "reasoning", "summary": []}
    return [{"role": "user", "content": "a"}, thought, call]


def _used(value: Any) -> Any:
    block = {"type": "tool_use", "id": "t", "name": "f", "input": {"a": value}}
    result = {"type": "tool_result", "tool_use_id": "t", "content": "r"}
    return [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [block]},
        {"role": "user", "content": [result]},
    ]


@pytest.mark.parametrize("levels", [150, 300, 990, 20_000])
@pytest.mark.parametrize(("path", "body", "param"), _DEEP)
async def test_what_nests_too_deeply_is_the_callers_error(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    path: str,
    body: Callable[[int], Any],
    param: str | None,
    levels: int,
) -> None:
    """In every field that nests, in JSON within strings too: a 400 in the dialect's own shape."""
    opening = '{"type":"object","properties":{"a":'
    whole = json.dumps(_deep(1)).replace(" ", "")
    sent = json.dumps(body(1) if param is None else body(levels)).replace(" ", "")
    if param is None:  # built by hand: Python's own encoder nests less deeply
        end = "}}" * (levels - 1)
        sent = sent.replace(whole, opening * (levels - 1) + whole + end)
    async with serving() as (client, _):
        answer = await client.post(path, data=sent, headers=_LOCAL)
        error = (await answer.get_json())["error"]
    assert answer.status_code == 400
    assert "nested too deeply" in error["message"]
    assert param is None or error["param"].startswith(param)


_WIDE = "x" * (INLINE_BYTES + 1)


@pytest.mark.parametrize("levels", [101, 990, 100_000])
def test_a_call_of_the_models_own_that_nests_too_deeply_is_no_fault(levels: int) -> None:
    """It is shown as text, and a call that was cut off has no input yet."""
    deep = '{"a":' + _arrays(levels) + "}"
    assert _input(deep, cut=True) == {}
    assert _input(deep, cut=False) == {"INVALID_JSON": deep}
    assert set(_input('{"a":' + _arrays(40) + "}", cut=False)) == {"a"}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (_CHAT, {"messages": [{"role": "user", "content": "q" * 200_000}]}),
        ("/v1/completions", {"prompt": "q" * 200_000}),
        (
            "/v1/messages",
            {**_TALK, "max_tokens": 1, "tools": [{"name": "f", "type": "x" * 99_999}]},
        ),
        (_CHAT, {**_TALK, "a": _deep(60), "stop": [_WIDE]}),
        ("/v1/responses", {"input": [{"type": _WIDE}]}),
        (_CHAT, {**_TALK, "a": [[]] * MOST_CONTAINERS}),
    ],
)
async def test_a_refused_body_is_not_kept_in_a_cycle(
    serving: Serving, autojump_clock: trio.testing.MockClock, path: str, body: Any
) -> None:
    """No error holds its own traceback, whose frames hold the texts, until some late collection."""
    async with serving(context=64) as (client, _):
        await client.post(path, json=body, headers=_LOCAL)
        gc.collect()
        gc.disable()
        try:
            answer = await client.post(path, json=body, headers=_LOCAL)
            status = answer.status_code
            del answer
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            errors = [found for found in gc.garbage if isinstance(found, CallerError)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
    assert status == 400
    assert errors == []


async def test_what_nests_as_schemas_do_is_served(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Forty levels of a tool's schema are no trouble."""
    async with serving() as (client, _):
        body = {"messages": _called(json.dumps(_deep(40))), "tools": [_tool(_deep(40))]}
        answer = await client.post(_CHAT, json={**body, "max_tokens": 1}, headers=_LOCAL)
    assert answer.status_code == 200


_JSON = st.recursive(
    st.one_of(st.text(max_size=8), st.sampled_from(['"', "\\", '\\"', "[[", "}", "\\\\"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner)
    ),
    max_leaves=12,
)


def _depth(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(_depth, value.values()), default=0)
    if isinstance(value, list):
        return 1 + max(map(_depth, value), default=0)
    return 0


@settings(max_examples=300)
@given(value=_JSON, ascii=st.booleans(), step=st.integers(1, 40))
def test_depth_is_told_whatever_strings_hold(value: Any, ascii: bool, step: int) -> None:
    """Brackets, quotes and backslashes within strings are no structure, wherever a step ends."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("paceline.api.intake._STEP", step)
        for wrapped in range(MOST_NESTING - _depth(value) - 1, MOST_NESTING - _depth(value) + 2):
            raw = "[" * wrapped + json.dumps(value, ensure_ascii=ascii) + "]" * wrapped
            if wrapped + _depth(value) <= MOST_NESTING:
                JsonBounds().check(raw.encode())
            else:
                with pytest.raises(CallerError, match="nested too deeply"):
                    JsonBounds().check(raw.encode())


@pytest.mark.parametrize("piece", [b"1,", b"{},", b"[],"])
def test_numbers_of_values_are_bounded(piece: bytes) -> None:
    """A body of millions of small values is refused before any is built."""
    most = MOST_VALUES if piece == b"1," else MOST_CONTAINERS
    JsonBounds().check(b"[" + piece * (most - 2) + b"1]")
    with pytest.raises(CallerError, match="holds more than"):
        JsonBounds().check(b"[" + piece * (most + 1) + b"1]")


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (
            _CHAT,
            lambda each: {"messages": [m for one in each for m in _called(one)]},
            "messages[4].tool_calls[0].function.arguments",
        ),
        (
            "/v1/responses",
            lambda each: {"input": [item for one in each for item in _items(one)]},
            "input[5].arguments",
        ),
        (
            "/v1/tokenize",
            lambda each: {"messages": [m for one in each for m in _called(one)]},
            "messages[4].tool_calls[0].function.arguments",
        ),
    ],
)
@pytest.mark.parametrize("many", ["a few large", "many small"])
async def test_all_arguments_of_a_request_are_bounded_together(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    path: str,
    body: Any,
    param: str,
    many: str,
) -> None:
    """A hundred calls of a hundred thousand lists would hold most of a gigabyte."""
    large = many == "a few large"
    size, count = (MOST_CONTAINERS - 9_999, 2) if large else (30, MOST_CONTAINERS // 30 + 1)
    each = ["[" + "[]," * (size - 2) + "[]]"] * count
    async with serving(context=10_000_000) as (client, _):
        answer = await client.post(path, json=body(each), headers=_LOCAL)
        error = (await answer.get_json())["error"]
    assert answer.status_code == 400
    assert "holds more than" in error["message"]
    assert not large or error["param"] == param


def test_numbers_of_keys_are_bounded() -> None:
    """One object of a million keys holds the interpreter for most of a second."""
    JsonBounds().check(b"{" + b'"a":1,' * (MOST_KEYS - 1) + b'"a":1}')
    JsonBounds().check(b'["' + b":" * (2 * MOST_KEYS) + b'"]')
    with pytest.raises(CallerError, match="keys"):
        JsonBounds().check(b"{" + b'"a":1,' * MOST_KEYS + b'"a":1}')


_BODIES: list[tuple[str, Any, str]] = [
    (_CHAT, _TALK, "api.problems"),
    ("/v1/completions", {"prompt": "a"}, "api.problems"),
    ("/v1/tokenize", {"prompt": "a"}, "api.problems"),
    ("/v1/detokenize", {"tokens": [1]}, "api.problems"),
    ("/v1/responses", {"input": "a"}, "api.responses.route"),
    ("/v1/responses/input_tokens", {"input": "a"}, "api.responses.route"),
    ("/v1/messages", {**_TALK, "max_tokens": 1}, "api.anthropic.route"),
    ("/v1/messages/count_tokens", _TALK, "api.anthropic.route"),
]


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize(("path", "body", "module"), _BODIES)
async def test_long_bodies_are_worked_on_beside_the_event_loop(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: Any,
    module: str,
    long: bool,
) -> None:
    """Decoding, the look at every field, and what a dialect makes of it."""
    here = threading.get_ident()
    inline: list[bool] = []

    def watched(work: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            inline.append(threading.get_ident() == here)
            return work(*args)

        return wrapper

    monkeypatch.setattr(problems, "decode", watched(problems.decode))
    if module != "api.problems":
        route = importlib.import_module(f"paceline.{module}")
        monkeypatch.setattr(route, "understood", watched(route.understood))
    padding = {"some_extra": "x" * INLINE_BYTES} if long else {}
    async with serving() as (client, _):
        answer = await client.post(path, json={**body, **padding}, headers=_LOCAL)
    assert answer.status_code == 200
    assert inline == [not long] * (1 if module == "api.problems" else 2)


@pytest.mark.parametrize(
    ("path", "field", "value", "param"),
    [
        (_CHAT, "stop", "x" * 1025, "stop"),
        (_CHAT, "stop", ["a", "x" * 1025], "stop[1]"),
        (_CHAT, "stop", ["a"] * 65, "stop"),
        ("/v1/completions", "stop", ["x" * 1_000_000] * 64, "stop[0]"),
        ("/v1/messages", "stop_sequences", ["a", "b", "x" * 1025], "stop_sequences[2]"),
        ("/v1/messages", "stop", "x" * 1025, "stop"),
        ("/v1/responses", "stop", "x" * 1025, "stop"),
        (_CHAT, "logit_bias", {"1" * 5_000: 1}, "logit_bias"),
    ],
)
async def test_what_is_looked_at_with_every_token_is_bounded(
    serving: Serving,
    autojump_clock: trio.testing.MockClock,
    path: str,
    field: str,
    value: Any,
    param: str,
) -> None:
    """Stop strings in number and length; a token's id in digits."""
    prompt = {"/v1/completions": {"prompt": "a"}, "/v1/responses": {"input": "a"}}
    body = {**prompt.get(path, _TALK), field: value}
    if path == "/v1/messages":
        body["max_tokens"] = 1
    async with serving() as (client, _):
        answer = await client.post(path, json=body, headers=_LOCAL)
        error = (await answer.get_json())["error"]
    assert answer.status_code == 400
    assert error["message"].startswith(f"{param}:")


@pytest.mark.parametrize(
    "prompt", [["a"] * 200_000, [[1]] * 200, [1] * 8192, [[1] * 8192, [1]], ["a" * 9_000]]
)
async def test_legacy_prompts_are_bounded_before_they_are_read(
    serving: Serving, autojump_clock: trio.testing.MockClock, prompt: Any
) -> None:
    """Too many prompts, or too long ones, are a 400 that names the field."""
    async with serving() as (client, _):
        answer = await client.post("/v1/completions", json={"prompt": prompt}, headers=_LOCAL)
        error = (await answer.get_json())["error"]
    assert answer.status_code == 400
    assert error["param"] in ("prompt", "n")


async def test_large_bodies_wait_for_room_and_give_it_back(
    serving: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More large bodies than there is room for are all answered, one after the other.

    In real time: a virtual clock would jump to the end of the wait while a thread works.
    """
    found: list[int] = []
    asked: list[Trimmer] = []  # to give their memory back to the system
    monkeypatch.setattr(Trimmer, "ask", lambda self: asked.append(self))

    async def ask(client: Any) -> None:
        body = {"prompt": [0] * 400_000, "max_tokens": 1}
        answer = await client.post("/v1/completions", json=body, headers=_LOCAL)
        found.append(answer.status_code)

    async with serving(body_limit_mb=2) as (client, _):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(ask, client)
        small = {"prompt": "a", "max_tokens": 1}
        answer = await client.post("/v1/completions", json=small, headers=_LOCAL)
    assert found == [400] * 5
    assert answer.status_code == 200
    assert len(asked) == 5


class _Sent:
    """A request whose body is here at once."""

    max_content_length = None

    def __init__(self, size: int) -> None:
        self.body = self._parts(size)

    @staticmethod
    async def _parts(size: int) -> AsyncIterator[bytes]:
        yield b'"' + b"x" * (size - 2) + b'"'


async def test_large_bodies_in_work_never_have_more_than_the_largest_together() -> None:
    """The second waits until the first has given its room back; small ones wait for nobody.

    Any that is worked on in a thread needs room: many of a middle size hold as much as a few.
    """
    app, intake = Quart(__name__), Intake(3 * INLINE_BYTES, 30)
    order: list[str] = []
    entered = trio.Event()

    async def read(name: str, size: int, may_end: trio.Event) -> None:
        request: Any = _Sent(size)
        async with app.app_context():
            await intake.read(request)
            order.append(name)
            entered.set()
            await may_end.wait()
            order.append(f"{name} ends")
            prepared()

    async with trio.open_nursery() as nursery:
        first, free = trio.Event(), trio.Event()
        free.set()
        nursery.start_soon(read, "first", 2 * INLINE_BYTES, first)
        await entered.wait()
        nursery.start_soon(read, "second", 2 * INLINE_BYTES, free)
        nursery.start_soon(read, "small", 1000, free)
        await trio.testing.wait_all_tasks_blocked()
        assert intake._free >= 0, "the second has no room yet"
        first.set()
    assert order == ["first", "small", "small ends", "first ends", "second", "second ends"]


@pytest.mark.parametrize(
    ("value", "long"),
    [
        ("a" * 20_000, True),
        ("a" * 100, False),
        ([{"a" * 20_000: 1}], True),
        ([[]] * 2_000, True),
        ([{"a": [{"b": "c" * 20_000}]}], True),
        ({"a": {"b": ["c", 1, None]}}, False),
    ],
)
def test_long_work_is_seen_wherever_it_hides(value: Any, long: bool) -> None:
    """Keys, values and mere numbers of things count."""
    assert is_long(value) is long
