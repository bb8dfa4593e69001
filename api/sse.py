"""Structs to event-stream bytes, and the body object that relays an actor to a client.

No async generator is on this path: `__aexit__` is the one place that tells the actor its
client has gone, whatever the reason.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from types import TracebackType
from typing import Any, Final, assert_never

import msgspec
import trio
from quart import Response
from quart.wrappers.response import ResponseBody

from ..actors.request import Alive, Broken, Event, Finished, RequestActor
from ..actors.speech import Ended, Piece
from ..runtime.log import logger
from .offload import ANSWERS, at_length
from .shape import Shape

_MOST: Final = 64  # events joined into one write, so that one stream cannot hog the loop
_MOST_BYTES: Final = 8192  # and of one write, so that a slow client's is over within its limit
_ENCODER: Final = msgspec.json.Encoder()


class EventBody(ResponseBody):
    """Relays an actor's events, as many as are ready in one write."""

    def __init__(self, actor: RequestActor, shape: Shape) -> None:
        self._actor = actor
        self._shape = shape
        self._begun = False
        self._over = False
        self._rest = b""  # of an event that is larger than a write
        self._given = 0  # bytes of that

    async def __aenter__(self) -> "EventBody":
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._actor.events.close()
        if self._actor.outcome is None:
            self._actor.hang_up("client_disconnect")

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        if self._given >= len(self._rest):
            self._rest, self._given = await self._next_bytes(), 0
        else:
            self._actor.reader_took()
        part = self._rest[self._given : self._given + _MOST_BYTES]
        self._given += len(part)
        return part

    async def _next_bytes(self) -> bytes:
        if self._over:
            raise StopAsyncIteration
        parts: list[bytes] = []
        try:
            await self._write(parts)
        except Exception as error:
            logger().error("stream.crashed", error=repr(error), exc_info=error)
            self._over = True
            self._actor.hang_up("internal_error")
            parts.append(self._failed())
        return b"".join(parts)

    async def convert_to_sequence(self) -> bytes:
        """Return the whole stream at once."""
        return b"".join([part async for part in self])

    async def make_conditional(self, *args: Any) -> None:
        """Ranges make no sense for a stream."""
        raise NotImplementedError

    async def _write(self, parts: list[bytes]) -> None:
        """Add what is ready, at least one byte: an empty write would mean the end."""
        if not self._begun:
            self._begun = True
            parts.append(await self._encoded(self._shape.opening, self._shape.opens_long))
        events = self._actor.events
        while not any(parts):
            try:
                parts.append(await self._formatted(await events.receive()))
                while len(parts) < _MOST and sum(map(len, parts)) < _MOST_BYTES:
                    parts.append(await self._formatted(events.receive_nowait()))
            except trio.WouldBlock:
                pass
            except trio.EndOfChannel:
                self._over = True
                parts.append(await self._last())

    async def _formatted(self, event: Event) -> bytes:
        match event:
            case Piece():
                entries = len(event.logprobs) + len(event.prompt_logprobs)
                return await self._encoded(
                    lambda: self._shape.piece(event), self._shape.is_long(entries)
                )
            case Ended():
                return await self._encoded(lambda: self._shape.ended(event))
            case Alive():
                return self._shape.alive
            case _:
                assert_never(event)

    async def _last(self) -> bytes:
        """Return the one terminal event: the done mark, or an error and nothing after it."""
        match self._actor.outcome:
            case Finished() as finished:
                long = self._shape.ends_long(finished.receipt.completion_tokens)
                closing = await self._encoded(lambda: self._shape.closing(finished), long)
                return closing + self._shape.mark
            case Broken() as broken:
                return await self._encoded(lambda: self._shape.failing(broken))
            case None:
                raise AssertionError("an actor settles before it closes its channel")

    def _failed(self) -> bytes:
        """Return the terminal event of a stream whose own events could not be written."""
        broken = Broken("internal_error", "the answer could not be written")
        try:
            return event_bytes(self._shape.failing(broken), named=self._shape.named)
        except Exception:  # it repeats what cannot be written
            return event_bytes([self._shape.failure(broken)], named=self._shape.named)

    async def _encoded(
        self, events: Callable[[], Iterable[msgspec.Struct]], long: bool = False
    ) -> bytes:
        return await at_length(
            lambda: event_bytes(events(), named=self._shape.named), long, ANSWERS
        )


def event_bytes(events: Iterable[msgspec.Struct], *, named: bool) -> bytes:
    """Return events as a stream's bytes, `named` ones under their types."""
    parts = []
    for event in events:
        name = getattr(event, "type", None) if named else None
        prefix = b"" if name is None else b"event: " + name.encode() + b"\n"
        parts.append(prefix + b"data: " + _ENCODER.encode(event) + b"\n\n")
    return b"".join(parts)


def stream(actor: RequestActor, shape: Shape, headers: dict[str, str]) -> Response:
    """Return a streamed answer."""
    return event_stream(EventBody(actor, shape), headers)


def event_stream(body: ResponseBody | bytes, headers: dict[str, str]) -> Response:
    """Return a stream of events, with what keeps proxies from holding it back."""
    return Response(
        body,
        content_type="text/event-stream",
        headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers},
    )
