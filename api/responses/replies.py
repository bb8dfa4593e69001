"""Answers of /v1/responses as structs, and the events of a streamed one, in their order.

Source: OpenAI API description 2.3 (responses, streaming events).
"""

from typing import Any, Literal

from msgspec import UNSET, Raw, Struct, UnsetType, field

from ..replies import ChatLogprob, Paceline

Status = Literal["in_progress", "completed", "incomplete"]


class TextContent(Struct, tag_field="type", tag="output_text"):
    """Text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[ChatLogprob] = []


class ThoughtContent(Struct, tag_field="type", tag="reasoning_text"):
    """Text of a thought."""

    text: str


class MessageOut(Struct, tag_field="type", tag="message"):
    """What the model says."""

    id: str
    status: Status
    content: list[TextContent]
    role: Literal["assistant"] = "assistant"


class CallOut(Struct, tag_field="type", tag="function_call"):
    """A call the model makes; arguments are JSON text."""

    id: str
    status: Status
    call_id: str
    name: str
    arguments: str
    namespace: str | UnsetType = UNSET


class ThoughtOut(Struct, tag_field="type", tag="reasoning"):
    """What the model thinks."""

    id: str
    status: Status
    content: list[ThoughtContent]
    summary: list[Any] = []


OutItem = MessageOut | CallOut | ThoughtOut


class InputDetails(Struct):
    """Where input tokens came from."""

    cached_tokens: int = 0
    cache_write_tokens: int = 0


class OutputDetails(Struct):
    """What output tokens were."""

    reasoning_tokens: int = 0


class ResponseUsage(Struct):
    """Tokens of a response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputDetails
    output_tokens_details: OutputDetails


class Incomplete(Struct):
    """Why a response is not complete."""

    reason: Literal["max_output_tokens"] = "max_output_tokens"


class Failure(Struct):
    """Why a response failed."""

    message: str
    code: Literal["server_error"] = "server_error"


class ResponseReply(Struct, kw_only=True):
    """A response, at whatever point it is."""

    id: str
    created_at: int
    model: str
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    output: list[OutItem] = field(default_factory=list)
    object: Literal["response"] = "response"
    error: Failure | None = None
    incomplete_details: Incomplete | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    store: bool = True
    temperature: float | None = None
    top_p: float | None = None
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = field(default_factory=list)
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    paceline: Paceline | UnsetType = UNSET


class Deleted(Struct):
    """The answer to a DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputTokens(Struct):
    """The answer of input_tokens."""

    input_tokens: int
    object: Literal["response.input_tokens"] = "response.input_tokens"


class ItemList(Struct):
    """A page of the items that a response was asked with."""

    data: list[Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: Literal["list"] = "list"


class ResponseEvent(Struct):
    """The response itself begins, goes on, or is over."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    sequence_number: int
    response: ResponseReply


class ItemEvent(Struct):
    """An item of the output begins or is over."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    sequence_number: int
    output_index: int
    item: OutItem


class PartEvent(Struct):
    """A part of an item begins or is over."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    sequence_number: int
    item_id: str
    output_index: int
    part: TextContent | ThoughtContent
    content_index: int = 0


class _WithinItem(Struct):
    """Where in the output, and when, something happens to an item."""

    sequence_number: int
    item_id: str
    output_index: int


class TextDelta(_WithinItem):
    """New text."""

    delta: str
    logprobs: list[ChatLogprob]
    content_index: int = 0
    type: Literal["response.output_text.delta"] = "response.output_text.delta"


class TextDone(_WithinItem):
    """All text of a part."""

    text: str
    logprobs: list[ChatLogprob]
    content_index: int = 0
    type: Literal["response.output_text.done"] = "response.output_text.done"


class ThoughtDelta(_WithinItem):
    """New text of a thought."""

    delta: str
    content_index: int = 0
    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"


class ThoughtDone(_WithinItem):
    """All text of a thought."""

    text: str
    content_index: int = 0
    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"


class ArgumentsDelta(_WithinItem):
    """New text of a call's arguments."""

    delta: str
    type: Literal["response.function_call_arguments.delta"] = (
        "response.function_call_arguments.delta"
    )


class ArgumentsDone(_WithinItem):
    """All text of a call's arguments."""

    name: str
    arguments: str
    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
