"""POST, GET and DELETE of /v1/responses."""

import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

import msgspec
from quart import Response

from ...actors.house import House
from ...actors.request import Broken, Finished
from ...actors.speech import Ended, Piece
from ...runtime.errors import CallerError
from ...runtime.parts import Call
from ..answers import answer, chat_logprobs, new_request_id, paceline_of, usage_of
from ..models import check_model
from ..problems import broken_body, decode, renamed, reply
from ..replies import ChatLogprob, ErrorReply
from ..schemas import AssistantMessage, FunctionCall, ToolCall
from ..shape import Collected, Shape
from ..translate import Order, chat_order
from .bodies import FIELDS, Asked, ResponsesRequest, understood
from .replies import (
    ArgumentsDelta,
    ArgumentsDone,
    CallOut,
    Deleted,
    Failure,
    Incomplete,
    InputDetails,
    ItemEvent,
    MessageOut,
    OutItem,
    OutputDetails,
    PartEvent,
    ResponseEvent,
    ResponseReply,
    ResponseUsage,
    Status,
    TextContent,
    TextDelta,
    TextDone,
    ThoughtContent,
    ThoughtDelta,
    ThoughtDone,
    ThoughtOut,
)
from .store import ResponseStore

_DECODER: Final = msgspec.json.Decoder(ResponsesRequest)


async def create_response(
    house: House, store: ResponseStore, raw: bytes, priority: str | None
) -> Response:
    """Serve one response, streamed or whole; see `chat_completions`."""
    body: ResponsesRequest = decode(_DECODER, raw)
    check_model(house, body.model)
    asked = understood(body, store.history(body.previous_response_id))
    try:
        order = await chat_order(
            asked.chat,
            new_request_id(),
            house.text,
            house.served,
            house.args,
            priority,
            where="input",
        )
    except CallerError as error:
        raise renamed(error, FIELDS) from None
    return await answer(house, order, "responses", ResponseShape(house, order, body, asked, store))


def show_response(store: ResponseStore, response_id: str) -> Response:
    """Return a kept response."""
    return reply(200, store.get(response_id).reply)


def delete_response(store: ResponseStore, response_id: str) -> Response:
    """Forget a kept response."""
    store.drop(response_id)
    return reply(200, Deleted(response_id))


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
        self._suffix = order.generation.request_id.removeprefix("req-")
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
        self._sequence = -1
        self._finish = "stop"
        self._growing: OutItem | None = None

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

    def opening(self) -> Iterable[ResponseEvent]:
        """Say that the response begins."""
        return [
            ResponseEvent("response.created", self._next(), self._reply),
            ResponseEvent("response.in_progress", self._next(), self._reply),
        ]

    def piece(self, piece: Piece) -> Iterable[msgspec.Struct]:
        """Let items grow, each after the one before it is over."""
        events: list[msgspec.Struct] = []
        if piece.thought:
            if not isinstance(self._growing, ThoughtOut):
                events += self._turn_to(self._thought_item(""))
            events.append(self._grow_thought(piece.thought))
        if piece.text or piece.logprobs:
            if not isinstance(self._growing, MessageOut):
                events += self._turn_to(self._message_item("", []))
            logprobs = chat_logprobs(piece.logprobs, self._house.text).content
            events.append(self._grow_text(piece.text, logprobs))
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
        events += self._end_item()
        whole = self._over(finished)
        cut = whole.status == "incomplete"
        kind: Final = "response.incomplete" if cut else "response.completed"
        return [*events, ResponseEvent(kind, self._next(), whole)]

    def failure(self, broken: Broken) -> msgspec.Struct:
        """Return the failed response inside a stream, and a plain error for a whole answer."""
        if not self._order.stream:
            return ErrorReply(broken_body(broken))
        self._reply.status = "failed"
        self._reply.error = Failure(broken.message)
        return ResponseEvent("response.failed", self._next(), self._reply)

    def _next(self) -> int:
        self._sequence += 1
        return self._sequence

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
        self._growing = item

    @property
    def _index(self) -> int:
        return len(self._reply.output) - 1

    def _turn_to(self, item: OutItem) -> list[msgspec.Struct]:
        """End what grows and begin another item."""
        events = self._end_item()
        self._begin(item)
        # As it is now: it grows before these events are written.
        begun: dict[str, Any] = {} if isinstance(item, CallOut) else {"content": []}
        shown = msgspec.structs.replace(item, **begun)
        events.append(ItemEvent("response.output_item.added", self._next(), self._index, shown))
        if not isinstance(item, CallOut):
            part = msgspec.structs.replace(item.content[0])
            events.append(self._part("response.content_part.added", item.id, part))
        return events

    def _part(self, kind: str, item_id: str, part: TextContent | ThoughtContent) -> PartEvent:
        return PartEvent(kind, self._next(), item_id, self._index, part)  # type: ignore[arg-type]

    def _grow_thought(self, text: str) -> ThoughtDelta:
        item = self._growing
        assert isinstance(item, ThoughtOut)
        item.content[0].text += text
        return ThoughtDelta(self._next(), item.id, self._index, text)

    def _grow_text(self, text: str, logprobs: list[ChatLogprob]) -> TextDelta:
        item = self._growing
        assert isinstance(item, MessageOut)
        item.content[0].text += text
        item.content[0].logprobs = [*item.content[0].logprobs, *logprobs]
        return TextDelta(self._next(), item.id, self._index, text, logprobs)

    def _grow_call(self, call: Call) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        if call.id is not None and call.name is not None:
            events += self._turn_to(self._call_item(call.id, call.name, ""))
        item = self._growing
        assert isinstance(item, CallOut)
        item.arguments += call.arguments
        if call.arguments:
            events.append(ArgumentsDelta(self._next(), item.id, self._index, call.arguments))
        return events

    def _end_item(self) -> list[msgspec.Struct]:
        item, self._growing = self._growing, None
        events: list[msgspec.Struct] = []
        match item:
            case None:
                return []
            case MessageOut():
                part = item.content[0]
                events.append(
                    TextDone(self._next(), item.id, self._index, part.text, part.logprobs)
                )
                events.append(self._part("response.content_part.done", item.id, part))
            case ThoughtOut():
                thought = item.content[0]
                events.append(ThoughtDone(self._next(), item.id, self._index, thought.text))
                events.append(self._part("response.content_part.done", item.id, thought))
            case CallOut():
                events.append(
                    ArgumentsDone(self._next(), item.id, self._index, item.name, item.arguments)
                )
        item.status = "incomplete" if self._finish == "length" else "completed"
        return [*events, ItemEvent("response.output_item.done", self._next(), self._index, item)]

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
            self._store.put(self._reply, [*self._asked.conversation, said])
        return self._reply


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
