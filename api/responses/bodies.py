"""Bodies of /v1/responses, and the chat request that each one means.

Source: OpenAI API description 2.3 (responses).
"""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from msgspec import Meta, Struct

from ...runtime.errors import CallerError
from ..known import Route
from ..schemas import (
    AllowedTool,
    AllowedTools,
    AllowedToolsChoice,
    Alternatives,
    ChatRequest,
    DeveloperMessage,
    FunctionTool,
    JsonObjectFormat,
    JsonSchemaFormat,
    Message,
    NamedSchema,
    NamedToolChoice,
    Positive,
    ResponseFormat,
    SamplingFields,
    TextFormat,
    Tool,
    ToolChoice,
    ToolName,
)
from .items import KeptItem, converted, listed, messages_of

_MOST_LABELS: Final = 16  # OpenAI's limits of metadata
_LONGEST_LABEL: Final = 64
_LONGEST_VALUE: Final = 512


class FunctionSpec(Struct, tag_field="type", tag="function"):
    """The description of a callable function."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextSpec(Struct, tag_field="type", tag="text"):
    """Any text; a schema beside it is refused."""

    schema: dict[str, Any] | None = None


class JsonObjectSpec(Struct, tag_field="type", tag="json_object"):
    """Any JSON object, or what a schema beside it describes."""

    schema: dict[str, Any] | None = None


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


class AllowedFunctions(Struct, tag_field="type", tag="allowed_tools"):
    """Only some of the functions may be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedFunction], Meta(min_length=1)]


Choice = Literal["none", "auto", "required"] | NamedFunction | AllowedFunctions


class ResponsesRequest(SamplingFields, kw_only=True):
    """POST /v1/responses; sampling extensions are those of the other routes."""

    route: ClassVar[Route] = "responses"

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Positive | None = None
    top_logprobs: Alternatives | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Choice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: Reasoning | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # extension


class InputTokensRequest(ResponsesRequest, kw_only=True):
    """POST /v1/responses/input_tokens."""

    route: ClassVar[Route] = "input"

    input: str | list[dict[str, Any]] = ""


LOGPROBS: Final = "message.output_text.logprobs"
# What chat_form and chat_order call a field, and what it is called here.
FIELDS: Final = {
    "response_format.json_schema.schema": "text.format.schema",
    "response_format.schema": "text.format.schema",
    "response_format": "text.format",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "tools[].function.parameters": "tools[].parameters",
    "tools[].function.name": "tools[].name",
}
# Tools of the server's own: the model is not told of them, since nothing here can run them.
_UNTOLD: Final = ("web_search",)


class Asked(Struct, frozen=True):
    """A body understood.

    Args:
        chat: The chat request it means.
        conversation: Its messages without the instructions, which are of this response only.
        spaces: Of functions that stand in a namespace, which.
        places: Of each of the chat request's tools, where it stands in the body.
        kept: The input's items, to keep.
    """

    chat: ChatRequest
    conversation: tuple[Message, ...]
    spaces: dict[str, str]
    places: tuple[str, ...]
    kept: tuple[KeptItem, ...]


def understood(
    body: ResponsesRequest,
    items: Sequence[dict[str, Any]],
    history: Sequence[Message],
    suffix: str = "",
) -> Asked:
    """Return the chat request that a body means.

    Args:
        items: Its input, with no reference left in it.
        history: What was said before, under `previous_response_id`.
        suffix: What makes ids this response's own; none when nothing is kept.

    Raises:
        CallerError: For what cannot be served.
    """
    _check_metadata(body.metadata or {})
    said = messages_of(items)
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
        tools=list(tools.values()) or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text),
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        chat_template_kwargs=body.chat_template_kwargs,
        **shared,
    )
    kept = listed(items, suffix) if suffix else ()
    return Asked(chat, (*history, *said), spaces, tuple(tools), kept)


def _check_metadata(metadata: dict[str, Any]) -> None:
    """Refuse what OpenAI refuses: it is kept with the response and counts against its store.

    Raises:
        CallerError: Saying which limit is passed.
    """
    if len(metadata) > _MOST_LABELS:
        raise CallerError(f"metadata: at most {_MOST_LABELS} pairs are kept", param="metadata")
    for name, value in metadata.items():
        if len(name) > _LONGEST_LABEL:
            raise CallerError(
                f"metadata: a key has at most {_LONGEST_LABEL} characters", param="metadata"
            )
        if not isinstance(value, str) or len(value) > _LONGEST_VALUE:
            raise CallerError(
                f"metadata.{name}: a value is a text of at most {_LONGEST_VALUE} characters",
                param=f"metadata.{name}",
            )


def _choice(choice: Choice | None) -> ToolChoice | None:
    if isinstance(choice, NamedFunction):
        return NamedToolChoice(ToolName(choice.name))
    if isinstance(choice, AllowedFunctions):
        tools = [AllowedTool(ToolName(tool.name)) for tool in choice.tools]
        return AllowedToolsChoice(AllowedTools(choice.mode, tools))
    return choice


def _format(text: TextSettings | None) -> ResponseFormat | None:
    match text.format if text else None:
        case TextSpec(schema):
            return TextFormat(schema=schema)
        case JsonObjectSpec(schema):
            return JsonObjectFormat(schema=schema)
        case JsonSchemaSpec(name, schema, strict):
            return JsonSchemaFormat(NamedSchema(name, schema, None, strict))
        case _:
            return None


def _tools(given: Sequence[dict[str, Any]]) -> tuple[dict[str, Tool], dict[str, str]]:
    """Return functions by their places, those in namespaces too, and which each of those is in."""
    tools: dict[str, Tool] = {}
    spaces: dict[str, str] = {}
    for at, tool in enumerate(given):
        where, kind = f"tools[{at}]", tool.get("type")
        if kind == "namespace":
            inner = tool.get("tools")
            for place, function in enumerate(inner if isinstance(inner, list) else ()):
                inside = f"{where}.tools[{place}]"
                spec = converted(function, FunctionSpec, inside)
                spaces[spec.name] = str(tool.get("name", ""))
                tools[inside] = _tool(spec)
        elif kind == "function":
            tools[where] = _tool(converted(tool, FunctionSpec, where))
        elif not str(kind).startswith(_UNTOLD):
            raise CallerError(
                f"{where}.type: {kind!r} tools are not served; only functions are",
                param=f"{where}.type",
            )
    return tools, spaces


def _tool(spec: FunctionSpec) -> Tool:
    return Tool(FunctionTool(spec.name, spec.description, spec.parameters, spec.strict))
