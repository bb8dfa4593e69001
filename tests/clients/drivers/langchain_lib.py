"""langchain-openai: invoke, stream, tools, structured output."""

import sys

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

WHERE = {"model": "m", "base_url": sys.argv[1] + "/v1", "api_key": "any", "max_retries": 0}
short = ChatOpenAI(max_tokens=12, **WHERE)
model = ChatOpenAI(**WHERE)
ASK = [HumanMessage("Say hello.")]


class Mood(BaseModel):
    """How it is."""

    good: bool


def weather(good: bool) -> str:
    """Weather, good or bad."""
    return "sunny" if good else "rainy"


def chat():
    assert short.invoke(ASK).content


def stream():
    assert "".join(chunk.content for chunk in short.stream(ASK))


def tools():
    whole = None
    for chunk in model.bind_tools([weather], tool_choice="required").stream(ASK):
        whole = chunk if whole is None else whole + chunk
    (call,) = whole.tool_calls
    assert isinstance(call["args"]["good"], bool)
    result = ToolMessage(weather(**call["args"]), tool_call_id=call["id"])
    assert short.invoke([*ASK, whole, result]).content


def parse():
    found = model.with_structured_output(Mood, method="json_schema").invoke(ASK)
    assert isinstance(found.good, bool)


for exercise in (chat, stream, tools, parse):
    exercise()
    print("did", exercise.__name__)
