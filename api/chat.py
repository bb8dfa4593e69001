"""POST /v1/chat/completions."""

from collections.abc import Iterable
from typing import Final

import msgspec
from quart import Response

from ..actors.house import House
from ..actors.request import Finished
from ..actors.speech import Ended, Piece
from ..runtime.context import TokenLogprob
from ..runtime.parts import Call
from .answers import (
    ChoiceShape,
    answer,
    chat_logprobs,
    paceline_of,
    usage_of,
)
from .models import check_model
from .problems import decoded, new_request_id
from .replies import (
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatReply,
    FunctionDelta,
    MadeCall,
)
from .schemas import ChatRequest
from .shape import Collected
from .translate import Order, chat_order

_DECODER: Final = msgspec.json.Decoder(ChatRequest)


async def chat_completions(house: House, raw: bytes, priority: str | None) -> Response:
    """Serve one chat request, streamed or whole.

    Args:
        priority: What the request's header asks for.
    """
    body: ChatRequest = await decoded(_DECODER, raw)
    del raw  # not kept while the answer is made
    check_model(house, body.model)
    order = await chat_order(body, new_request_id(), house.text, house.served, house.args, priority)
    del body  # nor this
    return await answer(house, order, "chat", ChatShape(house, order))


class ChatShape(ChoiceShape[ChatChunkChoice]):
    """A chat answer; every chunk of a streamed one has the same id, time and model."""

    def whole(self, choices: list[Collected], finished: Finished) -> ChatReply:
        """Return all choices with their messages."""
        return ChatReply(
            id=_answer_id(self._order),
            created=self._created,
            model=self._house.served.name,
            choices=[
                ChatChoice(
                    index,
                    _message(choice),
                    choice.finish,
                    _logprobs(self._house, self._order, tuple(choice.logprobs)),
                )
                for index, choice in enumerate(choices)
            ],
            usage=usage_of(self._order, finished),
            paceline=paceline_of(self._house, self._order, finished),
        )

    def opening(self) -> Iterable[ChatChunk]:
        """Name the role of every choice, once."""
        return [
            self._chunk(ChatChunkChoice(index, ChatDelta("assistant", "")))
            for index in range(self._open)
        ]

    def piece(self, piece: Piece) -> Iterable[ChatChunk]:
        """Return new text, thoughts and pieces of calls."""
        delta = ChatDelta()
        if piece.text or piece.logprobs:
            delta.content = piece.text
        if piece.thought:
            delta.reasoning_content = piece.thought
        if piece.calls:
            delta.tool_calls = [_call_delta(call) for call in piece.calls]
        logprobs = _logprobs(self._house, self._order, piece.logprobs)
        return [self._chunk(ChatChunkChoice(piece.index, delta, logprobs=logprobs))]

    def _end(self, ended: Ended) -> ChatChunkChoice:
        return ChatChunkChoice(ended.index, ChatDelta(), ended.finish)

    def _chunk(self, choice: ChatChunkChoice | None) -> ChatChunk:
        chunk = ChatChunk(
            _answer_id(self._order),
            self._created,
            self._house.served.name,
            [choice] if choice is not None else [],
        )
        if self._order.include_usage:
            chunk.usage = None
        return chunk


def _message(choice: Collected) -> ChatMessage:
    message = ChatMessage(choice.text or (None if choice.calls else ""))
    if choice.calls:
        message.tool_calls = [
            MadeCall(id, CalledFunction(name, arguments)) for id, name, arguments in choice.calls
        ]
    if choice.thought:
        message.reasoning_content = choice.thought
    return message


def _call_delta(call: Call) -> CallDelta:
    """Return a piece of a call: what names it comes with its first piece and never again."""
    delta = CallDelta(call.index, FunctionDelta(call.arguments))
    if call.id is not None and call.name is not None:
        delta.id, delta.type, delta.function.name = call.id, "function", call.name
    return delta


def _logprobs(house: House, order: Order, entries: tuple[TokenLogprob, ...]) -> ChatLogprobs | None:
    return chat_logprobs(entries, house.text) if order.alternatives is not None else None


def _answer_id(order: Order) -> str:
    return "chatcmpl-" + order.generation.request_id.removeprefix("req-")
