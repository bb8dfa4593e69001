"""Items of a response's input, and the messages that they mean.

Source: OpenAI API description 2.3 (responses).
"""

from collections.abc import Sequence
from typing import Any, Final, Literal, assert_never

import msgspec
from msgspec import Struct

from ...runtime.errors import CallerError
from ..intake import JsonBounds
from ..problems import explained
from ..schemas import (
    AssistantMessage,
    DeveloperMessage,
    FunctionCall,
    Message,
    SystemMessage,
    TextPart,
    ToolCall,
    ToolMessage,
    UserMessage,
)

_PREFIXES: Final = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


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


# What is kept of an item and of a piece of its text; other fields are dropped.
_KEPT: Final = {
    "message": ("role", "content"),
    "function_call": ("call_id", "name", "arguments", "namespace"),
    "function_call_output": ("call_id", "output"),
    "reasoning": ("summary", "content"),
}
_STATUSES: Final = ("in_progress", "completed", "incomplete")
_KEPT_OF_PIECE: Final = ("type", "text", "refusal")
_LONGEST_ID: Final = 256  # characters; OpenAI's own have some 60
_ENCODER: Final = msgspec.json.Encoder()


class KeptItem(Struct, frozen=True):
    """An item as it is kept, encoded.

    Args:
        made: This server made its id, so nobody can guess it or choose another's.
    """

    id: str
    made: bool
    raw: bytes


Item = MessageItem | FunctionCallItem | FunctionOutputItem | ReasoningItem
# A union is taken apart again at each conversion, which costs 50 times what a struct does.
_BY_KIND: Final[dict[str, type[Item]]] = {
    "message": MessageItem,
    "function_call": FunctionCallItem,
    "function_call_output": FunctionOutputItem,
    "reasoning": ReasoningItem,
}


def messages_of(given: Sequence[dict[str, Any]]) -> list[Message]:
    """Return what an input's items say.

    Calls join the assistant's message before them. A thought belongs to what the assistant says
    or calls behind it in the same turn; one with nothing behind it is left out.

    Raises:
        CallerError: Naming the item that is wrong.
    """
    messages: list[Message] = []
    bounds = JsonBounds()
    thoughts: list[str] = []
    thought_of: dict[int, list[str]] = {}  # what each message of the assistant has of them
    for at, raw in enumerate(given):
        where, kind = f"input[{at}]", kind_of(raw)
        item: Item = converted({**raw, "type": kind}, _BY_KIND.get(kind, Item), where)
        match item:
            case MessageItem("assistant", content):
                messages.append(AssistantMessage(_parts(content, f"{where}.content")))
                _take(thought_of, messages, thoughts)
            case MessageItem("user", content):
                thoughts.clear()
                messages.append(UserMessage(_parts(content, f"{where}.content")))
            case MessageItem("system", content):
                messages.append(SystemMessage(_parts(content, f"{where}.content")))
            case MessageItem("developer", content):
                messages.append(DeveloperMessage(_parts(content, f"{where}.content")))
            case FunctionCallItem(call_id, name, arguments):
                if not messages or not isinstance(messages[-1], AssistantMessage):
                    messages.append(AssistantMessage())
                last = messages[-1]
                assert isinstance(last, AssistantMessage)
                bounds.check(arguments.encode("utf-8", "replace"), f"{where}.arguments")
                last.tool_calls = last.tool_calls or []
                last.tool_calls.append(ToolCall(call_id, FunctionCall(name, arguments)))
                _take(thought_of, messages, thoughts)
            case FunctionOutputItem(call_id, output):
                messages.append(ToolMessage(_parts(output, f"{where}.output"), call_id))
            case ReasoningItem(content, summary):
                thoughts.append(_plain(content or summary or []))
            case MessageItem():
                raise AssertionError("a role of no known name does not decode")
            case _:
                assert_never(item)
    for at, taken in thought_of.items():
        message = messages[at]
        assert isinstance(message, AssistantMessage)
        message.reasoning_content = "\n".join(filter(None, taken)) or None
    return messages


def listed(given: Sequence[dict[str, Any]], suffix: str) -> tuple[KeptItem, ...]:
    """Return an input's items with ids, as OpenAI lists them, without fields nobody knows.

    Args:
        given: Items that `messages_of` understands.
        suffix: What makes the ids of items that have none this response's own.
    """
    return tuple(_listed(item, f"{suffix}in{at}") for at, item in enumerate(given))


def told(output: Sequence[Struct]) -> tuple[KeptItem, ...]:
    """Return the items of a response's output, as a later input may refer to them."""
    return tuple(_listed(msgspec.to_builtins(item), "") for item in output)


def kind_of(item: dict[str, Any]) -> str:
    """Return an item's type, which a message and a reference to a kept item may leave out."""
    kind = item.get("type")
    if kind is None:
        bare = len(item) <= 2 and item.keys() <= {"id", "type"}
        return "item_reference" if bare else "message"
    return str(kind)


def _listed(item: dict[str, Any], suffix: str) -> KeptItem:
    """Return an item to keep; without a suffix its id is one that this server made."""
    kind, own = kind_of(item), item.get("id")
    id = own if isinstance(own, str) and 0 < len(own) <= _LONGEST_ID else None
    made = id is None or not suffix
    kept: dict[str, Any] = {"type": kind, "id": id or f"{_PREFIXES[kind]}_{suffix}"}
    kept |= {name: _slim(item[name]) for name in _KEPT[kind] if name in item}
    if kind == "message" and isinstance(text := kept["content"], str):
        said = item.get("role") == "assistant"
        kept["content"] = [
            _slim_piece({"type": f"{'out' if said else 'in'}put_text", "text": text})
        ]
    if kind != "reasoning":
        status = item.get("status")
        kept["status"] = status if status in _STATUSES else "completed"
    return KeptItem(kept["id"], made, _ENCODER.encode(kept))


def _slim(value: Any) -> Any:
    return [_slim_piece(piece) for piece in value] if isinstance(value, list) else value


def _slim_piece(piece: dict[str, Any]) -> dict[str, Any]:
    slim: dict[str, Any] = {name: piece[name] for name in _KEPT_OF_PIECE if name in piece}
    return {**slim, "annotations": []} if piece["type"] == "output_text" else slim


def _take(
    thought_of: dict[int, list[str]], messages: Sequence[Message], thoughts: list[str]
) -> None:
    """Let the last message, the assistant's, have the thoughts that stand before it."""
    thought_of.setdefault(len(messages) - 1, []).extend(thoughts)
    thoughts.clear()


def converted(raw: Any, kind: Any, where: str) -> Any:
    """Convert a part of a body.

    Raises:
        CallerError: Naming the part and what is wrong with it.
    """
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise explained(error, where) from None


def _parts(content: Content, where: str) -> str | list[Any]:
    """Return content as chat has it.

    Raises:
        CallerError: For an image or a file.
    """
    if isinstance(content, str):
        return content
    for at, part in enumerate(content):
        if isinstance(part, InputImage | InputFile):
            param = f"{where}[{at}]"
            kind = type(part).__struct_config__.tag
            raise CallerError(f"{param}: a text model cannot take {kind!r} parts", param=param)
    return [TextPart(_plain([part])) for part in content]


def _plain(pieces: Sequence[Piece]) -> str:
    texts = []
    for piece in pieces:
        if isinstance(piece, _Words):
            texts.append(piece.text)
        elif isinstance(piece, Refusal):
            texts.append(piece.refusal)
    return "".join(texts)
