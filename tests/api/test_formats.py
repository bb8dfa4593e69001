"""Schemas beside the type of a format, and fields that ask for what is so anyway."""

import json
from typing import Any

import pytest
import trio.testing
from tests.api.conftest import Serving
from tests.api.test_responses import ask as ask_response
from tests.api.test_responses import events
from tests.api.test_tools import _LOCAL, _THINKS, ask, says
from tests.fakes import FakeText

from paceline.api.responses import shape
from paceline.api.responses.replies import TextContent

_SCHEMA = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"]}
_OTHER = {"type": "object", "properties": {"b": {"enum": [2]}}, "required": ["b"]}
_NAMED = {"name": "x", "schema": _SCHEMA}


@pytest.mark.parametrize(
    "given",
    [
        {"type": "json_object", "schema": _SCHEMA},
        {"type": "json_object", "json_schema": _NAMED},
        {"type": "json_schema", "json_schema": _NAMED, "schema": None},
    ],
)
async def test_a_schema_beside_a_type_is_kept(
    serving: Serving, autojump_clock: trio.testing.MockClock, given: Any
) -> None:
    """Other servers put the schema beside json_object: the answer is what it describes."""
    async with serving(says("no")) as (client, _):
        status, body = await ask(client, response_format=given, max_tokens=80)
        assert status == 200
        assert json.loads(body["choices"][0]["message"]["content"]) == {"a": 1}
        if "schema" in given and given["type"] == "json_object":
            _, body = await ask_response(client, text={"format": given}, max_output_tokens=80)
            assert json.loads(body["output"][0]["content"][0]["text"]) == {"a": 1}


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"type": "text", "schema": _SCHEMA}, "schema"),
        ({"type": "text", "json_schema": _NAMED}, "json_schema"),
        ({"type": "json_object", "schema": _OTHER, "json_schema": _NAMED}, "schema"),
        ({"type": "json_schema", "schema": _OTHER, "json_schema": _NAMED}, "schema"),
        ({"type": "json_object", "schema": {"not": {}}}, "schema"),
    ],
)
async def test_a_schema_that_cannot_be_kept_is_refused(
    serving: Serving, autojump_clock: trio.testing.MockClock, given: Any, name: str
) -> None:
    """A schema is followed or refused by its name, never passed over."""
    async with serving(says("no")) as (client, _):
        status, body = await ask(client, response_format=given)
        assert (status, body["error"]["param"]) == (400, f"response_format.{name}")
        status, body = await ask_response(client, text={"format": {"name": "x", **given}})
    if given["type"] != "json_schema":
        assert (status, body["error"]["param"]) == (
            400,
            "text.format.json_schema" if "json_schema" in given else "text.format.schema",
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"function_call": "none"},
        {"response_format": {"type": "text"}},
    ],
)
async def test_the_legacy_route_takes_what_asks_for_nothing(
    serving: Serving, autojump_clock: trio.testing.MockClock, fields: Any
) -> None:
    """Values that leave the answer as it is pass; others of the same field are refused."""
    async with serving(says("ok")) as (client, _):
        for given, wanted in ((fields, 200), (dict.fromkeys(fields, "required"), 400)):
            sent = {"prompt": "a", **given}
            answer = await client.post("/v1/completions", json=sent, headers=_LOCAL)
            assert answer.status_code == wanted


@pytest.mark.parametrize(
    ("fields", "options"),
    [
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True}),
        ({"reasoning": {"enabled": False}}, {"enable_thinking": False}),
        ({"reasoning": {"enabled": True}}, {"enable_thinking": True}),
        ({"reasoning": {"effort": "low"}}, {"enable_thinking": True, "reasoning_effort": "low"}),
        (
            {"thinking": {"type": "disabled"}, "chat_template_kwargs": {"enable_thinking": True}},
            {"enable_thinking": True},
        ),
        ({"thinking": None, "reasoning": {}}, {}),
    ],
)
async def test_chat_takes_other_names_for_thinking(
    serving: Serving, autojump_clock: trio.testing.MockClock, fields: Any, options: Any
) -> None:
    """They set the template's own variables."""
    text = FakeText(_THINKS)
    async with serving(says("ok"), text=text) as (client, _):
        status, _ = await ask(client, **fields)
    assert status == 200
    assert text.last_setting["options"] == options


async def test_a_long_answer_is_put_together_once(
    serving: Serving, autojump_clock: trio.testing.MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What an item gained is joined at its end, not copied again with every piece."""
    changed: list[str] = []

    class Watched(TextContent, tag="output_text"):
        def __setattr__(self, name: str, value: Any) -> None:
            changed.append(name)
            super().__setattr__(name, value)

    monkeypatch.setattr(shape, "TextContent", Watched)
    said = "word " * 40
    async with serving(says(said)) as (client, _):
        found = await events(client, top_logprobs=1)
    deltas = [event for event in found if event["type"] == "response.output_text.delta"]
    (item,) = found[-1]["response"]["output"]
    assert len(deltas) > 20
    assert item["content"][0]["text"] == "".join(event["delta"] for event in deltas) == said
    entries = [entry for event in deltas for entry in event["logprobs"]]
    assert item["content"][0]["logprobs"] == entries
    assert changed.count("text") <= 2
