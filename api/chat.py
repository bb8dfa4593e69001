"""POST /v1/chat/completions."""

import time
from collections.abc import Iterable
from typing import Final

import msgspec
from quart import Response

from ..actors.house import House
from ..actors.request import Ended, Finished, Piece
from .answers import (
    BrokenAnswer,
    chat_logprobs,
    collect,
    new_request_id,
    open_request,
    paceline_of,
    usage_of,
)
from .problems import decode, reply
from .schemas import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatMessage,
    ChatReply,
    ChatRequest,
)
from .sse import stream
from .translate import Order, chat_order

_DECODER: Final = msgspec.json.Decoder(ChatRequest)


async def chat_completions(house: House, raw: bytes) -> Response:
    """Serve one chat request, streamed or whole."""
    body: ChatRequest = decode(_DECODER, raw)
    request_id = new_request_id()
    order = await chat_order(body, request_id, house.text, house.served, house.args)
    actor = open_request(house, order, "chat")
    headers = {"x-request-id": request_id}
    if order.stream:
        return stream(actor, ChatStream(house, order), headers)
    try:
        choices, finished = await collect(actor, order)
    except BrokenAnswer as error:
        return error.response()
    shown = order.alternatives is not None
    answer = ChatReply(
        id=_answer_id(order),
        created=int(time.time()),
        model=house.served.name,
        choices=[
            ChatChoice(
                index,
                ChatMessage(choice.text),
                choice.finish,
                chat_logprobs(tuple(choice.logprobs), house.text) if shown else None,
            )
            for index, choice in enumerate(choices)
        ],
        usage=usage_of(order, finished),
        paceline=paceline_of(order, finished, house.args.scheduler_mode.value),
    )
    return reply(200, answer, headers)


class ChatStream:
    """The chunks of one streamed chat; every chunk has the same id, time and model."""

    def __init__(self, house: House, order: Order) -> None:
        self._house = house
        self._order = order
        self._id = _answer_id(order)
        self._created = int(time.time())
        self._open = len(order.generation.rows)
        self._last: ChatChunkChoice | None = None

    def opening(self) -> Iterable[ChatChunk]:
        """Name the role of every choice, once."""
        return [
            self._chunk(ChatChunkChoice(index, ChatDelta("assistant", "")))
            for index in range(self._open)
        ]

    def piece(self, piece: Piece) -> Iterable[ChatChunk]:
        """Return new text."""
        shown = self._order.alternatives is not None
        logprobs = chat_logprobs(piece.logprobs, self._house.text) if shown else None
        delta = ChatDelta(content=piece.text)
        return [self._chunk(ChatChunkChoice(piece.index, delta, logprobs=logprobs))]

    def ended(self, ended: Ended) -> Iterable[ChatChunk]:
        """Return a choice's end; the very last one waits, to carry what ran."""
        choice = ChatChunkChoice(ended.index, ChatDelta(), ended.finish)
        self._open -= 1
        if self._open == 0:
            self._last = choice
            return []
        return [self._chunk(choice)]

    def closing(self, finished: Finished) -> Iterable[ChatChunk]:
        """Return the last choice's end and, when asked for, the usage."""
        chunks = [self._chunk(self._last)] if self._last is not None else []
        if self._order.include_usage:
            chunks.append(self._chunk(None))
            chunks[-1].usage = usage_of(self._order, finished)
        mode = self._house.args.scheduler_mode.value
        chunks[-1].paceline = paceline_of(self._order, finished, mode)
        return chunks

    def _chunk(self, choice: ChatChunkChoice | None) -> ChatChunk:
        chunk = ChatChunk(
            self._id,
            self._created,
            self._house.served.name,
            [choice] if choice is not None else [],
        )
        if self._order.include_usage:
            chunk.usage = None
        return chunk


def _answer_id(order: Order) -> str:
    return "chatcmpl-" + order.generation.request_id.removeprefix("req-")
