"""Real hypercorn over memory streams in virtual time: keep-alive, disconnects, slow readers."""

import contextlib
import gc
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import hypercorn.trio.run
import msgspec
import pytest
import trio
import trio.testing
from hypercorn.config import Config
from hypercorn.trio.worker_context import WorkerContext
from hypercorn.utils import wrap_app
from tests.fakes import READ_S, STEP_S, Stand, row_context, stand

from paceline.actors.house import HEARTBEAT_SECONDS
from paceline.actors.request import Generation
from paceline.api.app import make_app
from paceline.api.connection import GuardedTCPServer
from paceline.api.patience import LEAST_RATE, Patience
from paceline.api.schemas import ChatRequest, CompletionRequest
from paceline.api.server import _config, serve_house
from paceline.runtime.settings import ServerArgs

_KEEP_ALIVE_S = 5.0


class _FakeSocket:
    family = socket.AF_INET

    def getpeername(self) -> tuple[str, int]:
        return ("127.0.0.1", 1)

    getsockname = getpeername


@asynccontextmanager
async def _connections(args: ServerArgs) -> AsyncIterator[Callable[[], Any]]:
    """Serve a house on fakes to as many client connections as are asked for."""
    async with stand(args) as place, trio.open_nursery() as nursery:
        config = _config(args)
        GuardedTCPServer.stall_s = args.client_stall_s
        app = wrap_app(make_app(place.house), 0, "asgi")

        def connect() -> Any:
            client, server = trio.testing.memory_stream_pair()
            server.socket = _FakeSocket()  # type: ignore[attr-defined]
            stream: Any = server
            nursery.start_soon(GuardedTCPServer(app, config, WorkerContext(None), {}, stream).run)
            return client

        yield connect
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def _connected(**settings: Any) -> AsyncIterator[tuple[Any, Stand, Any]]:
    """Serve a house on fakes to one client connection."""
    args = ServerArgs(keep_alive_s=_KEEP_ALIVE_S, **settings)
    async with stand(args) as place, trio.open_nursery() as nursery:
        config = _config(args)
        config.logger_class = Config().logger_class
        config.errorlog = None
        GuardedTCPServer.stall_s = args.client_stall_s
        client, server = trio.testing.memory_stream_pair()
        server.socket = _FakeSocket()  # type: ignore[attr-defined]
        app = wrap_app(make_app(place.house), 0, "asgi")
        stream: Any = server
        connection = GuardedTCPServer(app, config, WorkerContext(None), {}, stream)
        nursery.start_soon(connection.run)
        yield client, place, server
        nursery.cancel_scope.cancel()


def _request(body: dict[str, Any] | None, path: str = "/v1/chat/completions") -> bytes:
    if body is None:
        return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def _chat(tokens: int, stream: bool = True) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": tokens,
        "stream": stream,
    }


async def _receive_until(client: Any, mark: bytes) -> bytes:
    data = b""
    while mark not in data:
        more = await client.receive_some()
        assert more, f"the connection ended before {mark!r}"
        data += more
    return data


async def test_an_idle_connection_is_closed_after_an_answer(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """The keep-alive timer runs again after each answer, not only before the first."""
    async with _connected() as (client, _, _):
        for _ in range(2):
            await client.send_all(_request(None, "/v1/models"))
            await _receive_until(client, b'"object":"list"}')
            await trio.sleep(_KEEP_ALIVE_S - 1)
        await client.send_all(_request(_chat(3)))
        await _receive_until(client, b"[DONE]")
        ended = trio.current_time()
        while await client.receive_some():
            pass
        assert trio.current_time() - ended == pytest.approx(_KEEP_ALIVE_S)


async def test_a_header_that_trickles_is_cut(autojump_clock: trio.testing.MockClock) -> None:
    """A client that never ends its header does not hold a connection for ever."""
    async with _connected() as (client, _, _):
        await client.send_all(b"GET /v1/models HTTP/1.1\r\nHost: loc")
        began = trio.current_time()
        assert await client.receive_some() == b""
        assert trio.current_time() - began == pytest.approx(_KEEP_ALIVE_S)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("more", ["", "\r\n", "the next request", "an upgrade"])
async def test_a_hang_up_cancels_the_request(
    autojump_clock: trio.testing.MockClock, stream: bool, more: str
) -> None:
    """Closing the socket ends the request within a turn, whatever was sent behind it."""
    sent = _request(_chat(100_000, stream))
    if more == "an upgrade":
        sent = sent.replace(
            b"\r\n", b"\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n", 1
        )
    elif more:
        sent += _request(None, "/v1/models") if more == "the next request" else more.encode()
    async with _connected() as (client, place, _):
        await client.send_all(sent)
        await trio.sleep(0.5)
        assert place.open_rows
        await client.aclose()
        await trio.sleep(3 * STEP_S)
        assert place.open_rows == set()
        assert place.house.meter.requests == {"cancelled": 1}


async def test_bytes_sent_ahead_are_bounded(autojump_clock: trio.testing.MockClock) -> None:
    """A client cannot fill the server's memory behind a request that runs."""
    taken = 0
    async with _connected() as (client, place, server):
        receive_some = server.receive_some

        async def counted(most: int) -> bytes:
            nonlocal taken
            data: bytes = await receive_some(most)
            taken += len(data)
            return data

        server.receive_some = counted
        await client.send_all(_request(_chat(1000, False)) + b"x" * 2_000_000)
        await trio.sleep(1)
        assert place.open_rows
        assert taken < 200_000


@pytest.mark.parametrize("size", [1, 300_000])
async def test_requests_sent_ahead_are_answered_in_order(
    autojump_clock: trio.testing.MockClock, size: int
) -> None:
    """What comes while an answer is made waits for its end, and large bodies wait outside."""
    second = _request({**_chat(2, False), "user": "x" * size})
    unserved = b"GET /v1/models HTTP/9.9\r\nHost: localhost\r\n\r\n"
    async with _connected() as (client, _, _), trio.open_nursery() as nursery:
        sent = _request(_chat(30)) + second + _request(None, "/v1/models") + unserved
        nursery.start_soon(client.send_all, sent)
        data = b""
        while more := await client.receive_some():
            data += more
    parts = rb'" w29".*\[DONE\].*"content":" w0 w1".*"object":"list".*HTTP/1.1 505 '
    assert re.search(parts, data, re.DOTALL)


@pytest.mark.parametrize("more", [b"", b"\r\n\r\n", b"noise", b"GET /v1/models HTTP/1.1\r\n"])
async def test_a_client_that_leaves_at_the_very_end_is_not_waited_for(
    autojump_clock: trio.testing.MockClock, more: bytes
) -> None:
    """The connection is closed with the answer's last bytes, whatever was left unread."""
    async with _connected() as (client, _, server):
        send_all = server.send_all

        async def leaving(data: bytes) -> None:
            await send_all(data)
            if data == b"0\r\n\r\n":
                await client.send_stream.aclose()
                await trio.sleep(0.1)

        server.send_all = leaving
        await client.send_all(_request(_chat(20)) + more)
        await _receive_until(client, b"[DONE]")
        ended = trio.current_time()
        while await client.receive_some():
            pass
        assert trio.current_time() - ended < 1


async def test_a_client_that_stops_reading_is_cut(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A socket that takes nothing for client_stall_s is closed, and its row is free."""
    async with _connected(client_stall_s=3) as (client, place, server):
        await client.send_all(_request(_chat(7000)))
        await _receive_until(client, b"w3")
        server.send_stream.send_all_hook = trio.sleep_forever
        stopped = trio.current_time()
        while await client.receive_some():
            pass
        assert trio.current_time() - stopped == pytest.approx(3, abs=0.1)
        await trio.sleep(3 * STEP_S)
        assert place.open_rows == set()
        assert place.house.open_requests == 0


async def test_a_slow_reader_is_not_cut(autojump_clock: trio.testing.MockClock) -> None:
    """A client that takes something within client_stall_s each time gets its whole answer."""
    async with _connected(client_stall_s=3) as (client, _, server):

        async def slow() -> None:
            await trio.sleep(1)

        server.send_stream.send_all_hook = slow
        await client.send_all(_request(_chat(40)))
        assert b" w39" in await _receive_until(client, b"[DONE]")


async def test_long_reading_is_bridged_by_comments(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """While nothing is generated a stream carries comments, so no client gives up."""
    async with _connected(context_tokens=0) as (client, place, _):
        place.house.start(Generation("other", (row_context(1, 10_000),))).events.close()
        other = place.house.start(Generation("next", (row_context(6000, 2000),)))

        async def read() -> None:
            async for _ in other.events:
                pass

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            await client.send_all(_request(_chat(2)))
            data = await _receive_until(client, b"[DONE]")
        waited = 6000 * READ_S + 2000 * STEP_S
        # The first beat only notes the silence; each later one breaks it.
        assert data.count(b": keep-alive") == int(waited // HEARTBEAT_SECONDS) - 1


async def test_the_guarded_connection_is_the_one_that_is_served(
    nursery: trio.Nursery,
) -> None:
    """Hypercorn builds our connection class; if it stops doing so, stalled readers hang it."""
    async with stand(ServerArgs(port=0)) as place:
        stop = trio.Event()
        urls: list[str] = []

        def announce(url: str, _: object) -> None:
            urls.append(url)
            stop.set()

        await serve_house(place.house, stop, announce)
    assert urls[0].startswith("http://127.0.0.1:")
    assert hypercorn.trio.run.TCPServer is GuardedTCPServer


async def test_a_large_body_is_sent_to_a_client_that_reads_steadily(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Pieces that each take most of client_stall_s add up to far more, and none is cut."""
    async with _connected(client_stall_s=3) as (client, place, server):

        async def slow() -> None:
            await trio.sleep(2)

        server.send_stream.send_all_hook = slow
        place.house.served = msgspec.structs.replace(place.house.served, name="x" * 600_000)
        began = trio.current_time()
        await client.send_all(_request(None, "/v1/models"))
        await _receive_until(client, b'"object":"list"}')
        assert trio.current_time() - began > 4 * 3


async def test_a_client_that_takes_a_byte_now_and_then_is_cut(
    mock_clock: trio.testing.MockClock,
) -> None:
    """Patience ends at once without progress, and on the whole below the least rate."""
    times: dict[int, float] = {}

    async def wait(step: int) -> None:
        patience = Patience(30.0)
        began = trio.current_time()
        while trio.current_time() < patience.deadline and trio.current_time() - began < 1000:
            mock_clock.jump(29.0)
            patience.saw(step)
        times[step] = trio.current_time() - began

    for step in (0, 1, 29 * LEAST_RATE):
        await wait(step)
    assert times[0] == 58.0
    assert times[1] == 58.0
    assert times[29 * LEAST_RATE] >= 1000


@pytest.mark.slow
async def test_a_steady_slow_reader_of_a_real_socket_gets_everything() -> None:
    """A body that takes twice client_stall_s, never pausing so long, arrives whole."""
    size, rate, stall_s = 4_000_000, 1_000_000, 2.0
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    listener.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    client = await trio.open_tcp_stream("127.0.0.1", listener.socket.getsockname()[1])
    server: Any = await listener.accept()
    await listener.aclose()
    connection = GuardedTCPServer(None, Config(), WorkerContext(None), {}, server)  # type: ignore[arg-type]
    connection.stall_s = stall_s
    got = 0
    async with trio.open_nursery() as nursery, client:

        async def send() -> None:
            async with server:
                assert await connection._send_bounded(memoryview(b"x" * size))

        nursery.start_soon(send)
        while part := await client.receive_some(rate // 20):
            got += len(part)
            await trio.sleep(len(part) / rate)
    assert got == size


async def test_a_dead_reader_of_a_real_socket_is_cut() -> None:
    """A socket whose peer reads nothing is closed, whatever its buffers took before."""
    accepted, peer = socket.socketpair()
    server: Any = trio.SocketStream(trio.socket.from_stdlib_socket(accepted))
    connection = GuardedTCPServer(None, Config(), WorkerContext(None), {}, server)  # type: ignore[arg-type]
    connection.stall_s = 0.2
    with trio.fail_after(60):
        assert not await connection._send_bounded(memoryview(b"x" * 10_000_000))
    peer.close()
    accepted.close()


async def test_a_steady_slow_upload_is_served_and_a_dead_one_is_refused(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A body that comes in pieces for minutes is read; one that stops is a 408 in good time."""
    head, _, body = _request(_chat(2, stream=False)).partition(b"\r\n\r\n")
    body = b" " * 60_000 + body
    head = re.sub(rb"Content-Length: \d+", b"Content-Length: %d" % len(body), head)
    data = head + b"\r\n\r\n" + body
    async with _connected(client_stall_s=3) as (client, _, _):
        for at in range(0, len(data), 100):
            await client.send_all(data[at : at + 100])
            await trio.sleep(0.09)
        assert b" w1" in await _receive_until(client, b'"usage"')
    async with _connected(client_stall_s=3) as (client, _, _):
        await client.send_all(data[:-10])
        began = trio.current_time()
        answer = await _receive_until(client, b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 408")
        assert trio.current_time() - began == pytest.approx(3)


async def test_a_body_in_chunks_has_the_same_bound(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """Without a Content-Length too, more than body_limit_mb is a 413."""
    head = (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        b"Content-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    async with _connected(body_limit_mb=1) as (client, _, _):
        await client.send_all(head)

        async def upload() -> None:
            with contextlib.suppress(trio.BrokenResourceError):
                for _ in range(17):
                    await client.send_all(piece)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(upload)
            assert (await _receive_until(client, b"\r\n\r\n")).startswith(b"HTTP/1.1 413")
            nursery.cancel_scope.cancel()


_OPEN = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)


@pytest.mark.parametrize("length", [None, 1 << 20])
async def test_bodies_on_their_way_are_bounded_together_and_newcomers_served(
    autojump_clock: trio.testing.MockClock, length: int | None
) -> None:
    """Slow uploads, announced or in chunks, never hold more than four times body_limit_mb together.

    The ones that have held most for longest are cut, and a body that comes at once is served.
    """
    args = ServerArgs(body_limit_mb=1, client_stall_s=300)
    head = _OPEN + (
        b"Transfer-Encoding: chunked\r\n\r\n"
        if length is None
        else b"Content-Length: %d\r\n\r\n" % length
    )
    async with _connections(args) as connect:
        slow = []
        for _ in range(14):
            client = connect()
            await client.send_all(head)
            for _ in range(5):
                piece = b" " * 100_000
                chunk = b"%x\r\n%s\r\n" % (len(piece), piece)
                await client.send_all(chunk if length is None else piece)
                await trio.sleep(1)
            slow.append(client)
        large = _chat(2, stream=False)
        large["messages"][0]["content"] = "x" * 4_000
        data = _request({**large, "some_extra": "x" * 900_000})
        newcomer = connect()
        await newcomer.send_all(data)
        assert (await _receive_until(newcomer, b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
        for client in slow[:4]:
            assert (await _receive_until(client, b"\r\n\r\n")).startswith(b"HTTP/1.1 503")


async def test_announcing_much_keeps_nobody_out(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """What counts is what has come: many that announce the largest body and send little."""
    async with _connections(ServerArgs(body_limit_mb=2, client_stall_s=30)) as connect:
        for _ in range(20):
            await connect().send_all(_OPEN + b"Content-Length: 2000000\r\n\r\n{")
        newcomer = connect()
        body = {**_chat(2, stream=False), "some_extra": "x" * 1_500_000}
        await newcomer.send_all(_request(body))
        assert (await _receive_until(newcomer, b"\r\n\r\n")).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_what_a_request_sent_is_not_kept_while_it_is_answered(
    autojump_clock: trio.testing.MockClock, path: str
) -> None:
    """Neither the bytes of a body nor what was decoded of it live as long as an answer."""
    mark = "kept" * 20_000
    body: dict[str, Any] = {"max_tokens": 5_000, "user": mark, "stop": ["never"]}
    body |= {"prompt": "x"} if path == "/v1/completions" else {"messages": _chat(1)["messages"]}
    async with _connected() as (client, place, _):
        await client.send_all(_request(body, path))
        await trio.sleep(1)
        assert place.open_rows
        gc.collect()
        kept = [one for one in gc.get_objects() if isinstance(one, ChatRequest | CompletionRequest)]
        assert kept == []
