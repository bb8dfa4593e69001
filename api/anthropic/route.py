"""POST /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Iterable
from typing import Any, Final, assert_never

import msgspec
from quart import Response

from ...actors.house import House
from ...actors.request import Broken, Finished
from ...actors.speech import Ended, Piece
from ...runtime.errors import CallerError, ContextOverflow
from ...runtime.parts import Call
from ..answers import answer, paceline_of, usage_of
from ..intake import JsonBounds
from ..models import check_model
from ..offload import COUNTS, INLINE_BYTES, at_length
from ..problems import broken_status, decoded, new_request_id, renamed, reply, shortened
from ..shape import Collected, Shape
from ..translate import chat_order, chat_prompt
from .bodies import FIELDS, CountRequest, MessagesRequest, understood
from .errors import error_reply
from .replies import (
    BlockDelta,
    BlockOut,
    BlockStart,
    BlockStop,
    Counted,
    InputGrowth,
    MessageDelta,
    MessageReply,
    MessageStart,
    MessageStop,
    MessageUsage,
    SignatureGrowth,
    Stopped,
    StopReason,
    TextGrowth,
    TextOut,
    ThinkingGrowth,
    ThinkingOut,
    ToolUseOut,
)

_DECODER: Final = msgspec.json.Decoder(MessagesRequest)
_OBJECT: Final = msgspec.json.Decoder(dict[str, Any])
_COUNT_DECODER: Final = msgspec.json.Decoder(CountRequest)
_PING: Final = b'event: ping\ndata: {"type":"ping"}\n\n'


async def create_message(house: House, raw: bytes, priority: str | None) -> Response:
    """Serve one message, streamed or whole; see `chat_completions`."""
    body: MessagesRequest = await decoded(_DECODER, raw)
    long = len(raw) > INLINE_BYTES
    del raw  # not kept while the answer is made
    check_model(house, body.model)
    if len(body.messages) > house.served.context:
        raise ContextOverflow(
            house.served.context, house.served.context, param="messages", exact=False
        )
    chat, go_on = await at_length(lambda: understood(body), long)
    try:
        order = await chat_order(
            chat,
            new_request_id(),
            house.text,
            house.served,
            house.args,
            priority,
            go_on=go_on,
        )
    except CallerError as error:
        raise renamed(error, FIELDS) from None
    return await answer(house, order, "messages", MessageShape(house, order))


async def count_tokens(house: House, raw: bytes) -> Response:
    """Return the tokens of a prompt that is not run."""
    body: CountRequest = await decoded(_COUNT_DECODER, raw, COUNTS)
    long = len(raw) > INLINE_BYTES
    del raw
    check_model(house, body.model)
    chat, go_on = await at_length(lambda: understood(body), long, COUNTS)
    try:
        _, prompt = await chat_prompt(chat, house.text, go_on=go_on)
    except CallerError as error:
        raise renamed(error, FIELDS) from None
    return reply(200, Counted(len(prompt.tokens)))


class MessageShape(Shape):
    """A message of blocks; a streamed one ends each block before the next begins."""

    named = True
    mark = b""
    alive = _PING

    _index = -1
    _growing: type[Any] | None = None
    _ended = Ended(0, "stop")

    def whole(self, choices: list[Collected], finished: Finished) -> MessageReply:
        """Return the message with all its blocks."""
        (choice,) = choices
        self._ended = Ended(0, choice.finish, choice.stop)  # type: ignore[arg-type]
        blocks: list[BlockOut] = []
        if choice.thought:
            blocks.append(ThinkingOut(choice.thought))
        if choice.text or not choice.calls:
            blocks.append(TextOut(choice.text))
        blocks += [
            ToolUseOut(id, name, _input(given, cut=choice.finish == "length"))
            for id, name, given in choice.calls
        ]
        reply = self._message(blocks, self._usage(finished))
        reply.stop_reason, reply.stop_sequence = self._reason(), choice.stop
        reply.paceline = paceline_of(self._house, self._order, finished)
        return reply

    def opening(self) -> Iterable[MessageStart]:
        """Say that the message begins; how much of its prompt is cached is told at its end."""
        prompt = sum(map(len, self._order.prompts))
        return [MessageStart(self._message([], MessageUsage(prompt, 0)))]

    def piece(self, piece: Piece) -> Iterable[msgspec.Struct]:
        """Let blocks grow, each after the one before it is over."""
        events: list[msgspec.Struct] = []
        if piece.thought:
            events += self._turn_to(ThinkingOut(""))
            events.append(BlockDelta(self._index, ThinkingGrowth(piece.thought)))
        if piece.text:
            events += self._turn_to(TextOut(""))
            events.append(BlockDelta(self._index, TextGrowth(piece.text)))
        for call in piece.calls:
            events += self._grow_call(call)
        return events

    def ended(self, ended: Ended) -> Iterable[msgspec.Struct]:
        """Remember how it ended; `closing` says it."""
        self._ended = ended
        return []

    def closing(self, finished: Finished) -> Iterable[msgspec.Struct]:
        """End the last block and then the message."""
        events = [] if self._index >= 0 else self._turn_to(TextOut(""))
        stopped = Stopped(self._reason(), self._ended.stop)
        delta = MessageDelta(stopped, self._usage(finished))
        delta.paceline = paceline_of(self._house, self._order, finished)
        return [*events, *self._end_block(), delta, MessageStop()]

    def failure(self, broken: Broken) -> msgspec.Struct:
        """Return the error in Anthropic's words."""
        return error_reply(
            broken_status(broken), shortened(broken.message), self._order.generation.request_id
        )

    def _message(self, blocks: list[BlockOut], usage: MessageUsage) -> MessageReply:
        suffix = self._order.generation.request_id.removeprefix("req-")
        return MessageReply(f"msg_{suffix}", self._house.served.name, blocks, usage)

    def _usage(self, finished: Finished) -> MessageUsage:
        usage = usage_of(self._order, finished)
        cached = usage.prompt_tokens_details.cached_tokens
        return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)

    def _reason(self) -> StopReason:
        if self._ended.stop is not None:
            return "stop_sequence"
        match self._ended.finish:
            case "length":
                return "max_tokens"
            case "tool_calls":
                return "tool_use"
            case "stop":
                return "end_turn"
            case _:
                assert_never(self._ended.finish)

    def _grow_call(self, call: Call) -> list[msgspec.Struct]:
        events: list[msgspec.Struct] = []
        if call.id is not None and call.name is not None:
            events += self._end_block()
            events += self._turn_to(ToolUseOut(call.id, call.name, {}))
        if call.arguments:
            events.append(BlockDelta(self._index, InputGrowth(call.arguments)))
        return events

    def _turn_to(self, block: BlockOut) -> list[msgspec.Struct]:
        """End what grows and begin another block, unless one of that kind grows already."""
        if self._growing is type(block):
            return []
        events = self._end_block()
        self._index += 1
        self._growing = type(block)
        return [*events, BlockStart(self._index, block)]

    def _end_block(self) -> list[msgspec.Struct]:
        kind, self._growing = self._growing, None
        if kind is None:
            return []
        signed: list[msgspec.Struct] = []
        if kind is ThinkingOut:
            signed = [BlockDelta(self._index, SignatureGrowth())]
        return [*signed, BlockStop(self._index)]


def _input(arguments: str, *, cut: bool) -> dict[str, Any]:
    """Return a call's input as an object.

    What the model wrote and is none stays readable, under the key that Anthropic's guide to
    streamed tool input names for it; a call that its budget cut is no call yet, and has none.
    """
    raw = arguments.encode("utf-8", "replace")
    try:
        JsonBounds().check(raw)
        return _OBJECT.decode(raw)
    except (CallerError, msgspec.DecodeError):
        return {} if cut else {"INVALID_JSON": arguments}
