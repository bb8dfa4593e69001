"""Bodies of /v1/messages, and the chat request that each one means.

Source: Anthropic API reference (Messages, version 2023-06-01).
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Struct

from ...runtime.errors import CallerError
from ..forms import guided
from ..known import Route
from ..schemas import (
    AssistantMessage,
    ChatRequest,
    FunctionCall,
    FunctionTool,
    JsonSchemaFormat,
    Message,
    NamedSchema,
    NamedToolChoice,
    Positive,
    SamplingFields,
    Stops,
    SystemMessage,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
    ToolName,
    UserMessage,
)


class TextBlock(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ImageBlock(Struct, tag_field="type", tag="image"):
    """An image; a text model cannot see it."""


class DocumentBlock(Struct, tag_field="type", tag="document"):
    """A document; nothing here reads it."""


class ThinkingBlock(Struct, tag_field="type", tag="thinking"):
    """What the model thought."""

    thinking: str


class RedactedThinkingBlock(Struct, tag_field="type", tag="redacted_thinking"):
    """A thought that cannot be read; it is left out."""


class ToolUseBlock(Struct, tag_field="type", tag="tool_use"):
    """A call the model made."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(Struct, tag_field="type", tag="tool_result"):
    """What a call brought."""

    tool_use_id: str
    content: str | list[TextBlock | ImageBlock | DocumentBlock] | None = None
    is_error: bool | None = None


Block = (
    TextBlock | ImageBlock | DocumentBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock
    | ToolResultBlock
)  # fmt: skip


class Turn(Struct):
    """What one side said; some clients put instructions between turns."""

    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class ToolSpec(Struct):
    """The description of a callable tool."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    strict: bool | None = None


class Choice(Struct):
    """Which tool to call."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class ThinkingSettings(Struct):
    """Whether to think; how long is the model's own affair."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class FormatSpec(Struct):
    """JSON that a schema describes."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputSettings(Struct):
    """What form the answer must have, and how hard to think about it."""

    effort: str | None = None
    format: FormatSpec | None = None


class CountRequest(SamplingFields, kw_only=True):
    """POST /v1/messages/count_tokens; sampling extensions are those of the other routes."""

    route: ClassVar[Route] = "count"

    messages: Annotated[list[Turn], Meta(min_length=1)]
    system: str | list[TextBlock | ImageBlock] | None = None
    tools: list[ToolSpec] | None = None
    tool_choice: Choice | None = None
    thinking: ThinkingSettings | None = None
    output_config: OutputSettings | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # extension
    stop_sequences: Stops | None = None


class MessagesRequest(CountRequest, kw_only=True):
    """POST /v1/messages."""

    route: ClassVar[Route] = "messages"

    max_tokens: Positive


# What chat_form and chat_order call a field, and what it is called here.
FIELDS: Final = {
    "response_format.json_schema.schema": "output_config.format.schema",
    "response_format": "output_config.format",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function.name": "tools[].name",
}
# Claude Code's own note to its service, another one in each request; no word to the model.
_NOTE: Final = "x-anthropic-billing-header:"


def understood(body: CountRequest) -> tuple[ChatRequest, bool]:
    """Return the chat request that a body means, and whether the answer goes on with its end.

    Raises:
        CallerError: For what cannot be served.
    """
    messages = [*_system(body.system), *_messages(body.messages)]
    output = body.output_config or OutputSettings()
    shared = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    chat = ChatRequest(
        messages=messages,
        tools=[_tool(tool, f"tools[{at}]") for at, tool in enumerate(body.tools or [])] or None,
        tool_choice=_choice(body.tool_choice),
        reasoning_effort=output.effort,
        chat_template_kwargs={
            "enable_thinking": _thinks(body.thinking),
            **(body.chat_template_kwargs or {}),
        },
        **{**shared, "stop": _stops(body)},
    )
    if body.tool_choice is not None and body.tool_choice.disable_parallel_tool_use:
        chat.parallel_tool_calls = False
    if output.format is not None:
        chat.response_format = JsonSchemaFormat(NamedSchema("answer", output.format.schema))
    if isinstance(body, MessagesRequest):
        chat.max_tokens = body.max_tokens
    last = messages[-1]
    go_on = isinstance(last, AssistantMessage) and not last.tool_calls
    if go_on and (form := _form(chat)) is not None:
        raise CallerError(
            f"{form} cannot be kept by an answer that goes on with the assistant's words; "
            "end with a message of the user",
            param=form,
        )
    return chat, go_on


def _stops(body: CountRequest) -> Any:
    if body.stop and body.stop_sequences:
        raise CallerError("stop cannot be kept together with stop_sequences", param="stop")
    return body.stop_sequences or body.stop


def _form(chat: ChatRequest) -> str | None:
    """Return the field that asks for a form of the whole answer, if any."""
    if chat.response_format is not None:
        return "output_config.format"
    source = guided(chat)
    return None if source is None else source.param


def _thinks(thinking: ThinkingSettings | None) -> bool:
    return thinking is not None and thinking.type != "disabled"


def _tool(spec: ToolSpec, where: str) -> Tool:
    if spec.input_schema is None and spec.type not in (None, "custom"):
        raise CallerError(
            f"{where}.type: {spec.type!r} tools are not served; only custom ones are",
            param=f"{where}.type",
        )
    return Tool(FunctionTool(spec.name, spec.description, spec.input_schema, spec.strict))


def _choice(choice: Choice | None) -> ToolChoice | None:
    match choice:
        case None:
            return None
        case Choice("tool", None):
            raise CallerError("tool_choice.name: missing", param="tool_choice.name")
        case Choice("tool", str() as name):
            return NamedToolChoice(ToolName(name))
        case Choice("any"):
            return "required"
        case Choice("none"):
            return "none"
        case _:
            return "auto"


def _system(system: str | Sequence[Block] | None) -> list[Message]:
    blocks = [TextBlock(system)] if isinstance(system, str) else system or []
    texts = []
    for at, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            param = f"system[{at}]"
            raise CallerError(f"{param}: a text model cannot take images", param=param)
        texts.append(block.text)
    kept = [text for text in texts if text and not text.startswith(_NOTE)]
    return [SystemMessage("\n\n".join(kept))] if kept else []


def _messages(turns: Sequence[Turn]) -> Iterator[Message]:
    """Give each turn as the messages it means: results of tools stand before what is said."""
    for at, turn in enumerate(turns):
        where = f"messages[{at}]"
        if isinstance(turn.content, str):
            blocks: list[Block] = [TextBlock(turn.content)]
        else:
            blocks = turn.content
        match turn.role:
            case "system":
                yield SystemMessage(_said(blocks, where))
            case "assistant":
                yield _assistant(blocks, where)
            case "user":
                results = 0
                for place, block in enumerate(blocks):
                    if isinstance(block, ToolResultBlock):
                        yield _result(block, f"{where}.content[{place}]")
                        results += 1
                if results < len(blocks) or not blocks:
                    yield UserMessage(_said(blocks, where))


def _assistant(blocks: Sequence[Block], where: str) -> AssistantMessage:
    calls, thoughts = [], []
    for at, block in enumerate(blocks):
        match block:
            case ToolUseBlock(id, name, input):
                calls.append(ToolCall(id, FunctionCall(name, json.dumps(input))))
            case ThinkingBlock(thinking):
                thoughts.append(thinking)
            case ToolResultBlock():
                param = f"{where}.content[{at}]"
                raise CallerError(f"{param}: results of tools are the user's", param=param)
    return AssistantMessage(
        _said(blocks, where), tool_calls=calls or None, reasoning_content="".join(thoughts) or None
    )


def _result(block: ToolResultBlock, where: str) -> ToolMessage:
    blocks = block.content or []
    said = _said([TextBlock(blocks)] if isinstance(blocks, str) else blocks, where)
    if block.is_error:
        said = f"Error:\n{said}" if blocks else "Error:"
    return ToolMessage(said, block.tool_use_id)


def _said(blocks: Sequence[Block], where: str) -> str:
    """Return what text blocks say.

    Raises:
        CallerError: For an image or a document.
    """
    texts: list[str] = []
    for at, block in enumerate(blocks):
        match block:
            case TextBlock(text):
                texts.append(text)
            case ImageBlock() | DocumentBlock():
                param = f"{where}.content[{at}]"
                kind = type(block).__struct_config__.tag
                raise CallerError(f"{param}: a text model cannot take {kind!r} blocks", param=param)
    return "\n".join(texts)
