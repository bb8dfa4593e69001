"""OpenAI's request bodies as structs. They tolerate unknown fields, since agents send extras;
known ones that are not served are refused before (see known.py).

Source: OpenAI API description 2.3 (chat completions, completions). Fields
marked "extension" are ours or common to local servers.
"""

from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from ..runtime.modes import Priority
from .known import Route

Positive = Annotated[int, Meta(ge=1, le=2**31)]
Count = Annotated[int, Meta(ge=0, le=2**31)]
Temperature = Annotated[float, Meta(ge=0, le=100)]
Fraction = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Repetition = Annotated[float, Meta(gt=0, le=10)]
Choices = Annotated[int, Meta(ge=1, le=128)]
Alternatives = Annotated[int, Meta(ge=0, le=20)]
Stop = Annotated[str, Meta(max_length=1024)]
Stops = Annotated[list[Stop], Meta(max_length=64)]


class TextPart(Struct, tag_field="type", tag="text"):
    """A piece of text in a message."""

    text: str


class RefusalPart(Struct, tag_field="type", tag="refusal"):
    """A piece of an assistant's earlier refusal, sent back as history."""

    refusal: str


class ImagePart(Struct, tag_field="type", tag="image_url"):
    """An image; a text model cannot see it."""

    image_url: Any = None


class AudioPart(Struct, tag_field="type", tag="input_audio"):
    """A sound; a text model cannot hear it."""

    input_audio: Any = None


class FilePart(Struct, tag_field="type", tag="file"):
    """A file; nothing here reads it."""

    file: Any = None


Part = TextPart | RefusalPart | ImagePart | AudioPart | FilePart
Content = str | list[Part]


class FunctionCall(Struct):
    """A call an assistant made earlier; arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(Struct):
    """A tool call in the history."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class SystemMessage(Struct, tag_field="role", tag="system"):
    """Instructions."""

    content: Content
    name: str | None = None


class DeveloperMessage(Struct, tag_field="role", tag="developer"):
    """Instructions, under the newer name of the role."""

    content: Content
    name: str | None = None


class UserMessage(Struct, tag_field="role", tag="user"):
    """What the user says."""

    content: Content
    name: str | None = None


class AssistantMessage(Struct, tag_field="role", tag="assistant"):
    """What the model said or called before."""

    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    refusal: str | None = None
    reasoning_content: str | None = None  # extension: templates show what they want of it
    reasoning: str | None = None  # another name of it

    def __post_init__(self) -> None:
        if self.reasoning_content is None:
            self.reasoning_content = self.reasoning


class ToolMessage(Struct, tag_field="role", tag="tool"):
    """What a tool answered."""

    content: Content
    tool_call_id: str


Message = SystemMessage | DeveloperMessage | UserMessage | AssistantMessage | ToolMessage


class FunctionTool(Struct):
    """The description of a callable function."""

    name: Annotated[str, Meta(min_length=1)]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct):
    """A tool the model may be told of."""

    function: FunctionTool
    type: Literal["function"] = "function"


class ToolName(Struct):
    """A function by its name."""

    name: str


class NamedToolChoice(Struct, tag_field="type", tag="function"):
    """This function must be called."""

    function: ToolName


class AllowedTool(Struct):
    """One of the tools that may be called."""

    function: ToolName
    type: Literal["function"] = "function"


class AllowedTools(Struct):
    """Some of the tools, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[AllowedTool], Meta(min_length=1)]


class AllowedToolsChoice(Struct, tag_field="type", tag="allowed_tools"):
    """Only some of the tools may be called."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


class StreamOptions(Struct):
    """What a stream carries besides text."""

    include_usage: bool | None = None


class NamedSchema(Struct):
    """A JSON schema with a name; it is enforced, strict or not."""

    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextFormat(Struct, tag_field="type", tag="text"):
    """Any text; a schema beside it is refused in forms.py."""

    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None


class JsonObjectFormat(Struct, tag_field="type", tag="json_object"):
    """Any JSON object, or what a schema beside it describes, as other servers have it."""

    json_schema: NamedSchema | None = None
    schema: dict[str, Any] | None = None


class JsonSchemaFormat(Struct, tag_field="type", tag="json_schema"):
    """JSON that a schema describes."""

    json_schema: NamedSchema
    schema: dict[str, Any] | None = None  # refused in forms.py: it may be another


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat


class PacelineFields(Struct, forbid_unknown_fields=True):
    """What paceline alone knows; an unknown field in here is an error, not an extra."""

    priority: Priority | None = None


class SamplingFields(Struct, kw_only=True):
    """What all routes that answer share. null is the same as leaving a field out."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Choices | None = None
    stop: Stop | Stops | None = None
    seed: int | None = None  # 64 bits, signed or not; checked in translate.py
    temperature: Temperature | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None  # extension; 0 and -1 are off
    min_p: Fraction | None = None  # extension
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Repetition | None = None  # extension
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool | None = None  # extension: run to the budget
    guided_json: dict[str, Any] | None = None  # extensions: what form the answer must have
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Meta(min_length=1)] | None = None
    guided_grammar: str | None = None
    user: str | None = None
    paceline: PacelineFields | None = None  # extension


class ThinkingChoice(Struct):
    """Whether to think, as DeepSeek and others have it."""

    type: Literal["enabled", "disabled", "adaptive"]


class ReasoningChoice(Struct):
    """Whether and how hard to think, as OpenRouter has it."""

    enabled: bool | None = None
    effort: str | None = None


class ChatRequest(SamplingFields, kw_only=True):
    """POST /v1/chat/completions."""

    route: ClassVar[Route] = "chat"

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # extension
    thinking: ThinkingChoice | None = None  # extensions: other names of both
    reasoning: ReasoningChoice | None = None

    def __post_init__(self) -> None:
        if self.reasoning is not None and self.reasoning_effort is None:
            self.reasoning_effort = self.reasoning.effort
        thinks = self.reasoning.enabled if self.reasoning is not None else None
        if self.thinking is not None:
            thinks = self.thinking.type != "disabled"
        if thinks is not None:
            self.chat_template_kwargs = {
                "enable_thinking": thinks,
                **(self.chat_template_kwargs or {}),
            }


class CompletionRequest(SamplingFields, kw_only=True):
    """POST /v1/completions."""

    route: ClassVar[Route] = "text"

    # msgspec allows one array type a union: this holds text, texts, token ids, or lists of them.
    prompt: str | list[str | int | list[int]] | None = None
    max_tokens: Count | None = None
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Choices | None = None
    add_special_tokens: bool | None = None  # extension, as with vLLM


class TokenizeRequest(Struct, kw_only=True):
    """POST /v1/tokenize: a raw prompt, or messages through the chat template."""

    route: ClassVar[Route] = "tokenize"

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Struct, kw_only=True):
    """POST /v1/detokenize."""

    model: str | None = None
    tokens: list[Annotated[int, Meta(ge=0)]]
