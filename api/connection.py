"""A connection: what is sent on it is bounded by progress, and no fault of it leaves it."""

import array
import fcntl
import sys
import termios
from typing import Any, Final

import trio
from hypercorn.events import Closed, RawData, Updated
from hypercorn.trio.task_group import TaskGroup
from hypercorn.trio.tcp_server import MAX_RECV, TCPServer
from hypercorn.typing import ConnectionState
from hypercorn.utils import parse_socket_addr

from ..runtime.log import logger
from .patience import Patience
from .wire import Http1Protocol

_PIECE: Final = 1 << 16  # bytes of one send where the socket itself is not in reach


class GuardedTCPServer(TCPServer):
    """Hypercorn's connection, with a sender that is fast when it can be and never stuck.

    Hypercorn's own would wait for a client that stops reading for ever, even past SIGTERM. Nor
    does an error leave a connection, since it would end the server that runs it.
    """

    stall_s = 30.0
    _all_read = False

    async def run(self) -> None:
        """Serve one client until it or the server goes; raises nothing but cancellation."""
        try:
            await self._serve()
        except* OSError:
            pass  # the client is gone
        except* Exception as errors:
            logger().error("connection.failed", error=repr(errors), exc_info=errors)

    async def _serve(self) -> None:
        try:
            peer = self.stream.socket
            async with TaskGroup() as task_group:
                self._task_group = task_group
                self.protocol = Http1Protocol(  # type: ignore[assignment]  # without what chooses
                    self.app,
                    self.config,
                    self.context,  # as hypercorn's own connection does
                    task_group,
                    ConnectionState(self.state),
                    False,
                    parse_socket_addr(peer.family, peer.getpeername()),
                    parse_socket_addr(peer.family, peer.getsockname()),
                    self.protocol_send,
                )
                await self.idle_task.restart(self._task_group, self._idle_timeout)
                await self._read_data()
                self._all_read = True
                await self.idle_task.stop()  # nobody is left to wait for
        finally:
            await self._close()

    async def _read_data(self) -> None:
        """Give the protocol what comes, and its turn when it may go on with what came before."""
        protocol: Any = self.protocol
        data = None
        while data != b"":
            data = None
            with trio.CancelScope() as protocol.reading:
                try:
                    data = bytes(await self.stream.receive_some(MAX_RECV))
                except (trio.ClosedResourceError, trio.BrokenResourceError):
                    break
            if data is None:
                await protocol.resume()
            else:
                await protocol.handle(RawData(data))
        await protocol.handle(Closed())

    async def protocol_send(self, event: Any) -> None:
        """Send without blocking where the socket has room; else wait, but not for ever."""
        if isinstance(event, Updated) and self._all_read:
            return  # an answer that ends now must not have the next request waited for
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
                except (trio.BrokenResourceError, trio.ClosedResourceError, OSError, ValueError):
                    return False  # a closed socket has no number, which is a ValueError
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
    except (OSError, ValueError):  # the latter when it is closed
        return None
    return count[0]
