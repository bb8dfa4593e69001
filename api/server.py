"""Hypercorn in our own nursery, with the guards it lacks, and the life of the process."""

import resource
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import hypercorn.trio.run
import trio
from hypercorn.config import Config
from hypercorn.trio import serve

from ..actors.house import House, open_house
from ..runtime.blas import Blas
from ..runtime.log import logger
from ..runtime.settings import ServerArgs
from ..runtime.shutdown import EXIT_SECOND_SIGNAL, EXIT_STUCK, STOP_SIGNALS, leave, signalled
from .app import make_app
from .connection import GuardedTCPServer

_GRACE_SECONDS: Final = 2.0  # hypercorn's own, after the drain: only idle connections are left
_MARGIN_SECONDS: Final = 10.0  # over everything that is bounded, before the watchdog
_FILES: Final = 8192  # open files wanted: one a connection


class HypercornLog:
    """Hypercorn's log lines as ours; a client that went away mid-answer is no error."""

    def __init__(self, config: Config) -> None:
        self._log = logger()

    async def access(self, *_: Any) -> None:
        """Say nothing: request events say more."""

    async def debug(self, message: str, *args: Any, **_: Any) -> None:
        self._log.debug("hypercorn", message=_filled(message, args))

    async def info(self, message: str, *args: Any, **_: Any) -> None:
        self._log.debug("hypercorn", message=_filled(message, args))

    async def warning(self, message: str, *args: Any, **_: Any) -> None:
        self._log.warning("hypercorn", message=_filled(message, args))

    async def error(self, message: str, *args: Any, **_: Any) -> None:
        self._log.error("hypercorn", message=_filled(message, args))

    async def exception(self, message: str, *args: Any, **_: Any) -> None:
        gone = (trio.BusyResourceError, trio.BrokenResourceError, trio.ClosedResourceError)
        level = self._log.debug if isinstance(sys.exc_info()[1], gone) else self._log.error
        level("hypercorn", message=_filled(message, args), exc_info=True)


def _filled(message: str, args: tuple[Any, ...]) -> str:
    try:
        return message % args if args else message
    except (TypeError, ValueError):  # arguments that do not fit must not end a connection
        return f"{message} {args!r}"


async def run_server(
    args: ServerArgs, path: Path, products: Blas, announce: Callable[[str, House], None]
) -> None:
    """Load, serve until a signal, drain, and return; a signal during the load ends it at once.

    A program of one's own that calls this should leave by `runtime.shutdown.leave`: a normal end
    of the interpreter can abort while MLX's threads live, and a load that was given up goes on
    in its thread.

    Args:
        announce: Called with the base URL once the port is open; must not block.

    Raises:
        ModelError: The model or a lane was refused; the port never opened.
        OwnerDied: The model owner failed; every open request has been told.
        OSError: The address cannot be bound.
    """
    _raise_file_limit()
    check_port(args)
    stop = Stop()
    async with trio.open_nursery() as nursery:
        await nursery.start(_watch_signals, stop, args)
        with stop.gives_up_load():
            async with open_house(args, path, products) as house:
                stop.loaded()
                await serve_house(house, stop.asked, announce)
        nursery.cancel_scope.cancel(reason="served")
    logger().info("server.stopped")


class Stop:
    """The wish to stop: it cancels a load, and drains a server that serves."""

    def __init__(self) -> None:
        self.asked = trio.Event()
        self._load: trio.CancelScope | None = None

    def gives_up_load(self) -> trio.CancelScope:
        """Return the scope to load in."""
        self._load = trio.CancelScope()
        if self.asked.is_set():
            self._load.cancel(reason="a signal before the load")
        return self._load

    def loaded(self) -> None:
        """From here on a wish to stop leaves what is served to its drain."""
        self._load = None

    def ask(self) -> None:
        """Stop, as far as things have got."""
        self.asked.set()
        if self._load is not None:
            self._load.cancel(reason="a signal during the load")


async def serve_house(
    house: House, stop: trio.Event, announce: Callable[[str, House], None]
) -> None:
    """Serve a running house until `stop`, then drain it."""
    args = house.args
    GuardedTCPServer.stall_s = args.client_stall_s
    hypercorn.trio.run.TCPServer = GuardedTCPServer  # type: ignore[misc]  # its one seam
    closed = trio.Event()
    async with trio.open_nursery() as nursery:
        urls = await nursery.start(
            partial(
                serve,
                make_app(house),
                _config(args),
                shutdown_trigger=closed.wait,
            )
        )
        announce(urls[0], house)
        await stop.wait()
        await house.drain(args.drain_timeout_s)
        closed.set()


def _config(args: ServerArgs) -> Config:
    config = Config()
    host = f"[{args.host}]" if ":" in args.host else args.host
    config.bind = [f"{host}:{args.port}"]
    config.accesslog = None
    config.logger_class = HypercornLog  # type: ignore[assignment]  # it is only called
    config.include_server_header = False
    config.keep_alive_timeout = args.keep_alive_s
    config.graceful_timeout = _GRACE_SECONDS
    config.backlog = 1024
    return config


async def _watch_signals(
    stop: Stop,
    args: ServerArgs,
    task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Stop gently on the first SIGTERM or SIGINT, at once on the second."""
    with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
        if signalled():  # between the start and here
            stop.ask()
        task_status.started()
        async for number in signals:
            logger().info("server.signal", signal=signal.Signals(number).name)
            if stop.asked.is_set():
                leave(EXIT_SECOND_SIGNAL)
            stop.ask()
            limit = args.drain_timeout_s + args.client_stall_s + _MARGIN_SECONDS
            watchdog = threading.Timer(limit, leave, (EXIT_STUCK,))
            watchdog.daemon = True
            watchdog.start()


def check_port(args: ServerArgs) -> None:
    """Find out that a port is taken before a model is loaded, not after.

    Raises:
        OSError: Saying where and why.
    """
    family = socket.AF_INET6 if ":" in args.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((args.host, args.port))
        except OSError as error:
            raise OSError(
                error.errno, f"cannot listen on {args.host}:{args.port}: {error.strerror}"
            ) from None


def _raise_file_limit() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _FILES if hard == resource.RLIM_INFINITY else min(_FILES, hard)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
