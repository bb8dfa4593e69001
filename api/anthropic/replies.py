"""Answers of /v1/messages as structs, and the events of a streamed one.

Source: Anthropic API reference (Messages, Streaming, Errors; version 2023-06-01).
"""

from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from ..replies import Paceline

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextOut(Struct, tag_field="type", tag="text"):
    """Text."""

    text: str


class ThinkingOut(Struct, tag_field="type", tag="thinking"):
    """A thought; nothing here signs it."""

    thinking: str
    signature: str = ""


class ToolUseOut(Struct, tag_field="type", tag="tool_use"):
    """A call."""

    id: str
    name: str
    input: Any


BlockOut = TextOut | ThinkingOut | ToolUseOut


class MessageUsage(Struct):
    """Tokens of a message; input counts what was computed and not what came from the bank."""

    input_tokens: int
    output_tokens: int
    cache_read_input_tokens: int = 0
    cache_creation_input_tokens: int = 0


class MessageReply(Struct):
    """A message of the model."""

    id: str
    model: str
    content: list[BlockOut]
    usage: MessageUsage
    stop_reason: StopReason | None = None
    stop_sequence: str | None = None
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    paceline: Paceline | UnsetType = UNSET


class Counted(Struct):
    """The answer of count_tokens."""

    input_tokens: int


class AnthropicModel(Struct):
    """The loaded model as Anthropic's clients list it."""

    id: str
    display_name: str
    created_at: str
    max_input_tokens: int
    max_tokens: int
    lifecycle: Literal["active"] = "active"
    type: Literal["model"] = "model"


class AnthropicModels(Struct):
    """GET /v1/models, for Anthropic's clients."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class MessageStart(Struct):
    """The message begins."""

    message: MessageReply
    type: Literal["message_start"] = "message_start"


class BlockStart(Struct):
    """A block begins."""

    index: int
    content_block: BlockOut
    type: Literal["content_block_start"] = "content_block_start"


class TextGrowth(Struct, tag_field="type", tag="text_delta"):
    """New text."""

    text: str


class ThinkingGrowth(Struct, tag_field="type", tag="thinking_delta"):
    """New text of a thought."""

    thinking: str


class SignatureGrowth(Struct, tag_field="type", tag="signature_delta"):
    """The end of a thought, unsigned."""

    signature: str = ""


class InputGrowth(Struct, tag_field="type", tag="input_json_delta"):
    """New text of a call's input."""

    partial_json: str


class BlockDelta(Struct):
    """A block grows."""

    index: int
    delta: TextGrowth | ThinkingGrowth | SignatureGrowth | InputGrowth
    type: Literal["content_block_delta"] = "content_block_delta"


class BlockStop(Struct):
    """A block is over."""

    index: int
    type: Literal["content_block_stop"] = "content_block_stop"


class Stopped(Struct):
    """How a message ended."""

    stop_reason: StopReason
    stop_sequence: str | None


class MessageDelta(Struct):
    """The message ends so, and cost so much."""

    delta: Stopped
    usage: MessageUsage
    type: Literal["message_delta"] = "message_delta"
    paceline: Paceline | UnsetType = UNSET


class MessageStop(Struct):
    """The message is over."""

    type: Literal["message_stop"] = "message_stop"


class AnthropicError(Struct):
    """What went wrong, in Anthropic's words."""

    type: str
    message: str
    details: dict[str, str] | UnsetType = UNSET


class AnthropicErrorReply(Struct):
    """The body of every error, and the event that ends a stream which cannot go on."""

    error: AnthropicError
    request_id: str | None = None
    type: Literal["error"] = "error"
