"""The openai package: chat, stream, tools, structured output, responses."""

import json
import sys

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="any", max_retries=0)
ASK = [{"role": "user", "content": "Say hello."}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Rome"]}},
            "required": ["city"],
        },
    },
}


class Answer(BaseModel):
    mood: bool


def chat():
    answer = client.chat.completions.create(model="m", messages=ASK, max_tokens=12)
    assert answer.choices[0].message.content


def stream():
    chunks = client.chat.completions.create(
        model="m", messages=ASK, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(chunks)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert chunks[-1].usage.completion_tokens


def tools():
    with client.chat.completions.stream(
        model="m", messages=ASK, tools=[TOOL], tool_choice="required"
    ) as events:
        message = events.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history = [*ASK, message.model_dump(exclude_none=True), result]
    answer = client.chat.completions.create(
        model="m", messages=history, tools=[TOOL], tool_choice="none", max_tokens=12
    )
    assert answer.choices[0].message.content


def parse():
    answer = client.chat.completions.parse(model="m", messages=ASK, response_format=Answer)
    assert isinstance(answer.choices[0].message.parsed.mood, bool)


def responses():
    # A form lets the answer end by itself, which is the only end that the helper knows.
    with client.responses.stream(model="m", input="Say hello.", text_format=Answer) as events:
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        first = events.get_final_response()
    assert text == first.output_text
    tool = {"type": "function", **TOOL["function"]}
    second = client.responses.create(
        model="m",
        input="And the weather?",
        previous_response_id=first.id,
        tools=[tool],
        tool_choice="required",
    )
    (call,) = second.output
    done = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    third = client.responses.create(
        model="m", input=[done], previous_response_id=second.id, max_output_tokens=12
    )
    assert third.output_text


for exercise in (chat, stream, tools, parse, responses):
    exercise()
    print("did", exercise.__name__)
