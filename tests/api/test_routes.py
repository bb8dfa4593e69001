"""The other routes: legacy completions, models, tokens, health, metrics, and the guard."""

from typing import Any

import jsonschema
import pytest
import trio
import trio.testing
from tests.api.conftest import Serving
from tests.fakes import READ_S, STEP_S, Nature

from paceline.api.anthropic.bodies import MessagesRequest
from paceline.api.responses.bodies import ResponsesRequest
from paceline.api.schemas import ChatRequest, CompletionRequest

_LOCAL = {"Host": "localhost:8000"}


async def _post(client: Any, path: str, body: dict[str, Any], **headers: str) -> Any:
    return await client.post(path, json=body, headers={**_LOCAL, **headers})


@pytest.mark.parametrize(
    ("prompt", "choices"),
    [("ab", 1), (["ab", "c"], 2), ([97, 98], 1), ([[97], [98, 99]], 2), (None, 1), ("", 1)],
)
async def test_prompts_of_all_four_forms(
    serving: Serving, autojump_clock: trio.testing.MockClock, prompt: Any, choices: int
) -> None:
    """Text, texts, token ids and lists of them are served, n choices for each, in order."""
    async with serving(scheduler_mode="ar_batch") as (client, _):
        body = {"prompt": prompt, "max_tokens": 2, "n": 2}
        answer = await (await _post(client, "/v1/completions", body)).get_json()
    assert answer["object"] == "text_completion"
    assert [c["index"] for c in answer["choices"]] == list(range(2 * choices))
    assert {c["text"] for c in answer["choices"]} == {" w0 w1"}
    assert answer["usage"]["completion_tokens"] == 4 * choices


async def test_echo_repeats_each_prompt(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """With echo the text begins with its own prompt; max_tokens 0 then means the prompt alone."""
    async with serving() as (client, _):
        body = {"prompt": ["ab", "c"], "max_tokens": 1, "echo": True}
        both = await (await _post(client, "/v1/completions", body)).get_json()
        alone = await (await _post(client, "/v1/completions", {**body, "max_tokens": 0})).get_json()
        refused = await _post(client, "/v1/completions", {"prompt": "a", "max_tokens": 0})
    assert [c["text"] for c in both["choices"]] == ["ab w0", "c w0"]
    assert [c["text"] for c in alone["choices"]] == ["ab", "c"]
    assert alone["usage"]["completion_tokens"] == 0
    assert refused.status_code == 400


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [10**6]}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"guided_regex": "a+", "ignore_eos": True}, "ignore_eos"),
        ({"logprobs": 21}, "logprobs"),
        ({"n": 129}, "n"),
    ],
)
async def test_bad_legacy_input_names_the_field(
    serving: Serving, autojump_clock: trio.testing.MockClock, change: dict[str, Any], param: str
) -> None:
    """Legacy mistakes are 400s with `param`, too."""
    async with serving() as (client, _):
        answer = await _post(client, "/v1/completions", {"prompt": "a", **change})
        assert (await answer.get_json())["error"]["param"] == param
    assert answer.status_code == 400


async def test_models_lists_what_is_loaded(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """The one model is listed and found under its name; another name is a 404."""
    async with serving() as (client, _):
        listed = await (await client.get("/v1/models", headers=_LOCAL)).get_json()
        found = await client.get("/v1/models/fake", headers=_LOCAL)
        missing = await client.get("/v1/models/owner/other", headers=_LOCAL)
        code = (await missing.get_json())["error"]["code"]
    assert listed["data"][0]["id"] == "fake"
    assert listed["data"][0]["max_model_len"] == 8192
    assert found.status_code == 200
    assert (missing.status_code, code) == (404, "model_not_found")


async def test_tokenize_and_back(serving: Serving, autojump_clock: trio.testing.MockClock) -> None:
    """A conversation is counted as a chat would count it; unknown ids are refused."""
    async with serving() as (client, _):
        chat = {"messages": [{"role": "user", "content": "hello"}]}
        tokens = await (await _post(client, "/v1/tokenize", chat)).get_json()
        text = await (
            await _post(client, "/v1/detokenize", {"tokens": tokens["tokens"]})
        ).get_json()
        special = {**chat, "add_special_tokens": False}
        same = await _post(client, "/v1/tokenize", special)
        opened = await _post(client, "/v1/tokenize", {**special, "add_special_tokens": True})
        neither = await _post(client, "/v1/tokenize", {})
        unknown = await _post(client, "/v1/detokenize", {"tokens": [10**7]})
    assert tokens["count"] == len("user:hello\n")
    assert text == {"prompt": "user:hello\n"}
    assert same.status_code == 200
    assert neither.status_code == unknown.status_code == opened.status_code == 400


async def test_health_proves_what_ran(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """After eight rows together the telemetry says width 8 and one cohort of eight."""
    async with serving(scheduler_mode="ar_batch", batch_wait_ms=1000) as (client, _):
        before = await (await client.get("/health", headers=_LOCAL)).get_json()
        body = {"messages": [{"role": "user", "content": "x"}], "n": 8, "max_tokens": 5}
        await _post(client, "/v1/chat/completions", body)
        after = await (await client.get("/health", headers=_LOCAL)).get_json()
        page = await client.get("/metrics", headers=_LOCAL)
        metrics = await page.get_data(as_text=True)
    assert before["scheduler"]["telemetry"]["batch_histogram"] == {}
    scheduler = after["scheduler"]
    assert (scheduler["mode"], scheduler["active_lane"]) == ("ar_batch", "ar-b8")
    told = scheduler["telemetry"]
    assert (told["last_real_width"], told["batch_histogram"]) == (8, {"8": 1})
    assert (told["rows_peak"], told["active_rows"], told["steps"]) == (8, 0, 4)
    assert (told["tokens_committed"], told["state"]) == (40, "idle")
    assert told["queue_wait_s"]["p50"] is not None
    assert isinstance(metrics, str)
    assert "paceline_generation_tokens_total 40.0" in metrics
    assert 'paceline_cohorts_by_width_total{width="8"} 1.0' in metrics


async def test_health_says_how_drafts_fared(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Acceptance by depth, steps by depth, and the same in the metrics and in the answer."""
    settings = {"scheduler_mode": "mtp_batch", "batch_wait_ms": 1000, "speculative_depth": 3}
    async with serving(**settings) as (client, _):
        body = {"messages": [{"role": "user", "content": "x"}], "n": 8, "max_tokens": 13}
        answer = await (await _post(client, "/v1/chat/completions", body)).get_json()
        health = await (await client.get("/health", headers=_LOCAL)).get_json()
        metrics = await (await client.get("/metrics", headers=_LOCAL)).get_data(as_text=True)
    told = health["scheduler"]["telemetry"]
    assert told["acceptance_by_depth"] == {"1": 1.0, "2": 1.0, "3": 0.0}
    assert (told["mean_accepted"], told["steps_by_depth"]) == (2.0, {"3": 4})
    assert (told["drafted_tokens"], told["accepted_tokens"]) == (96, 64)
    config = health["scheduler"]["config"]
    assert (config["speculative_depth"], config["acceptance"], config["mtp"]) == (
        3,
        "coupled",
        True,
    )
    assert isinstance(metrics, str)
    assert "paceline_accepted_tokens_total 64.0" in metrics
    assert 'paceline_steps_by_depth_total{depth="3"} 4.0' in metrics
    assert (answer["paceline"]["drafted_tokens"], answer["paceline"]["accepted_tokens"]) == (96, 64)


async def test_what_the_prefix_bank_gave_is_told_and_takes_no_time(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """200 of 300 tokens come from the bank: usage, health and metrics say so; 100 are read."""
    nature = Nature(cached=200)
    async with serving(scheduler_mode="ar_batch", nature=nature) as (client, _):
        began = trio.current_time()
        body = {"prompt": "x" * 300, "max_tokens": 3}
        answer = await (await _post(client, "/v1/completions", body)).get_json()
        spent = trio.current_time() - began
        twice = await (await _post(client, "/v1/completions", {**body, "n": 2})).get_json()
        told = (await (await client.get("/health", headers=_LOCAL)).get_json())["scheduler"]
        metrics = await (await client.get("/metrics", headers=_LOCAL)).get_data(as_text=True)
    assert answer["usage"]["prompt_tokens"] == 300
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 200
    assert spent == pytest.approx(100 * READ_S + 2 * STEP_S)
    assert twice["usage"]["prompt_tokens_details"]["cached_tokens"] == 200
    assert told["telemetry"]["cached_tokens"] == 600
    assert told["telemetry"]["prompt_tokens"] == 300
    assert told["config"]["prefix_cache_bytes"] == 1 << 30
    assert "paceline_cached_tokens_total 600.0" in metrics


async def test_health_is_503_while_draining(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A draining server says so, and refuses new requests with 503."""
    async with serving() as (client, place):
        await place.house.drain(0)
        health = await client.get("/health", headers=_LOCAL)
        chat = {"messages": [{"role": "user", "content": "x"}]}
        refused = await _post(client, "/v1/chat/completions", chat)
        assert (await health.get_json())["status"] == "draining"
    assert health.status_code == refused.status_code == 503


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost"}, 200),
        ({"Host": "127.0.0.1:1234"}, 200),
        ({"Host": "[::1]:80"}, 200),
        ({"Host": "LOCALHOST"}, 200),
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1@evil.example"}, 421),
        ({"Host": ""}, 421),
        ({"Host": "localhost", "Origin": "https://evil.example"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost:5173"}, 200),
        ({"Host": "localhost", "Origin": "null"}, 403),
        ({"Host": "localhost", "Origin": "http://localhost.evil.example"}, 403),
    ],
)
async def test_only_local_hosts_and_pages_are_served(
    serving: Serving, autojump_clock: trio.testing.MockClock, headers: dict[str, str], status: int
) -> None:
    """DNS rebinding and foreign pages are refused before anything runs."""
    async with serving() as (client, _):
        answer = await client.get("/v1/models", headers=headers)
    assert answer.status_code == status


async def test_a_page_that_sends_plain_text_is_refused(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A POST that needs no preflight cannot start a generation."""
    async with serving() as (client, place):
        answer = await client.post("/v1/chat/completions", data=b"{}", headers=_LOCAL)
        assert place.house.meter.requests == {}
    assert answer.status_code == 415


async def test_a_preflight_is_answered(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """A page on this machine may ask first and is told what is allowed."""
    asked = {
        "Origin": "http://localhost:5173",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    async with serving() as (client, _):
        answer = await client.options("/v1/chat/completions", headers={**_LOCAL, **asked})
    assert answer.status_code == 204
    assert answer.headers["Access-Control-Allow-Origin"] == "http://localhost:5173"
    assert "POST" in answer.headers["Access-Control-Allow-Methods"]
    assert "authorization" in answer.headers["Access-Control-Allow-Headers"]


@pytest.mark.parametrize(
    ("given", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Bearer k\u00e9y"}, 401),
        ({"Authorization": "Basic first"}, 401),
        ({"Authorization": "Bearer first"}, 200),
        ({"Authorization": "bearer second"}, 200),
        ({"X-Api-Key": "first"}, 200),
    ],
)
async def test_a_key_is_required_when_one_is_set(
    serving: Serving, autojump_clock: trio.testing.MockClock, given: dict[str, str], status: int
) -> None:
    """Any of the keys opens the API, nothing else does, and health stays open."""
    async with serving(api_key=("first", "second")) as (client, _):
        answer = await client.get("/v1/models", headers={**_LOCAL, **given})
        health = await client.get("/health", headers=_LOCAL)
    assert answer.status_code == status
    assert health.status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/chat/completions", 405),
        ("GET", "/nope", 404),
        ("POST", "/v1/nope", 404),
        ("GET", "/v1/models/", 200),
        ("HEAD", "/", 200),
        ("GET", "/v1/models?api-version=1", 200),
    ],
)
async def test_odd_paths_get_json_errors(
    serving: Serving, autojump_clock: trio.testing.MockClock, method: str, path: str, status: int
) -> None:
    """Unknown routes and methods have OpenAI's error shape; slashes and queries are harmless."""
    async with serving() as (client, _):
        body: Any = {"json": {}} if method == "POST" else {}
        answer = await client.open(path, method=method, headers=_LOCAL, **body)
        if status >= 400:
            assert set((await answer.get_json())["error"]) == {"message", "type", "param", "code"}
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "hi"}]}),
    ],
)
async def test_any_model_is_served_unless_names_are_strict(
    serving: Serving, autojump_clock: trio.testing.MockClock, path: str, body: dict[str, Any]
) -> None:
    """A foreign name is served by the loaded model; with strict_model it is a 404 that says so."""
    async with serving(default_max_tokens=3) as (client, _):
        for name in ("gpt-5", "fake", None):
            answer = await _post(client, path, {**body, "model": name})
            assert answer.status_code == 200
            assert (await answer.get_json()).get("model", "fake") == "fake"
    async with serving(default_max_tokens=3, strict_model=True) as (client, _):
        for name in ("fake", None):
            assert (await _post(client, path, {**body, "model": name})).status_code == 200
        refused = await _post(client, path, {**body, "model": "gpt-5"})
        error = (await refused.get_json())["error"]
        assert refused.status_code == 404
        assert "'gpt-5' is not loaded" in error["message"]
        assert error.get("code", "model_not_found") == "model_not_found"


async def test_null_is_the_same_as_nothing(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """Every optional field of every body may be null."""
    bodies: dict[str, tuple[Any, dict[str, Any]]] = {
        "/v1/chat/completions": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}),
        "/v1/completions": (CompletionRequest, {}),
        "/v1/responses": (ResponsesRequest, {"input": "a"}),
        "/v1/messages": (
            MessagesRequest,
            {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        ),
    }
    async with serving(default_max_tokens=2) as (client, _):
        for path, (kind, needed) in bodies.items():
            nulls = dict.fromkeys(kind.__struct_fields__)
            assert (await _post(client, path, {**nulls, **needed})).status_code == 200


async def test_the_api_describes_itself(
    serving: Serving, autojump_clock: trio.testing.MockClock
) -> None:
    """The document names every route with a body that its own schema takes, and resolves."""
    async with serving() as (client, _):
        document = await (await client.get("/openapi.json", headers=_LOCAL)).get_json()
    assert document["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/v1/responses", "/v1/messages"} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    for path, methods in document["paths"].items():
        for operation in methods.values():
            content = operation["responses"]["200"]["content"]["application/json"]
            assert content["schema"]["$ref"].rpartition("/")[2] in schemas, path
    whole = {**schemas["ChatRequest"], "components": document["components"]}
    validator = jsonschema.Draft202012Validator(whole)
    assert validator.is_valid({"messages": [{"role": "user", "content": "a"}]})
    assert not validator.is_valid({"messages": [{"role": "boss", "content": "a"}]})
    assert not validator.is_valid({"messages": [{"role": "user", "content": "a"}], "min_tokens": 3})
