"""OpenAI's answers as structs, and the extension object that says what ran.

Source: OpenAI API description 2.3 (chat completions, completions, models, errors).
"""

from typing import Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType


class ErrorBody(Struct):
    """What went wrong, in OpenAI's words."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(Struct):
    """The body of every error."""

    error: ErrorBody


class TopLogprob(Struct, gc=False):
    """One alternative at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct, gc=False):
    """One token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    """Log probabilities of a chat answer or of one chunk of it."""

    content: list[ChatLogprob]
    refusal: None = None


class TextLogprobs(Struct):
    """Log probabilities in the shape of /v1/completions; the four lists are of equal length."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class PromptDetails(Struct):
    """Where prompt tokens came from."""

    cached_tokens: int = 0
    audio_tokens: int = 0


class CompletionDetails(Struct):
    """What completion tokens were."""

    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(Struct):
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails = msgspec.field(default_factory=PromptDetails)
    completion_tokens_details: CompletionDetails = msgspec.field(default_factory=CompletionDetails)


class Paceline(Struct):
    """Extension: what ran for this request. Times in seconds."""

    mode: str
    lanes: tuple[str, ...]
    widths: tuple[int, ...]
    seed: int
    queue_wait_s: float
    time_to_first_token_s: float
    max_tokens: int
    drafted_tokens: int
    accepted_tokens: int


class CalledFunction(Struct):
    """A call's function; arguments are JSON text."""

    name: str
    arguments: str


class MadeCall(Struct):
    """A whole call."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"


class ChatMessage(Struct):
    """An answer.

    Args:
        reasoning_content: Extension: what the model thought before it answered.
    """

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    tool_calls: list[MadeCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChoice(Struct):
    """One answer and how it ended."""

    index: int
    message: ChatMessage
    finish_reason: str
    logprobs: ChatLogprobs | None


class ChatReply(Struct):
    """The body of an unstreamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    paceline: Paceline
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None


class FunctionDelta(Struct):
    """What a chunk adds to a call's function: its name once, then its arguments in pieces."""

    arguments: str
    name: str | UnsetType = UNSET


class CallDelta(Struct):
    """What a chunk adds to a call; id and type come once."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(Struct):
    """What a chunk adds to an answer."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[CallDelta] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatChunkChoice(Struct):
    """One answer's part of a chunk."""

    index: int
    delta: ChatDelta
    finish_reason: str | None = None
    logprobs: ChatLogprobs | None = None


class ChatChunk(Struct):
    """One event of a streamed chat completion."""

    id: str
    created: int
    model: str
    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    paceline: Paceline | UnsetType = UNSET


class TextChoice(Struct):
    """One completion, whole or a piece of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: str | None = None


class TextReply(Struct):
    """A completion, or one event of a streamed one."""

    id: str
    created: int
    model: str
    choices: list[TextChoice]
    object: Literal["text_completion"] = "text_completion"
    system_fingerprint: str | None = None
    usage: Usage | UnsetType | None = UNSET
    paceline: Paceline | UnsetType = UNSET


class ModelEntry(Struct):
    """One model under /v1/models; the last three fields are extensions."""

    id: str
    created: int
    owned_by: str
    max_model_len: int
    dtype: str
    lanes: list[str]
    object: Literal["model"] = "model"


class ModelList(Struct):
    """GET /v1/models."""

    data: list[ModelEntry]
    object: Literal["list"] = "list"


class TokenizeReply(Struct):
    """The tokens of a prompt."""

    tokens: list[int]
    count: int
    max_model_len: int


class DetokenizeReply(Struct):
    """The text of some tokens."""

    prompt: str
