"""The events of a response in their order, live ones and those of a kept response alike."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from ..replies import ChatLogprob
from .replies import (
    ArgumentsDelta,
    ArgumentsDone,
    CallOut,
    ItemEvent,
    MessageOut,
    OutItem,
    PartEvent,
    ResponseEvent,
    ResponseReply,
    TextContent,
    TextDelta,
    TextDone,
    ThoughtContent,
    ThoughtDelta,
    ThoughtDone,
    ThoughtOut,
)
from .store import Cuts


class Telling:
    """Numbers events and knows which stand around an item; it holds no state but the number."""

    def __init__(self) -> None:
        self._sequence = -1

    def response(self, kind: str, reply: ResponseReply) -> ResponseEvent:
        """Say where the response itself is."""
        return ResponseEvent(kind, self._next(), reply)  # type: ignore[arg-type]

    def begun(self, item: OutItem, index: int) -> list[msgspec.Struct]:
        """Say that an item begins, which is still empty."""
        # As it is now: it grows before these events are written.
        bare: dict[str, Any] = {} if isinstance(item, CallOut) else {"content": []}
        shown = msgspec.structs.replace(item, **bare)
        events: list[msgspec.Struct] = [
            ItemEvent("response.output_item.added", self._next(), index, shown)
        ]
        if not isinstance(item, CallOut):
            part = msgspec.structs.replace(item.content[0])
            events.append(self._part("response.content_part.added", item.id, index, part))
        return events

    def grown(
        self, item: OutItem, index: int, text: str, logprobs: list[ChatLogprob]
    ) -> msgspec.Struct:
        """Say what an item gained."""
        match item:
            case MessageOut():
                return TextDelta(self._next(), item.id, index, text, logprobs)
            case ThoughtOut():
                return ThoughtDelta(self._next(), item.id, index, text)
            case CallOut():
                return ArgumentsDelta(self._next(), item.id, index, text)

    def over(self, item: OutItem, index: int) -> list[msgspec.Struct]:
        """Say that an item is over, and what it came to."""
        events: list[msgspec.Struct] = []
        match item:
            case MessageOut():
                part = item.content[0]
                events.append(TextDone(self._next(), item.id, index, part.text, part.logprobs))
                events.append(self._part("response.content_part.done", item.id, index, part))
            case ThoughtOut():
                thought = item.content[0]
                events.append(ThoughtDone(self._next(), item.id, index, thought.text))
                events.append(self._part("response.content_part.done", item.id, index, thought))
            case CallOut():
                events.append(
                    ArgumentsDone(self._next(), item.id, index, item.name, item.arguments)
                )
        return [*events, ItemEvent("response.output_item.done", self._next(), index, item)]

    def _part(
        self, kind: str, item_id: str, index: int, part: TextContent | ThoughtContent
    ) -> PartEvent:
        return PartEvent(kind, self._next(), item_id, index, part)  # type: ignore[arg-type]

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence


def retold(reply: ResponseReply, cuts: Cuts | None) -> Iterator[msgspec.Struct]:
    """Give the events that told a kept response, with the numbers they had.

    Args:
        cuts: How it was streamed; a response that was not is told in one piece an item.
    """
    telling = Telling()
    begun = msgspec.structs.replace(
        reply,
        status="in_progress",
        output=[],
        usage=None,
        incomplete_details=None,
        paceline=msgspec.UNSET,
    )
    yield telling.response("response.created", begun)
    yield telling.response("response.in_progress", begun)
    for index, item in enumerate(reply.output):
        yield from telling.begun(_emptied(item), index)
        for text, logprobs in _pieces(item, cuts[index] if cuts is not None else None):
            yield telling.grown(item, index, text, logprobs)
        yield from telling.over(item, index)
    yield telling.response(f"response.{reply.status}", reply)


def _emptied(item: OutItem) -> OutItem:
    match item:
        case MessageOut():
            return msgspec.structs.replace(item, status="in_progress", content=[TextContent("")])
        case ThoughtOut():
            return msgspec.structs.replace(item, status="in_progress", content=[ThoughtContent("")])
        case CallOut():
            return msgspec.structs.replace(item, status="in_progress", arguments="")


def _pieces(
    item: OutItem, cuts: Iterable[tuple[int, int]] | None
) -> Iterator[tuple[str, list[ChatLogprob]]]:
    logprobs: list[ChatLogprob] = []
    if isinstance(item, CallOut):
        text = item.arguments
    else:
        text = item.content[0].text
        if isinstance(item, MessageOut):
            logprobs = item.content[0].logprobs
    at = entry = 0
    for characters, entries in [(len(text), len(logprobs))] if cuts is None else cuts:
        if characters or entries:
            yield text[at : at + characters], logprobs[entry : entry + entries]
        at, entry = at + characters, entry + entries
