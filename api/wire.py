"""HTTP/1.1 as it is spoken here: what is not that is told so in the same JSON as any other error.

Hypercorn answers such bytes itself, before there is a request, with an empty body. It also goes
over to HTTP/2 and to WebSockets when a client asks, which nothing here needs.
"""

from typing import Any, Final
from urllib.parse import unquote, urlparse

import h11
import msgspec
from hypercorn.events import Closed
from hypercorn.protocol.events import EndBody, Request, Response
from hypercorn.protocol.h11 import STREAM_ID, H11Protocol
from hypercorn.protocol.http_stream import HTTPStream

from .problems import VERSION_HEADER, is_for_anthropic, new_request_id, said_of_http, wire_error

_ENCODER: Final = msgspec.json.Encoder()
_VERSIONS: Final = (b"1.0", b"1.1")
# What hypercorn's own errors have, and no answer of the app.
_BARE: Final = [(b"content-length", b"0"), (b"connection", b"close")]


class _UnservedError(Exception):
    """A request that no app can be asked."""

    def __init__(self, status: int) -> None:
        self.status = status


class Http1Protocol(H11Protocol):
    """HTTP/1.1 and nothing else; an `Upgrade` that a client offers is passed over, as it may be."""

    _refused = False

    async def handle(self, event: Any) -> None:
        """Take bytes, or the end of the connection."""
        try:
            await super().handle(event)
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
