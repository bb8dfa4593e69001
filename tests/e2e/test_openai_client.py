"""The official openai client against a real server: what its users rely on."""

import json
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from tests.e2e.conftest import Server

pytestmark = pytest.mark.slow

_SEA: list[Any] = [{"role": "user", "content": "Write one sentence about the sea."}]
_EMOJI: list[Any] = [
    {
        "role": "user",
        "content": "Repeat this line exactly: \U0001f389\U0001f680\U0001f642 "
        "\u4f60\u597d \U0001f389\U0001f680\U0001f642",
    }
]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def _ask(client: openai.OpenAI, messages: list[Any] = _SEA, **fields: Any) -> Any:
    fields = {"max_tokens": 16, "temperature": 0, **fields}
    return client.chat.completions.create(model="any", messages=messages, **fields)


def _streamed(client: openai.OpenAI, messages: list[Any] = _SEA, **fields: Any) -> list[Any]:
    return list(_ask(client, messages, stream=True, **fields))


def _text(chunks: list[Any]) -> str:
    return "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)


def test_chat_and_stream_agree(client: openai.OpenAI) -> None:
    """A streamed answer is the unstreamed one in several pieces, with usage when asked."""
    whole = _ask(client)
    chunks = _streamed(client, stream_options={"include_usage": True})
    assert whole.choices[0].finish_reason == "length"
    assert whole.model == "SmolLM2-135M-Instruct"
    assert _text(chunks) == whole.choices[0].message.content
    assert sum(bool(c.choices and c.choices[0].delta.content) for c in chunks) >= 8
    assert chunks[-1].usage == whole.usage
    assert whole.usage.completion_tokens == 16


def test_n_choices_differ_and_the_first_is_the_seeds_own(client: openai.OpenAI) -> None:
    """n: 2 gives two answers; choice 0 is what the same seed gives alone."""
    two = _ask(client, n=2, temperature=1.0, seed=5)
    one = _ask(client, temperature=1.0, seed=5)
    texts = [choice.message.content for choice in two.choices]
    assert texts[0] == one.choices[0].message.content
    assert texts[0] != texts[1]


def test_logprobs_spell_the_text(client: openai.OpenAI) -> None:
    """Entries' bytes joined are the content, streamed or not, with top_logprobs sorted."""
    whole = _ask(client, messages=_EMOJI, logprobs=True, top_logprobs=3, max_tokens=24)
    entries = whole.choices[0].logprobs.content
    spelled = b"".join(bytes(entry.bytes) for entry in entries)
    assert spelled.decode("utf-8", "ignore").startswith(whole.choices[0].message.content)
    assert all(len(entry.top_logprobs) == 3 for entry in entries)
    assert all(e.logprob == e.top_logprobs[0].logprob for e in entries), "greedy takes the top"
    chunks = _streamed(client, messages=_EMOJI, logprobs=True, top_logprobs=3, max_tokens=24)
    streamed = [e for c in chunks for e in ((c.choices[0].logprobs or _None).content or [])]
    assert streamed == entries


class _None:
    content = None


def test_errors_arrive_as_the_clients_own_exceptions(client: openai.OpenAI) -> None:
    """A 400 is BadRequestError with param and code; an unknown route is NotFoundError."""
    with pytest.raises(openai.BadRequestError) as bad:
        _ask(client, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        _ask(client, [{"role": "user", "content": "word " * 12_000}])
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="any", input="x")


def test_a_stop_string_over_tokens_cuts_and_is_not_billed(client: openai.OpenAI) -> None:
    """The text ends just before the stop, streamed or not, and later tokens are not counted."""
    text = _ask(client).choices[0].message.content
    stop = text[len(text) // 2 - 3 : len(text) // 2 + 4]
    expected = text[: text.index(stop)]
    for asked in (stop, [stop], ["never seen", stop]):
        cut = _ask(client, stop=asked)
        assert cut.choices[0].message.content == expected
        assert cut.choices[0].finish_reason == "stop"
        assert 0 < cut.usage.completion_tokens < 16
    assert _text(_streamed(client, stop=stop)) == expected
    assert _text(_streamed(client, stop=text[5:9] + "\u2603")) == text


def test_no_half_characters_whatever_the_budget(client: openai.OpenAI) -> None:
    """Every budget's text begins the next one's, streamed and whole, with no U+FFFD."""
    before = ""
    for budget in (1, 2, 3, 5, 7, 12):
        whole = _ask(client, _EMOJI, max_tokens=budget).choices[0].message.content
        assert _text(_streamed(client, _EMOJI, max_tokens=budget)) == whole
        assert whole.startswith(before)
        assert "\ufffd" not in whole
        before = whole


def test_a_seed_gives_the_same_answer_beside_any_neighbours(client: openai.OpenAI) -> None:
    """The same seeded request alone and among seven others gives the same text."""
    alone = _ask(client, seed=7, temperature=1.0).choices[0].message.content
    others: list[dict[str, Any]] = [
        {"temperature": 1.3, "max_tokens": 30 + 5 * i, "extra_body": {"ignore_eos": True}}
        for i in range(7)
    ]
    with ThreadPoolExecutor(8) as pool:
        crowd = [pool.submit(_ask, client, **fields) for fields in others]
        seeded = pool.submit(_ask, client, seed=7, temperature=1.0)
        for future in crowd:
            future.result()
        assert seeded.result().choices[0].message.content == alone
    assert seeded.result().paceline["widths"] != [1], "it did run among others"
    fresh = {_ask(client, temperature=1.0).choices[0].message.content for _ in range(3)}
    assert len(fresh) == 3, "without a seed answers differ"


def test_rows_of_a_cohort_keep_their_own_settings(client: openai.OpenAI) -> None:
    """Budgets, stops, penalties and logit bias of one row do nothing to another."""
    plain = _ask(client).choices[0].message.content
    asked: list[dict[str, Any]] = [
        {"max_tokens": 2},
        {"max_tokens": 5},
        {"stop": plain[4:10]},
        {"frequency_penalty": 2.0, "presence_penalty": 2.0},
        {"logit_bias": {"28": -100}},
        {"temperature": 1.3, "seed": 3},
        {},
    ]
    with ThreadPoolExecutor(len(asked)) as pool:
        found = [f.result() for f in [pool.submit(_ask, client, **a) for a in asked]]
    assert found[-1].choices[0].message.content == plain
    assert [a.usage.completion_tokens for a in found[:2]] == [2, 5]
    assert found[2].choices[0].message.content == plain[:4]
    assert "," not in found[4].choices[0].message.content
    alone = [_ask(client, **a).choices[0].message.content for a in asked]
    assert [a.choices[0].message.content for a in found] == alone


def test_eight_requests_prove_their_width(client: openai.OpenAI, server: Server) -> None:
    """Eight at once reach width 8, and health can prove it afterwards."""
    with ThreadPoolExecutor(8) as pool:
        asked: dict[str, Any] = {"max_tokens": 40, "extra_body": {"ignore_eos": True}}
        found = list(pool.map(lambda i: _ask(client, seed=i, **asked), range(8)))
    assert max(max(answer.paceline["widths"]) for answer in found) == 8
    with urllib.request.urlopen(f"{server.url}/health") as answer:
        told = json.load(answer)["scheduler"]
    assert int(told["telemetry"]["batch_histogram"]["8"]) >= 1
    assert {lane["name"] for lane in told["installed_lanes"]} == {"ar-b1", "ar-b3", "ar-b8"}


def test_roles_parts_and_markers(client: openai.OpenAI) -> None:
    """developer is system, parts are their text, and typed control tokens open no turn."""

    def prompt_tokens(*messages: dict[str, Any]) -> int:
        return int(_ask(client, list(messages), max_tokens=1).usage.prompt_tokens)

    user = {"role": "user", "content": "hello"}
    system = prompt_tokens({"role": "system", "content": "Be brief."}, user)
    assert prompt_tokens({"role": "developer", "content": "Be brief."}, user) == system
    parts = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    assert prompt_tokens(parts) == prompt_tokens(user)
    typed = {"role": "user", "content": "hello<|im_end|>"}
    assert prompt_tokens(typed) - prompt_tokens(user) >= 3
    history: dict[str, Any] = {
        "role": "assistant",
        "content": "Hi!",
        "refusal": None,
        "annotations": [],
    }
    assert prompt_tokens(user, history, user) > prompt_tokens(user)


def test_legacy_completions(client: openai.OpenAI) -> None:
    """Prompts as text and tokens agree; echo with logprobs scores the prompt itself."""
    fields: dict[str, Any] = {"model": "any", "temperature": 0}
    text = client.completions.create(prompt="The sea is", **fields)
    assert text.usage is not None
    assert text.usage.completion_tokens <= 16
    chunks = client.completions.create(prompt="The sea is", stream=True, **fields)
    assert "".join(c.choices[0].text for c in chunks) == text.choices[0].text
    scored = client.completions.create(
        prompt="The sea is", echo=True, logprobs=2, max_tokens=2, **fields
    ).choices[0]
    assert scored.logprobs is not None
    assert scored.text.startswith("The sea is")
    assert "".join(scored.logprobs.tokens or []) == scored.text
    assert scored.logprobs.token_logprobs is not None
    assert scored.logprobs.token_logprobs[0] is None
    assert all(p < 0 for p in scored.logprobs.token_logprobs[1:])
    assert scored.logprobs.text_offset is not None
    assert [scored.text[at] for at in scored.logprobs.text_offset] == [
        token[0] for token in scored.logprobs.tokens or []
    ]


_WEATHER: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
                "required": ["city"],
            },
        },
    }
]


def test_a_forced_call_is_valid_and_its_result_is_answered(client: openai.OpenAI) -> None:
    """The starter model, which calls nothing of its own accord, calls what it must, in a stream."""
    with client.chat.completions.stream(
        model="any",
        messages=_SEA,
        tools=_WEATHER,
        tool_choice="required",
        max_tokens=80,
        temperature=1.0,
        seed=3,
    ) as stream:
        choice = stream.get_final_completion().choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.tool_calls is not None
    (call,) = choice.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert isinstance(arguments["city"], str)
    assert set(arguments) <= {"city", "days"}
    history = [
        *_SEA,
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert _ask(client, history, tools=_WEATHER).choices[0].message.content


def test_a_schema_is_kept_at_any_budget(client: openai.OpenAI) -> None:
    """Eight seeds side by side: all are JSON of the schema, however short their budget."""
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "tags": {"type": "array", "minItems": 1}},
        "required": ["name", "tags"],
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}

    def one(seed: int) -> Any:
        return _ask(client, seed=seed, temperature=1.2, max_tokens=48, response_format=form)

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(one, range(8)))
    for answer in answers:
        found = json.loads(answer.choices[0].message.content)
        assert set(found) == {"name", "tags"}
        assert answer.choices[0].finish_reason == "stop"
    assert _ask(client, seed=0, temperature=1.2, max_tokens=48, response_format=form).choices == [
        answers[0].choices[0]
    ]


def test_responses_go_on_by_their_ids(client: openai.OpenAI) -> None:
    """The Responses helper accepts our events, and a kept answer is remembered."""
    schema = {"type": "object", "properties": {"good": {"type": "boolean"}}, "required": ["good"]}
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema}}
    with client.responses.stream(model="any", input="Is it good?", text=form) as stream:
        first = stream.get_final_response()
    assert isinstance(json.loads(first.output_text)["good"], bool)
    second = client.responses.create(
        model="any", input="And now?", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.usage is not None
    assert first.usage is not None
    assert second.usage.input_tokens > first.usage.input_tokens
