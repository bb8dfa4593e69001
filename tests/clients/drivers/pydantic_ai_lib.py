"""pydantic-ai: run, stream, tools, structured output."""

import asyncio
import sys

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings

model = OpenAIChatModel("m", provider=OpenAIProvider(base_url=sys.argv[1] + "/v1", api_key="any"))
SHORT = ModelSettings(max_tokens=12)


class Mood(BaseModel):
    good: bool


async def chat():
    assert (await Agent(model, model_settings=SHORT).run("Say hello.")).output


async def stream():
    async with Agent(model, model_settings=SHORT).run_stream("Say hello.") as run:
        assert [text async for text in run.stream_text()]


async def tools():
    """The output type is a tool that the model must call."""
    found = (await Agent(model, output_type=Mood).run("How is it?")).output
    assert isinstance(found.good, bool)


async def parse():
    found = (await Agent(model, output_type=NativeOutput(Mood)).run("How is it?")).output
    assert isinstance(found.good, bool)


for exercise in (chat, stream, tools, parse):
    asyncio.run(exercise())
    print("did", exercise.__name__)
