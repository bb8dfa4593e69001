"""From messages and tools to a prompt: what a chat template reads of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ..runtime.errors import CallerError, ContextOverflow
from ..runtime.text import ChatPrompt, Text
from .intake import JsonBounds
from .offload import COUNTS, PROMPTS, at_length, is_long
from .schemas import (
    AssistantMessage,
    Content,
    DeveloperMessage,
    Message,
    RefusalPart,
    TextPart,
    Tool,
    ToolMessage,
)


class Setting(msgspec.Struct, frozen=True):
    """How a conversation is set before the model.

    Args:
        tools: Functions it is told of, as `described` gives them.
        options: Further variables of the chat template.
        lead: What the answer is made to begin with.
        go_on: Let the answer go on with the last message.
        where: The field that holds the messages, for errors.
        most: The tokens there is room for; None where they are only counted.
    """

    tools: Sequence[dict[str, Any]] = ()
    options: Mapping[str, Any] = {}
    lead: str = ""
    go_on: bool = False
    where: str = "messages"
    most: int | None = None


async def encode_chat(text: Text, messages: Sequence[Message], setting: Setting) -> ChatPrompt:
    """Return the prompt of a conversation, long ones worked out off the event loop.

    Raises:
        CallerError: For content that a text model cannot take.
        ContextOverflow: For more messages than there is room for tokens.
    """
    if setting.most is not None and len(messages) > setting.most:
        raise ContextOverflow(setting.most, setting.most, param=setting.where, exact=False)

    def encode() -> ChatPrompt:
        bounds = JsonBounds()
        plain = [
            plain_message(message, f"{setting.where}[{at}]", bounds)
            for at, message in enumerate(messages)
        ]
        return text.chat(
            plain,
            setting.tools,
            options=setting.options,
            lead=setting.lead,
            go_on=setting.go_on,
            most=setting.most,
            where=setting.where,
        )

    long = is_long([messages, setting.tools, setting.options])
    return await at_length(encode, long, COUNTS if setting.most is None else PROMPTS)


def described(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates and parsers read it: what it says, without empty fields."""
    function = tool.function
    said = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": {k: v for k, v in said.items() if v is not None}}


def plain_message(message: Message, where: str, bounds: JsonBounds) -> dict[str, Any]:
    """Return what a chat template reads of a message; developer is its name for system.

    Args:
        bounds: What calls' arguments of the whole conversation may hold together.

    Raises:
        CallerError: When a part is neither text nor refusal, or a call's arguments hold too much.
    """
    role = "system" if isinstance(message, DeveloperMessage) else _role(message)
    plain: dict[str, Any] = {"role": role, "content": _flat(message.content, where)}
    if isinstance(message, AssistantMessage):
        if message.refusal and not message.content:
            plain["content"] = message.refusal
        if message.reasoning_content:
            plain["reasoning_content"] = message.reasoning_content
        if message.tool_calls:
            plain["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": _arguments(
                            call.function.arguments,
                            f"{where}.tool_calls[{at}].function.arguments",
                            bounds,
                        ),
                    },
                }
                for at, call in enumerate(message.tool_calls)
            ]
    if isinstance(message, ToolMessage):
        plain["tool_call_id"] = message.tool_call_id
    return plain


def _role(message: Message) -> str:
    return str(type(message).__struct_config__.tag)


def _flat(content: Content | None, where: str) -> str:
    """Return a message's text; parts are joined as they are."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    pieces = []
    for at, part in enumerate(content):
        match part:
            case TextPart(text):
                pieces.append(text)
            case RefusalPart(refusal):
                pieces.append(refusal)
            case _:
                kind = type(part).__struct_config__.tag
                raise CallerError(
                    f"{where}.content[{at}]: a text model cannot take {kind!r} parts",
                    param=f"{where}.content[{at}]",
                )
    return "".join(pieces)


def _arguments(text: str, where: str, bounds: JsonBounds) -> Any:
    """Return a call's arguments as templates read them: an object where the text is one."""
    raw = text.encode("utf-8", "replace")
    bounds.check(raw, where)
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return text
