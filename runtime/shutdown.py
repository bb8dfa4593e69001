"""The one way out of the process, and what ends it before its event loop can.

MLX, OpenBLAS and the tokenizers keep native threads that no Python code can join. A normal end of
the interpreter runs C++ destructors beside them, which now and then aborts the process ("terminate
called without an active exception", status -6). So every command leaves by `leave`.

A signal ends a process with its own status until `arm` has run, so what is imported before is kept
to the least: no threading, typing or enum, which would take longer than all the rest.
"""

from __future__ import annotations

import _thread
import os
import select
import sys

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    import signal
    from types import FrameType
    from typing import Final, NoReturn, TextIO
else:
    import _signal as signal  # all of it but the names of numbers, which take enum

EXIT_STUCK: Final = 75  # the end itself took too long
EXIT_SECOND_SIGNAL: Final = 130
STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_FLUSH_SECONDS: Final = 1.0  # for a reader of the log or of standard output, each
_TIDY_SECONDS: Final = 2.0  # for child processes and scratch folders, after a signal

_heard: Final[list[int]] = []  # signals that no event loop took; appending needs no lock


def leave(status: int) -> NoReturn:
    """Write out what waits, for a bounded time, and end the process without destructors.

    A status of 0 becomes 1 when standard output could not be written (a full disk), but not when
    its reader went away. May be called from any thread.
    """
    try:
        _signals_end_at_once(status)
        log = sys.modules.get(f"{__package__}.log")  # structlog is slow to import for nothing
        if log is not None:
            log.flush(_FLUSH_SECONDS)
        failed: list[OSError] = []
        flushed = _thread.allocate_lock()
        flushed.acquire()
        _thread.start_new_thread(_flush_streams, (failed, flushed))
        flushed.acquire(timeout=_FLUSH_SECONDS)
        status = status or int(bool(failed))
    finally:
        os._exit(status)


def open_streams() -> None:
    """Put the null device where a standard stream is closed.

    Otherwise the next file or socket gets its number, and what is meant for the stream.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def arm() -> None:
    """From here on SIGTERM and SIGINT end the process with status 0; main thread only.

    The signal raises SystemExit there, so that child processes and scratch folders are tidied up.
    A thread ends the process when that takes too long, and at once on a second signal: it also
    hears them while the main thread is inside a library.
    """
    hears, tells = os.pipe()
    os.set_blocking(tells, False)
    signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, _stop)
    _thread.start_new_thread(_watch, (hears,))


def hand_over() -> None:
    """Leave waking up to an event loop; signals it does not take still raise SystemExit."""
    signal.set_wakeup_fd(-1)


def signalled() -> bool:
    """Whether a signal came that no event loop took."""
    return bool(_heard)


def _stop(number: int, frame: FrameType | None) -> None:
    _heard.append(number)
    if len(_heard) > 1:
        leave(EXIT_SECOND_SIGNAL)
    raise SystemExit(0)


def _watch(hears: int) -> None:
    while os.read(hears, 1)[0] not in STOP_SIGNALS:
        pass
    again, _, _ = select.select([hears], [], [], _TIDY_SECONDS)
    leave(EXIT_SECOND_SIGNAL if again else 0)


def _signals_end_at_once(status: int) -> None:
    try:
        signal.set_wakeup_fd(-1)
        for number in STOP_SIGNALS:
            signal.signal(number, lambda *_: os._exit(status))
    except ValueError:  # not the main thread
        pass


def _flush_streams(failed: list[OSError], flushed: _thread.LockType) -> None:
    streams: tuple[TextIO | None, ...] = (sys.stderr, sys.stdout)
    for stream in streams:
        try:
            if stream is not None:
                stream.flush()
        except BrokenPipeError:
            pass
        except OSError as error:
            if stream is sys.stdout:
                failed.append(error)
        except ValueError:  # closed
            pass
    flushed.release()
