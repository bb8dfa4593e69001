"""From messages and tools to a prompt: what a chat template reads of them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import msgspec
import trio

from ..runtime.errors import BusyError, CallerError, ContextOverflow
from ..runtime.text import ChatPrompt, Text
from .intake import aside, check_json
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

Result = TypeVar("Result")

INLINE_CHARACTERS: Final = 16_384  # longer prompts are tokenized off the event loop
_INLINE_PARTS: Final = 1_024  # messages, blocks, keys and values that are looked through there
_AT_A_TIME: Final = 2  # long texts in work; each holds memory that grows with it
_LONG_WORK: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("long_work")
_FORM_WORK: Final = trio.lowlevel.RunVar[trio.CapacityLimiter]("form_work")
_MOST_WAITING: Final = 64  # requests whose forms wait to be compiled


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
        plain = [plain_message(m, f"{setting.where}[{i}]") for i, m in enumerate(messages)]
        return text.chat(
            plain,
            setting.tools,
            options=setting.options,
            lead=setting.lead,
            go_on=setting.go_on,
            most=setting.most,
            where=setting.where,
        )

    return await at_length(encode, is_long([messages, setting.tools, setting.options]))


async def formed(work: Callable[[], Result], shaped: bool) -> Result:
    """Do work on the form of an answer: at once where there is none, else a few at a time.

    Apart from all other work, which a schema that takes long would keep waiting.

    Raises:
        BusyError: When too many wait already.
    """
    if not shaped:
        return work()
    limiter = _few(_FORM_WORK)
    if limiter.statistics().tasks_waiting >= _MOST_WAITING:
        raise BusyError("too many schemas and grammars are being compiled; try again", 2)
    return await aside(work, limiter)


async def at_length(work: Callable[[], Result], long: bool) -> Result:
    """Do work on text: at once, or in a thread where it is long, a few such at a time."""
    if not long:
        return work()
    return await aside(work, _few(_LONG_WORK))


def _few(kind: trio.lowlevel.RunVar[trio.CapacityLimiter]) -> trio.CapacityLimiter:
    """Return what lets a few of one kind of work run at a time."""
    try:
        return kind.get()
    except LookupError:
        limiter = trio.CapacityLimiter(_AT_A_TIME)
        kind.set(limiter)
        return limiter


def is_long(value: Any) -> bool:
    """Say whether work on a value's texts takes long, without looking through all of a long one."""
    left, parts = INLINE_CHARACTERS, _INLINE_PARTS
    todo: list[Any] = [value]
    while todo:
        item = todo.pop()
        parts -= 1
        if isinstance(item, str):
            left -= len(item)
        elif isinstance(item, Mapping):
            parts -= len(item)
            todo += [*item, *item.values()] if parts > 0 else []
        elif isinstance(item, list | tuple):
            parts -= len(item)
            todo += item if parts > 0 else []
        elif isinstance(item, msgspec.Struct):
            todo += [getattr(item, name) for name in item.__struct_fields__]
        if left < 0 or parts < 0:
            return True
    return False


def described(tool: Tool) -> dict[str, Any]:
    """Return a tool as templates and parsers read it: what it says, without empty fields."""
    function = tool.function
    said = {
        "name": function.name,
        "description": function.description,
        "parameters": function.parameters or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": {k: v for k, v in said.items() if v is not None}}


def plain_message(message: Message, where: str) -> dict[str, Any]:
    """Return what a chat template reads of a message; developer is its name for system.

    Raises:
        CallerError: When a part is neither text nor refusal.
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
                            call.function.arguments, f"{where}.tool_calls[{at}].function.arguments"
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


def _arguments(text: str, where: str) -> Any:
    """Return a call's arguments as templates read them: an object where the text is one.

    Raises:
        CallerError: When they are nested too deeply.
    """
    raw = text.encode("utf-8", "replace")
    check_json(raw, where)
    try:
        return msgspec.json.decode(raw)
    except msgspec.DecodeError:
        return text
