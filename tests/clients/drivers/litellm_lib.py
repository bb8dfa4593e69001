"""litellm: completion, stream, tools."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"
import litellm

WHERE = {"model": "openai/m", "api_base": sys.argv[1] + "/v1", "api_key": "any"}
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


def chat():
    assert litellm.completion(messages=ASK, max_tokens=12, **WHERE).choices[0].message.content


def stream():
    chunks = list(litellm.completion(messages=ASK, max_tokens=12, stream=True, **WHERE))
    assert litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message.content


def tools():
    chunks = list(
        litellm.completion(messages=ASK, tools=[TOOL], tool_choice="required", stream=True, **WHERE)
    )
    message = litellm.stream_chunk_builder(chunks, messages=ASK).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Oslo", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    history = [*ASK, message.model_dump(), result]
    answer = litellm.completion(messages=history, tools=[TOOL], max_tokens=12, **WHERE)
    assert answer.choices[0].message.content


for exercise in (chat, stream, tools):
    exercise()
    print("did", exercise.__name__)
