"""A response as it is made: its items, its events, and what is kept of it."""

import time
from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from ...actors.house import House
from ...actors.request import Broken, Finished
from ...actors.speech import Ended, Piece
from ...runtime.parts import Call
from ..answers import chat_logprobs, paceline_of, usage_of
from ..problems import broken_body
from ..replies import ChatLogprob, ErrorReply
from ..schemas import AssistantMessage, FunctionCall, ToolCall
from ..shape import Collected, Shape
from ..translate import Order
from .bodies import Asked, ResponsesRequest
from .replies import (
    CallOut,
    Failure,
    Incomplete,
    InputDetails,
    MessageOut,
    OutItem,
    OutputDetails,
    ResponseReply,
    ResponseUsage,
    Status,
    TextContent,
    ThoughtContent,
    ThoughtOut,
)
from .store import Cuts, ResponseStore
from .telling import Telling

_INLINE_PROMPT: Final = 16_384  # tokens of a conversation that is encoded on the event loop


class ResponseShape(Shape):
    """A response; a streamed one tells each item's beginning, growth and end in order."""

    named = True
    mark = b""

    def __init__(
        self,
        house: House,
        order: Order,
        body: ResponsesRequest,
        asked: Asked,
        store: ResponseStore,
    ) -> None:
        super().__init__(house, order)
        self._asked = asked
        self._store = store if body.store is not False else None
        self._suffix = suffix_of(order.generation.request_id)
        self._reply = ResponseReply(
            id=f"resp_{self._suffix}",
            created_at=int(time.time()),
            model=house.served.name,
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            store=self._store is not None,
            temperature=order.generation.rows[0].sampling.temperature,
            top_p=order.generation.rows[0].sampling.top_p,
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
        )
        self._telling = Telling()
        self._cuts: Cuts = []
        self._finish = "stop"
        self._growing: OutItem | None = None
        self._texts: list[str] = []  # what it gained, put together once, at its end
        self._logprobs: list[ChatLogprob] = []

    def ends_long(self, tokens: int) -> bool:
        """Say whether the end takes long; the conversation is kept then."""
        kept = self._store is not None and sum(map(len, self._order.prompts)) > _INLINE_PROMPT
        return kept or super().ends_long(tokens)

    def whole(self, choices: list[Collected], finished: Finished) -> ResponseReply:
        """Return the response with all its items."""
        (choice,) = choices
        logprobs = chat_logprobs(tuple(choice.logprobs), self._house.text).content
        if choice.thought:
            self._begin(self._thought_item(choice.thought))
        if choice.text or not choice.calls:
            self._begin(self._message_item(choice.text, logprobs))
        for id, name, arguments in choice.calls:
            self._begin(self._call_item(id, name, arguments))
        self._finish = choice.finish
        return self._over(finished)

    def opening(self) -> Iterable[msgspec.Struct]:
        """Say that the response begins."""
        return [
            self._telling.response("response.created", self._reply),
            self._telling.response("response.in_progress", self._reply),
        ]

    def piece(self, piece: Piece) -> Iterable[msgspec.Struct]:
        """Let items grow, each after the one before it is over."""
        events: list[msgspec.Struct] = []
        if piece.thought:
            if not isinstance(self._growing, ThoughtOut):
                events += self._turn_to(self._thought_item(""))
            events.append(self._grow(piece.thought, []))
        if piece.text or piece.logprobs:
            if not isinstance(self._growing, MessageOut):
                events += self._turn_to(self._message_item("", []))
            logprobs = chat_logprobs(piece.logprobs, self._house.text).content
            events.append(self._grow(piece.text, logprobs))
        for call in piece.calls:
            events += self._grow_call(call)
        return events

    def ended(self, ended: Ended) -> Iterable[msgspec.Struct]:
        """Remember how it ended; `closing` says it."""
        self._finish = ended.finish
        return []

    def closing(self, finished: Finished) -> Iterable[msgspec.Struct]:
        """End the last item and then the response."""
        events: list[msgspec.Struct] = []
        if not self._reply.output:
            events += self._turn_to(self._message_item("", []))
        events += self._end_item("incomplete" if self._finish == "length" else "completed")
        whole = self._over(finished)
        return [*events, self._telling.response(f"response.{whole.status}", whole)]

    def failure(self, broken: Broken) -> msgspec.Struct:
        """Return the error of a whole answer."""
        return ErrorReply(broken_body(broken))

    def failing(self, broken: Broken) -> Iterable[msgspec.Struct]:
        """End the item that grew, incomplete, and then the response, failed."""
        events = self._end_item("incomplete")
        self._reply.status = "failed"
        self._reply.error = Failure(broken_body(broken).message)
        return [*events, self._telling.response("response.failed", self._reply)]

    def _id(self, prefix: str) -> str:
        return f"{prefix}_{self._suffix}{len(self._reply.output)}"

    def _thought_item(self, text: str) -> ThoughtOut:
        return ThoughtOut(self._id("rs"), "in_progress", [ThoughtContent(text)])

    def _message_item(self, text: str, logprobs: list[ChatLogprob]) -> MessageOut:
        return MessageOut(self._id("msg"), "in_progress", [TextContent(text, [], logprobs)])

    def _call_item(self, id: str, name: str, arguments: str) -> CallOut:
        item = CallOut(self._id("fc"), "in_progress", id, name, arguments)
        if name in self._asked.spaces:
            item.namespace = self._asked.spaces[name]
        return item

    def _begin(self, item: OutItem) -> None:
        self._reply.output.append(item)
        self._cuts.append([])
        self._growing = item

    @property
    def _index(self) -> int:
        return len(self._reply.output) - 1

    def _turn_to(self, item: OutItem) -> list[msgspec.Struct]:
        """End what grows and begin another item."""
        events = self._end_item("completed")
        self._begin(item)
        return [*events, *self._telling.begun(item, self._index)]

    def _grow(self, text: str, logprobs: list[ChatLogprob]) -> msgspec.Struct:
        item = self._growing
        assert item is not None, "an item begins before it grows"
        self._texts.append(text)
        self._logprobs += logprobs
        self._cuts[-1].append((len(text), len(logprobs)))
        return self._telling.grown(item, self._index, text, logprobs)

    def _grow_call(self, call: Call) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        if call.id is not None and call.name is not None:
            events += self._turn_to(self._call_item(call.id, call.name, ""))
        if call.arguments:
            events.append(self._grow(call.arguments, []))
        return events

    def _end_item(self, status: Status) -> list[msgspec.Struct]:
        item, self._growing = self._growing, None
        if item is None:
            return []
        item.status = status
        text, self._texts = "".join(self._texts), []
        logprobs, self._logprobs = self._logprobs, []
        match item:
            case MessageOut():
                item.content[0].text += text
                item.content[0].logprobs = [*item.content[0].logprobs, *logprobs]
            case ThoughtOut():
                item.content[0].text += text
            case CallOut():
                item.arguments += text
        return self._telling.over(item, self._index)

    def _over(self, finished: Finished) -> ResponseReply:
        """Fill in how the response ended, and keep it."""
        cut = self._finish == "length"
        last: Status = "incomplete" if cut else "completed"
        for item in self._reply.output:
            item.status = last if item is self._reply.output[-1] else "completed"
        usage = usage_of(self._order, finished)
        self._reply.status = last
        self._reply.incomplete_details = Incomplete() if cut else None
        self._reply.paceline = paceline_of(self._house, self._order, finished)
        self._reply.usage = ResponseUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            InputDetails(usage.prompt_tokens_details.cached_tokens),
            OutputDetails(usage.completion_tokens_details.reasoning_tokens),
        )
        if self._store is not None:
            said = _as_message(self._reply.output)
            conversation = [*self._asked.conversation, said]
            cuts = self._cuts if self._order.stream else None
            self._store.put(self._reply, conversation, self._asked.kept, cuts)
        return self._reply


def suffix_of(request_id: str) -> str:
    """Return what ends the ids that belong to a request."""
    return request_id.removeprefix("req-")


def _as_message(output: Sequence[OutItem]) -> AssistantMessage:
    """Return a response's items as the assistant's message in a conversation."""
    said = "".join(i.content[0].text for i in output if isinstance(i, MessageOut))
    thought = "".join(i.content[0].text for i in output if isinstance(i, ThoughtOut))
    calls = [
        ToolCall(item.call_id, FunctionCall(item.name, item.arguments))
        for item in output
        if isinstance(item, CallOut)
    ]
    return AssistantMessage(said, tool_calls=calls or None, reasoning_content=thought or None)
