"""Any bytes at all over a real socket: the server answers or closes, and goes on."""

import base64
import json
import random
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
from quart_trio import QuartTrio
from tests.fakes import Stand, stand

from paceline.api import connection
from paceline.api.connection import GuardedTCPServer
from paceline.api.server import serve_house
from paceline.api.wire import Http1Protocol
from paceline.runtime.settings import ServerArgs

_H = b"Host: localhost\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_H2C = b"GET /health HTTP/1.1\r\n" + _H + b"Upgrade: h2c\r\nHTTP2-Settings: %s\r\n\r\n"
_WS = (
    b"GET /v1/models HTTP/1.1\r\n" + _H + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
_CHUNKED = (
    b"POST /v1/chat/completions HTTP/1.1\r\n" + _H + b"Content-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + _word(stream) + payload


def _word(value: int) -> bytes:
    return struct.pack(">I", value)


_SETTINGS = _frame(4, 0, 0, b"")
# Headers in HPACK: indexed ones, and literals without indexing.
_GET, _HTTP, _ROOT = b"\x82", b"\x86", b"\x84"
_CONNECT = b"\x02\x07CONNECT"
_ODD_PATH = b"\x04\x02/\xff"
_ODD_METHOD = b"\x02\x02\xff\xfe"
_AUTHORITY = b"\x01\x09localhost"


@asynccontextmanager
async def _served(**settings: Any) -> AsyncIterator[tuple[int, Stand]]:
    """Serve a house on fakes on a port of its own."""
    async with stand(ServerArgs(port=0, **settings)) as place, trio.open_nursery() as nursery:
        stop, ready = trio.Event(), trio.Event()
        found: list[str] = []

        def announce(url: str, _: object) -> None:
            found.append(url)
            ready.set()

        nursery.start_soon(serve_house, place.house, stop, announce)
        await ready.wait()
        yield int(found[0].rpartition(":")[2]), place
        stop.set()


async def _ask(port: int, data: bytes, end: bool = False) -> bytes:
    """Send bytes and return the answer, or all that comes back once the end of them is sent."""
    answer = b""
    with trio.fail_after(30):
        async with await trio.open_tcp_stream("127.0.0.1", port) as client:
            with suppress(trio.BrokenResourceError):
                await client.send_all(data)
                if end:
                    await client.send_eof()
                while (end or not _whole(answer)) and (part := await client.receive_some()):
                    answer += part
    return answer


def _whole(answer: bytes) -> bool:
    """Say whether the first answer is here."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head)
    return length is not None and len(body) >= int(length[1])


async def _assert_well(port: int) -> None:
    answer = await _ask(port, b"GET /health HTTP/1.1\r\n" + _H + b"Connection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        *((_H2C % settings, 200) for settings in (b"!!!x", b"AAA", b"AAT_____", b"")),
        (_H2C % base64.urlsafe_b64encode(struct.pack(">HI", 3, 100)), 200),
        (_H2C.replace(b"HTTP2-Settings: %s\r\n", b""), 200),
        (_PREFACE, 505),
        (_PREFACE + b"\xff" * 200, 505),
        (_PREFACE + _SETTINGS + _frame(1, 4, 1, _CONNECT + _AUTHORITY), 505),
        (_PREFACE + _SETTINGS + _frame(1, 5, 1, _GET + _HTTP + _AUTHORITY), 505),
        (_PREFACE + _SETTINGS + _frame(1, 5, 1, _GET + _HTTP + _ODD_PATH + _AUTHORITY), 505),
        (_PREFACE + _SETTINGS + _frame(1, 5, 1, _ODD_METHOD + _HTTP + _ROOT + _AUTHORITY), 505),
        (b"GET /health HTTP/3.0\r\n" + _H + b"\r\n", 505),
        (b"GET ?a HTTP/1.1\r\n" + _H + b"\r\n", 400),
        (b"GET http://[::1/x HTTP/1.1\r\n" + _H + b"\r\n", 400),
        (b"GET http://%5B/x HTTP/1.1\r\n" + _H + b"\r\n", 400),
        (b"GET http://localhost/health HTTP/1.1\r\n" + _H + b"\r\n", 200),
        (b"CONNECT a:1 HTTP/1.1\r\n" + _H + b"\r\n", 404),
        (b"GET /\xff HTTP/1.1\r\n" + _H + b"\r\n", 400),
        (_WS, 200),
        (_WS.replace(b"Sec-WebSocket-Key", b"X"), 200),
        (_WS.replace(b"/v1/models", b"/v1/chat/completions") + b"\xff" * 100, 405),
    ],
)
async def test_whatever_is_asked_the_server_goes_on(sent: bytes, status: int) -> None:
    """Each is answered as HTTP/1.1 in JSON, and the next client is served."""
    async with _served() as (port, _):
        answer = await _ask(port, sent)
        await _assert_well(port)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ".encode())
    told, _ = json.JSONDecoder().raw_decode(body.decode())
    assert ("error" in told) is (status >= 400)


async def test_bytes_that_are_nearly_requests_do_no_harm() -> None:
    """Mutated requests, fragments of HTTP/2 and noise: none ends the server or is a 500."""
    dice = random.Random(7)
    whole = [
        b"GET /health HTTP/1.1\r\n" + _H + b"\r\n",
        b"GET http://localhost:1/v1/models?x=%5B HTTP/1.1\r\n" + _H + b"\r\n",
        _CHUNKED,
        _WS,
        _H2C % b"AAMAAABkAAQAAP__",
        _PREFACE + _SETTINGS + _frame(1, 5, 1, _GET + _HTTP + _ROOT + _AUTHORITY),
    ]
    async with _served() as (port, _):
        for _ in range(150):
            sent = _mutated(bytearray(dice.choice(whole)), dice)
            answer = await _ask(port, sent, end=True)
            assert not answer.startswith(b"HTTP/1.1 500"), sent
        await _assert_well(port)


def _mutated(data: bytearray, dice: random.Random) -> bytes:
    for _ in range(dice.choice([1, 1, 2, 4])):
        at = dice.randrange(len(data)) if data else 0
        match dice.randrange(3):
            case 0 if data:
                data[at] = dice.randrange(256)
            case 1:
                del data[at : at + dice.randrange(1, 6)]
            case _:
                data[at:at] = bytes(dice.choices(b"\r\n :?[]%\x00\xff/=,;", k=3))
    return bytes(data)


def _raises(*_: Any) -> Any:
    raise ValueError("a fault of the server's own")


async def _raises_later(*_: Any) -> Any:
    raise ValueError("a fault of the server's own")


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (Http1Protocol, "handle", _raises_later),
        (Http1Protocol, "_create_stream", _raises_later),
        (Http1Protocol, "stream_send", _raises_later),
        (GuardedTCPServer, "protocol_send", _raises_later),
        (GuardedTCPServer, "_idle_timeout", _raises_later),
        (connection, "parse_socket_addr", _raises),
    ],
)
async def test_no_fault_of_a_connection_ends_the_server(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, fault: Callable[..., Any]
) -> None:
    """Wherever in a connection an exception comes from, only that connection ends."""
    async with _served() as (port, _):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fault)
            await _ask(port, b"GET /health HTTP/1.1\r\n" + _H + b"\r\n")
        await _assert_well(port)


@pytest.mark.parametrize(("path", "kind"), [("/v1/models", None), ("/v1/messages", "error")])
async def test_a_fault_below_the_app_has_a_body_too(
    monkeypatch: pytest.MonkeyPatch, path: str, kind: str | None
) -> None:
    """Where the app ends before it answers, the 500 is in JSON and in its dialect's shape."""
    async with _served() as (port, _):
        with monkeypatch.context() as patch:
            patch.setattr(QuartTrio, "__call__", _raises_later)
            answer = await _ask(port, f"GET {path} HTTP/1.1\r\n".encode() + _H + b"\r\n")
        await _assert_well(port)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 500 ")
    told = json.loads(body)
    assert told["error"]["message"]
    assert told.get("type") == kind


async def test_sending_on_a_socket_that_was_closed_is_no_fault() -> None:
    """A socket that another task has closed has no number; what is not sent is not sent."""
    accepted, peer = socket.socketpair()
    server: Any = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
    client: Any = GuardedTCPServer(None, None, None, {}, server)  # type: ignore[arg-type]
    await trio.aclose_forcefully(server)
    client.context = type("Context", (), {"terminated": trio.Event()})
    assert not await client._send_bounded(memoryview(b"x"))
    peer.close()
