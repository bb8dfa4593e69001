"""HTTP/1.1 as it is spoken here: what is not that is told so in the same JSON as any other error.

Hypercorn answers such bytes itself, before there is a request, with an empty body. It also goes
over to HTTP/2 and to WebSockets when a client asks, which nothing here needs.
"""

from collections.abc import Awaitable
from typing import Any, Final
from urllib.parse import unquote, urlparse

import h11
import msgspec
import trio
from hypercorn.events import Closed, Updated
from hypercorn.protocol.events import Body, EndBody, Request, Response
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

from .problems import VERSION_HEADER, is_for_anthropic, new_request_id, said_of_http, wire_error

_ENCODER: Final = msgspec.json.Encoder()
_VERSIONS: Final = (b"1.0", b"1.1")
# What hypercorn's own errors have, and no answer of the app.
_BARE: Final = [(b"content-length", b"0"), (b"connection", b"close")]


_MOST_AHEAD: Final = 1 << 16  # bytes read of a client's next requests while one is answered


class _UnservedError(Exception):
    """A request that no app can be asked."""

    def __init__(self, status: int) -> None:
        self.status = status


class Http1Protocol(H11Protocol):
    """HTTP/1.1 and nothing else; an `Upgrade` that a client offers is passed over, as it may be.

    `reading` is the scope of the connection's wait for bytes. It is cancelled when an answer is
    over and a request that came meanwhile can be taken; see `resume`.
    """

    reading: trio.CancelScope | None = None
    _refused = False

    async def handle(self, event: Any) -> None:
        """Take bytes, or the end of the connection."""
        await self._or_refuse(super().handle(event))

    async def resume(self) -> None:
        """Take what came while the request before it was answered."""
        await self._or_refuse(self._handle_events())

    async def _or_refuse(self, taking: Awaitable[None]) -> None:
        try:
            await taking
        except _UnservedError as error:
            await self._send_error_response(error.status)
            await self.send(Closed())

    async def stream_send(self, event: Any) -> None:
        """Send a part of an answer; hypercorn's own errors get a body and end the connection."""
        if isinstance(event, Response) and list(event.headers) == _BARE:
            self._refused = True
            await self._send_error_response(event.status_code)
        elif self._refused and isinstance(event, EndBody):
            await self.send(Closed())
        else:
            await super().stream_send(event)

    async def _handle_events(self) -> None:
        """Take what the bytes say so far.

        Hypercorn's own waits here when a client sends more while it is answered, and so would
        not see it go; bytes of a next request wait in the buffer instead, as long as they are few.
        """
        while True:
            if self.connection.they_are_waiting_for_100_continue:
                headers = self.config.response_headers("h11")
                await self._send_h11_event(
                    h11.InformationalResponse(status_code=100, headers=headers)
                )
            try:
                event = self.connection.next_event()
            except h11.RemoteProtocolError as error:
                if self.connection.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
                    await self._send_error_response(error.error_status_hint)
                await self.send(Closed())
                return
            ahead = len(self.connection.trailing_data[0])
            # Without a stream there is no answer whose end would wake who waits here.
            if event is h11.PAUSED and self.stream is not None and ahead > _MOST_AHEAD:
                await self.can_read.clear()
                await self.can_read.wait()
            elif event in (h11.PAUSED, h11.NEED_DATA) or isinstance(event, h11.ConnectionClosed):
                return
            elif self.stream is None and not isinstance(event, h11.Request):
                return  # of a request that was answered before it was here, which ends all
            else:
                await self._take(event)

    async def _take(self, event: Any) -> None:
        if isinstance(event, h11.Request):
            await self.send(Updated(idle=False))
            await self._check_protocol(event)
            await self._create_stream(event)
        elif self.stream is None:
            raise AssertionError("only a request begins a stream")
        elif isinstance(event, h11.Data):
            await self.stream.handle(Body(stream_id=STREAM_ID, data=event.data))
        elif isinstance(event, h11.EndOfMessage):
            await self.stream.handle(EndBody(stream_id=STREAM_ID))

    async def _maybe_recycle(self) -> None:
        await super()._maybe_recycle()
        if self.connection.trailing_data[0] and self.reading is not None:
            self.reading.cancel(reason="a next request came already")

    async def _check_protocol(self, event: h11.Request) -> None:
        if event.http_version not in _VERSIONS:
            raise _UnservedError(505)
        if not _has_path(event.target):
            raise _UnservedError(400)

    async def _create_stream(self, request: h11.Request) -> None:
        self.stream = HTTPStream(
            self.app,
            self.config,
            self.context,
            self.task_group,
            self.ssl,
            self.client,
            self.server,
            self.stream_send,
            STREAM_ID,
        )
        await self.stream.handle(
            Request(
                stream_id=STREAM_ID,
                headers=list(request.headers),
                http_version=request.http_version.decode(),
                method=request.method.decode("ascii").upper(),
                raw_path=request.target,
                state=self.connection_state,
            )
        )
        self.keep_alive_requests += 1
        await self.context.mark_request()

    async def _send_error_response(self, status_code: int) -> None:
        """Answer what could not be read as a request; the connection closes after it."""
        scope: Any = getattr(self.stream, "scope", None) or {}
        names = {bytes(name).lower() for name, _ in scope.get("headers", ())}
        anthropic = is_for_anthropic(scope.get("path", ""), VERSION_HEADER.encode() in names)
        request_id = new_request_id()
        body = _ENCODER.encode(
            wire_error(status_code, said_of_http(status_code), request_id, anthropic)
        )
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
            (b"x-request-id", request_id.encode()),
            *([(b"request-id", request_id.encode())] if anthropic else []),
            *self.config.response_headers("h11"),
        ]
        await self._send_h11_event(h11.Response(status_code=status_code, headers=headers))
        await self._send_h11_event(h11.Data(data=body))
        await self._send_h11_event(h11.EndOfMessage())


def _has_path(target: bytes) -> bool:
    """Say whether the web framework finds a path in a request's target."""
    path = unquote(target.partition(b"?")[0].decode("ascii"))
    try:
        return bool(path) and (path[0] == "/" or urlparse(path) is not None)
    except ValueError:
        return False  # brackets that are no address
