"""Forms that cannot be followed, in every dialect: refused by name, or told as failed."""

import json
from typing import Any

import pytest
from tests.api.conftest import Serving, read_stream
from tests.api.test_tools import _LOCAL, says

_MESSAGES = [{"role": "user", "content": "hello"}]
_ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": _MESSAGES, "max_tokens": 400},
    "/v1/completions": {"prompt": "hello", "max_tokens": 400},
    "/v1/responses": {"input": "hello", "max_output_tokens": 400},
    "/v1/messages": {"messages": _MESSAGES, "max_tokens": 400},
}


def _schema_in(route: str, schema: Any) -> tuple[dict[str, Any], str]:
    """Return the fields that ask for a schema, and the name of the one that holds it."""
    if route == "/v1/chat/completions":
        named = {"name": "x", "schema": schema}
        fields = {"response_format": {"type": "json_schema", "json_schema": named}}
        return fields, "response_format.json_schema.schema"
    if route == "/v1/responses":
        fields = {"text": {"format": {"type": "json_schema", "name": "x", "schema": schema}}}
        return fields, "text.format.schema"
    if route == "/v1/messages":
        fields = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
        return fields, "output_config.format.schema"
    return {"guided_json": schema}, "guided_json"


def _tool_in(route: str, schema: Any) -> tuple[dict[str, Any], str]:
    """Return the fields that give a tool with such arguments, and the name of their schema."""
    if route == "/v1/chat/completions":
        function = {"name": "look", "parameters": schema}
        return {"tools": [{"type": "function", "function": function}]}, (
            "tools[0].function.parameters"
        )
    if route == "/v1/responses":
        tool = {"type": "function", "name": "look", "parameters": schema}
        return {"tools": [tool]}, "tools[0].parameters"
    return {"tools": [{"name": "look", "input_schema": schema}]}, "tools[0].input_schema"


async def _refused(client: Any, route: str, fields: dict[str, Any], named: str) -> None:
    """Assert that both manners of asking are a 400 that names the field."""
    for stream in (False, True):
        body = {**_ROUTES[route], **fields, "stream": stream}
        answer = await client.post(route, json=body, headers=_LOCAL)
        error = (await answer.get_json())["error"]
        assert answer.status_code == 400
        assert error["type"] == "invalid_request_error"
        assert named in (error["message"] if route == "/v1/messages" else error["param"])
        assert error["message"].count(named) == 1
        assert "\n" not in error["message"]


@pytest.mark.parametrize("route", [r for r in _ROUTES if r != "/v1/completions"])
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string"},
        {"type": ["array", "null"]},
        {"enum": ["a", 1]},
        {"const": []},
        {"$ref": "#/$defs/a", "$defs": {"a": {"type": "integer"}}},
        {"anyOf": [{"type": "string"}, {"type": "array"}]},
    ],
)
async def test_a_tool_whose_arguments_are_no_object_is_refused(
    serving: Serving, route: str, schema: Any
) -> None:
    """A function takes an object; a schema of anything else is refused under its own name."""
    async with serving(says("ok")) as (client, _):
        fields, named = _tool_in(route, schema)
        await _refused(client, route, fields, named)
        good, _ = _tool_in(route, {"type": "object"})
        answer = await client.post(route, json={**_ROUTES[route], **good}, headers=_LOCAL)
        assert answer.status_code == 200


_HUGE = {"type": "string", "pattern": "^a{1000000}$"}


@pytest.mark.parametrize("route", _ROUTES)
@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"type": "object", "properties": {"a": _HUGE}, "required": ["a"]},
        {"enum": []},
        {"allOf": [{"type": "string"}, {"type": "null"}]},
        {"type": "integer", "minimum": 5, "maximum": 3},
        {"type": "object", "properties": {"a": False}, "required": ["a"]},
    ],
)
async def test_a_schema_that_no_answer_can_have_is_refused(
    serving: Serving, route: str, schema: Any
) -> None:
    """What compiles and cannot be followed is a 400 before the first event, under its own name."""
    async with serving(says("ok")) as (client, _):
        fields, named = _schema_in(route, schema)
        await _refused(client, route, fields, named)


@pytest.mark.parametrize("route", _ROUTES)
@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "a{1000000}"},
        {"guided_regex": r"a[^\s\S]"},
        {"guided_grammar": 'start: start "a"'},
        {"guided_grammar": "start: T\nT: /a/ & /b/"},
        {"guided_json": {"$ref": "#"}},
    ],
)
async def test_a_guide_that_no_answer_can_have_is_refused(
    serving: Serving, route: str, fields: Any
) -> None:
    """The extensions are the same in every dialect, and so is what is refused."""
    async with serving(says("ok")) as (client, _):
        await _refused(client, route, fields, next(iter(fields)))


@pytest.mark.parametrize("route", _ROUTES)
async def test_a_form_that_breaks_later_is_a_failure_of_its_request(
    serving: Serving, route: str
) -> None:
    """A dead end behind what was said is never a good end: a 400, or an error in the stream."""
    dead = {"type": "object", "properties": {"a": _HUGE}, "required": ["a"]}
    schema = {"anyOf": [{"const": 1}, dead]}
    fields, _ = _schema_in(route, schema)
    body = {**_ROUTES[route], **fields}
    async with serving(says('{"a": "aaaaaaaaaaaa')) as (client, place):
        answer = await client.post(route, json=body, headers=_LOCAL)
        whole = await answer.get_json()
        raw = await read_stream(client, route, {**body, "stream": True})
        assert not place.open_rows
        again = await client.post(route, json={**_ROUTES[route]}, headers=_LOCAL)
        assert again.status_code == 200
    assert answer.status_code == 400
    assert "form cannot be followed" in whole["error"]["message"]
    events = [json.loads(line[6:]) for line in raw.decode().split("\n") if line[:7] == "data: {"]
    match route:
        case "/v1/responses":
            assert events[-1]["type"] == "response.failed"
            assert "form cannot be followed" in events[-1]["response"]["error"]["message"]
            assert not any(e["type"] == "response.completed" for e in events)
        case "/v1/messages":
            assert (events[-1]["type"], events[-1]["error"]["type"]) == (
                "error",
                "invalid_request_error",
            )
            assert not any(e["type"] in ("message_delta", "message_stop") for e in events)
        case _:
            assert whole["error"]["code"] == "form_failed"
            assert events[-1]["error"]["code"] == "form_failed"
            reasons = [c["finish_reason"] for e in events[:-1] for c in e["choices"]]
            assert not any(reasons)
