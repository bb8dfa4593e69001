"""The anthropic package: messages, stream, tools, count_tokens."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="any", max_retries=0)
ASK = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "name": "weather",
    "description": "Weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Oslo", "Rome"]}},
        "required": ["city"],
    },
}


def chat():
    answer = client.messages.create(model="m", max_tokens=12, messages=ASK)
    assert answer.content[0].text


def stream():
    with client.messages.stream(model="m", max_tokens=12, messages=ASK) as events:
        text = "".join(events.text_stream)
        assert text == events.get_final_message().content[0].text


def tools():
    with client.messages.stream(
        model="m", max_tokens=200, messages=ASK, tools=[TOOL], tool_choice={"type": "any"}
    ) as events:
        message = events.get_final_message()
    (call,) = message.content
    assert call.input["city"] in ("Oslo", "Rome")
    assert message.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}
    history = [
        *ASK,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    answer = client.messages.create(model="m", max_tokens=12, messages=history, tools=[TOOL])
    assert answer.content


def count():
    assert client.messages.count_tokens(model="m", messages=ASK).input_tokens > 3


for exercise in (chat, stream, tools, count):
    exercise()
    print("did", exercise.__name__)
