"""How slow a client may be: what is sent to it and what it sends is bounded by progress.

A client is cut when nothing moves for `client_stall_s`, or when one write or one body takes
longer than that and a second for each KiB. So one that goes on, however slowly within that, is
served to the end; one that takes or gives a byte now and then is not waited for for ever.
"""

import array
import fcntl
import sys
import termios
from typing import Any, Final

import trio
from hypercorn.events import Closed, RawData
from hypercorn.trio.tcp_server import TCPServer
from quart import Request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

from ..runtime.log import logger

LEAST_RATE: Final = 1024  # bytes a second, on the whole, that a client has to take or give
_PIECE: Final = 1 << 16  # bytes of one send where the socket itself is not in reach
_LOOKS: Final = 10  # times within the limit that progress is looked for
_MOST_BETWEEN_S: Final = 1.0


class Patience:
    """How long to wait for a client that is to move some bytes.

    Args:
        stall_s: Seconds in which something must move.
    """

    def __init__(self, stall_s: float) -> None:
        self._stall_s = stall_s
        self._began = self._moved = trio.current_time()
        self._bytes = 0

    def saw(self, count: int) -> None:
        """Note that bytes moved."""
        if count > 0:
            self._moved = trio.current_time()
            self._bytes += count

    @property
    def deadline(self) -> float:
        """When to wait no longer, unless more moves."""
        on_the_whole = self._began + self._stall_s + self._bytes / LEAST_RATE
        return min(self._moved + self._stall_s, on_the_whole)

    @property
    def next_look(self) -> float:
        """When to look for progress that wakes nobody."""
        between = min(self._stall_s / _LOOKS, _MOST_BETWEEN_S)
        return min(self.deadline, trio.current_time() + between)


class GuardedTCPServer(TCPServer):
    """Hypercorn's connection, with a sender that is fast when it can be and never stuck.

    Hypercorn's own would wait for a client that stops reading for ever, even past SIGTERM.
    """

    stall_s = 30.0

    async def protocol_send(self, event: Any) -> None:
        """Send without blocking where the socket has room; else wait, but not for ever."""
        if not isinstance(event, RawData):
            await super().protocol_send(event)
            return
        data = memoryview(event.data)
        if not self.send_lock.locked():
            data = data[self._send_nowait(data) :]
        if data and not await self._send_bounded(data):
            await self.protocol.handle(Closed())

    async def _close(self) -> None:
        """Close, cancelled or not: a socket that stays open keeps its client waiting."""
        with trio.CancelScope(shield=True):
            await super()._close()

    @property
    def _socket(self) -> Any:
        """The socket below the stream; None where it is not in reach."""
        return getattr(getattr(self.stream, "socket", None), "_sock", None)

    def _send_nowait(self, data: memoryview) -> int:
        """Send what fits into the socket's buffer; 0 when that is not known or nothing fits."""
        if self._socket is None:
            return 0
        try:
            return int(self._socket.send(data))
        except OSError:
            return 0  # the slow path finds out what is wrong

    async def _send_bounded(self, data: memoryview) -> bool:
        """Send the rest; False when the client is gone or too slow.

        Shielded, since half a message would spoil the connection for what comes behind it.
        """
        sent = False
        async with self.send_lock:
            with trio.CancelScope(shield=True):
                try:
                    sent = await self._send_rest(data, Patience(self.stall_s))
                except (trio.BrokenResourceError, trio.ClosedResourceError, OSError):
                    return False
                if not sent:
                    logger().info("connection.stalled", stall_s=self.stall_s)
                    await trio.aclose_forcefully(self.stream)
        return sent

    async def _send_rest(self, data: memoryview, patience: Patience) -> bool:
        """Send piece by piece; False when the client is too slow."""
        raw = self._socket
        stopping: float | None = None  # when a server that ends waits no longer
        unsent = _unsent(raw)
        while data:
            if self.context.terminated.is_set() and stopping is None:
                stopping = trio.current_time() + self.stall_s
            deadline = min(patience.deadline, stopping or patience.deadline)
            if trio.current_time() >= deadline:
                return False
            if raw is None:
                with trio.move_on_at(deadline) as waiting:
                    await self.stream.send_all(bytes(data[:_PIECE]))
                sent = 0 if waiting.cancelled_caught else len(data[:_PIECE])
                if not sent:
                    return False
                patience.saw(sent)
            else:
                sent = await self._send_some(raw, data, min(patience.next_look, deadline))
                left = _unsent(raw)
                # What the client took, which is what counts, and not what the buffer could hold.
                patience.saw(sent if left is None or unsent is None else unsent + sent - left)
                unsent = left
            data = data[sent:]
        return True

    async def _send_some(self, raw: Any, data: memoryview, until: float) -> int:
        """Send what fits, waiting for room first if there is none; return how many bytes."""
        try:
            return int(raw.send(data))
        except BlockingIOError:
            with trio.move_on_at(until):
                await trio.lowlevel.wait_writable(raw)
        return 0


def _unsent(raw: Any) -> int | None:
    """Return the bytes in a socket's buffer that the client has not taken; None if not known."""
    if raw is None or not sys.platform.startswith("linux"):
        return None
    count = array.array("i", [0])
    try:
        fcntl.ioctl(raw.fileno(), termios.TIOCOUTQ, count)
    except OSError:
        return None
    return count[0]


async def read_body(request: Request, stall_s: float) -> bytes:
    """Return a request's whole body.

    Raises:
        RequestTimeout: When the client sends too slowly; see `Patience`.
        RequestEntityTooLarge: When the body is larger than the app allows.
    """
    most = request.max_content_length
    patience = Patience(stall_s)
    data = bytearray()
    while True:
        try:
            with trio.fail_at(patience.deadline):
                part = await anext(request.body)
        except StopAsyncIteration:
            return bytes(data)
        except trio.TooSlowError:
            raise RequestTimeout("the body came too slowly; send it faster") from None
        data += part
        patience.saw(len(part))
        if most is not None and len(data) > most:
            raise RequestEntityTooLarge
