"""What is said to a client whose bytes are no HTTP: the same JSON as any other error.

Hypercorn answers them itself, before there is a request, with an empty body.
"""

from typing import Any, Final

import h11
import msgspec
from hypercorn.protocol.h11 import H11Protocol

from .problems import VERSION_HEADER, is_for_anthropic, new_request_id, said_of_http, wire_error

_ENCODER: Final = msgspec.json.Encoder()


async def send_error(protocol: Any, status_code: int) -> None:
    """Answer what could not be read as a request, in place of hypercorn's own method.

    Args:
        protocol: The connection; it closes after this answer.
    """
    scope = getattr(protocol.stream, "scope", None) or {}
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
        *protocol.config.response_headers("h11"),
    ]
    await protocol._send_h11_event(h11.Response(status_code=status_code, headers=headers))
    await protocol._send_h11_event(h11.Data(data=body))
    await protocol._send_h11_event(h11.EndOfMessage())


def speak_json() -> None:
    """Let every connection of this process answer broken HTTP so."""
    H11Protocol._send_error_response = send_error  # type: ignore[method-assign, assignment]
