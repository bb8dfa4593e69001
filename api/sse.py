"""Structs to event-stream bytes, and the body object that relays an actor to a client.

No async generator is on this path: `__aexit__` is the one place that tells the actor its
client has gone, whatever the reason.
"""

from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Any, Final, assert_never

import msgspec
import trio
from quart import Response
from quart.wrappers.response import ResponseBody

from ..actors.request import Alive, Broken, Event, Finished, RequestActor
from ..actors.speech import Ended, Piece
from .shape import Shape

_MOST: Final = 64  # events joined into one write, so that one stream cannot hog the loop
_MOST_BYTES: Final = 8192  # and of one write, so that a slow client's is over within its limit
_ENCODER: Final = msgspec.json.Encoder()


class EventBody(ResponseBody):
    """Relays an actor's events, as many as are ready in one write."""

    def __init__(self, actor: RequestActor, shape: Shape) -> None:
        self._actor = actor
        self._shape = shape
        self._opening: Iterable[msgspec.Struct] | None = shape.opening()
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
        if self._opening is not None:
            first, self._opening = self._opening, None
            if opening := self._encoded(first):
                return opening
        return await self._next_write()

    async def convert_to_sequence(self) -> bytes:
        """Return the whole stream at once."""
        return b"".join([part async for part in self])

    async def make_conditional(self, *args: Any) -> None:
        """Ranges make no sense for a stream."""
        raise NotImplementedError

    async def _next_write(self) -> bytes:
        """Return what is ready, at least one byte: an empty write would mean the end."""
        events = self._actor.events
        parts: list[bytes] = []
        while not any(parts):
            try:
                parts.append(self._format(await events.receive()))
                while len(parts) < _MOST and sum(map(len, parts)) < _MOST_BYTES:
                    parts.append(self._format(events.receive_nowait()))
            except trio.WouldBlock:
                pass
            except trio.EndOfChannel:
                self._over = True
                parts.append(self._last())
        return b"".join(parts)

    def _format(self, event: Event) -> bytes:
        match event:
            case Piece():
                return self._encoded(self._shape.piece(event))
            case Ended():
                return self._encoded(self._shape.ended(event))
            case Alive():
                return self._shape.alive
            case _:
                assert_never(event)

    def _last(self) -> bytes:
        """Return the one terminal event: the done mark, or an error and nothing after it."""
        match self._actor.outcome:
            case Finished() as finished:
                return self._encoded(self._shape.closing(finished)) + self._shape.mark
            case Broken() as broken:
                return self._encoded(self._shape.failing(broken))
            case None:
                raise AssertionError("an actor settles before it closes its channel")

    def _encoded(self, events: Iterable[msgspec.Struct]) -> bytes:
        return event_bytes(events, named=self._shape.named)


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
