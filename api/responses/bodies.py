"""Bodies of /v1/responses, and the chat request that each one means.

Source: OpenAI API description 2.3 (responses).
"""

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal, assert_never

import msgspec
from msgspec import Meta, Struct

from ...runtime.errors import CallerError
from ..problems import explained
from ..schemas import (
    Alternatives,
    AssistantMessage,
    ChatRequest,
    DeveloperMessage,
    FunctionCall,
    FunctionTool,
    ImagePart,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedSchema,
    NamedToolChoice,
    Positive,
    ResponseFormat,
    SamplingFields,
    SystemMessage,
    TextPart,
    Tool,
    ToolCall,
    ToolChoice,
    ToolMessage,
    ToolName,
    UserMessage,
)


class _Words(Struct):
    """What parts of text share."""

    text: str


class InputText(_Words, tag_field="type", tag="input_text"):
    """A piece of what somebody said."""


class OutputText(_Words, tag_field="type", tag="output_text"):
    """A piece of what the model said."""


class PlainText(_Words, tag_field="type", tag="text"):
    """A piece of text, as some clients call it."""


class SummaryText(_Words, tag_field="type", tag="summary_text"):
    """A piece of a summary."""


class ReasoningText(_Words, tag_field="type", tag="reasoning_text"):
    """A piece of a thought."""


class Refusal(Struct, tag_field="type", tag="refusal"):
    """What the model would not say."""

    refusal: str


class InputImage(Struct, tag_field="type", tag="input_image"):
    """An image; a text model cannot see it."""


class InputFile(Struct, tag_field="type", tag="input_file"):
    """A file; nothing here reads it."""


Piece = (
    InputText | OutputText | PlainText | SummaryText | ReasoningText | Refusal | InputImage
    | InputFile
)  # fmt: skip
Content = str | list[Piece]


class MessageItem(Struct, tag_field="type", tag="message"):
    """What somebody said."""

    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(Struct, tag_field="type", tag="function_call"):
    """A call the model made."""

    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(Struct, tag_field="type", tag="function_call_output"):
    """What a call brought."""

    call_id: str
    output: Content


class ReasoningItem(Struct, tag_field="type", tag="reasoning"):
    """What the model thought; what is encrypted cannot be read here and is left out."""

    content: list[Piece] | None = None
    summary: list[Piece] | None = None


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem


class FunctionSpec(Struct, tag_field="type", tag="function"):
    """The description of a callable function."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextSpec(Struct, tag_field="type", tag="text"):
    """Any text."""


class JsonObjectSpec(Struct, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchemaSpec(Struct, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    name: str
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(Struct):
    """What form text must have."""

    format: TextSpec | JsonObjectSpec | JsonSchemaSpec | None = None
    verbosity: str | None = None


class Reasoning(Struct):
    """How the model is to think."""

    effort: str | None = None
    summary: str | None = None


class NamedFunction(Struct, tag_field="type", tag="function"):
    """This function must be called."""

    name: str


class ResponsesRequest(SamplingFields, kw_only=True):
    """POST /v1/responses; sampling extensions are those of the other routes."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: Alternatives | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    truncation: str | None = None
    background: bool | None = None
    conversation: Any = None
    prompt: Any = None


LOGPROBS: Final = "message.output_text.logprobs"
# What chat_form and chat_order call a field, and what it is called here.
FIELDS: Final = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}
# Tools of the server's own: the model is not told of them, since nothing here can run them.
_UNTOLD: Final = ("web_search",)


class Asked(Struct, frozen=True):
    """A body understood.

    Args:
        chat: The chat request it means.
        conversation: Its messages without the instructions, which are of this response only.
        spaces: Of functions that stand in a namespace, which.
    """

    chat: ChatRequest
    conversation: tuple[Message, ...]
    spaces: dict[str, str]


def understood(body: ResponsesRequest, history: Sequence[Message]) -> Asked:
    """Return the chat request that a body means.

    Args:
        history: What was said before, under `previous_response_id`.

    Raises:
        CallerError: For what cannot be served.
    """
    for name in ("background", "conversation", "prompt"):
        if getattr(body, name):
            raise CallerError(f"{name} is not served; see docs/api.md", param=name)
    if body.n not in (None, 1):
        raise CallerError("n: a response is one answer", param="n")
    if body.truncation not in (None, "disabled"):
        raise CallerError("truncation: only 'disabled' is served", param="truncation")
    said = _messages(body.input)
    instructions = [DeveloperMessage(body.instructions)] if body.instructions else []
    messages = [*instructions, *history, *said]
    if not messages:
        raise CallerError("input: there is nothing to answer", param="input")
    tools, spaces = _tools(body.tools or [])
    shared = {name: getattr(body, name) for name in SamplingFields.__struct_fields__}
    chat = ChatRequest(
        messages=messages,
        max_tokens=body.max_output_tokens,
        logprobs=LOGPROBS in (body.include or ()) or bool(body.top_logprobs),
        top_logprobs=body.top_logprobs,
        tools=tools or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        **shared,
    )
    return Asked(chat, (*history, *said), spaces)


def _choice(choice: str | NamedFunction | None) -> ToolChoice | None:
    if isinstance(choice, NamedFunction):
        return NamedToolChoice(ToolName(choice.name))
    return choice  # type: ignore[return-value]  # the same three words


def _format(text: TextSettings | None) -> ResponseFormat | None:
    match text.format if text else None:
        case JsonObjectSpec():
            return JsonObjectFormat()
        case JsonSchemaSpec(name, schema, strict):
            return JsonSchemaFormat(NamedSchema(name, schema, None, strict))
        case _:
            return None


def _tools(given: Sequence[dict[str, Any]]) -> tuple[list[Tool], dict[str, str]]:
    """Return functions, those in namespaces too, and which namespace each of those is in."""
    tools: list[Tool] = []
    spaces: dict[str, str] = {}
    for at, tool in enumerate(given):
        where, kind = f"tools[{at}]", tool.get("type")
        if kind == "namespace":
            inner = tool.get("tools")
            for place, function in enumerate(inner if isinstance(inner, list) else ()):
                spec = _converted(function, FunctionSpec, f"{where}.tools[{place}]")
                spaces[spec.name] = str(tool.get("name", ""))
                tools.append(_tool(spec))
        elif kind == "function":
            tools.append(_tool(_converted(tool, FunctionSpec, where)))
        elif not str(kind).startswith(_UNTOLD):
            raise CallerError(
                f"{where}.type: {kind!r} tools are not served; only functions are",
                param=f"{where}.type",
            )
    return tools, spaces


def _tool(spec: FunctionSpec) -> Tool:
    return Tool(FunctionTool(spec.name, spec.description, spec.parameters, spec.strict))


def _messages(given: str | list[dict[str, Any]]) -> list[Message]:
    """Return what an input says; calls join the assistant's message before them."""
    if isinstance(given, str):
        return [UserMessage(given)]
    messages: list[Message] = []
    thought: str | None = None
    for at, raw in enumerate(given):
        where = f"input[{at}]"
        item: Item = _converted({"type": "message", **raw}, Item, where)
        match item:
            case MessageItem(role, content):
                text = _parts(content, where)
                if role == "assistant":
                    messages.append(AssistantMessage(text, reasoning_content=thought))
                    thought = None
                elif role == "user":
                    messages.append(UserMessage(text))
                elif role == "system":
                    messages.append(SystemMessage(text))
                else:
                    messages.append(DeveloperMessage(text))
            case FunctionCallItem(call_id, name, arguments):
                call = ToolCall(call_id, FunctionCall(name, arguments))
                last = messages[-1] if messages else None
                if not isinstance(last, AssistantMessage):
                    last = AssistantMessage(reasoning_content=thought)
                    messages.append(last)
                    thought = None
                last.tool_calls = [*(last.tool_calls or []), call]
            case FunctionOutputItem(call_id, output):
                messages.append(ToolMessage(_parts(output, where), call_id))
            case ReasoningItem(content, summary):
                thought = _plain(content or summary or []) or None
            case _:
                assert_never(item)
    return messages


def _converted(raw: Any, kind: Any, where: str) -> Any:
    """Convert a part of a body.

    Raises:
        CallerError: Naming the part and what is wrong with it.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise explained(error, where) from None


def _parts(content: Content, where: str) -> str | list[Any]:
    """Return content as chat has it; images and files are refused there, by their place."""
    if isinstance(content, str):
        return content
    kinds = {InputImage: ImagePart(), InputFile: ImagePart()}
    return [kinds.get(type(p)) or TextPart(_plain([p])) for p in content]


def _plain(pieces: Sequence[Piece]) -> str:
    texts = []
    for piece in pieces:
        if isinstance(piece, _Words):
            texts.append(piece.text)
        elif isinstance(piece, Refusal):
            texts.append(piece.refusal)
    return "".join(texts)
