"""Text on its way to a stream: a bounded queue and a thread of its own, so that nobody waits.

Whoever writes may be the event loop or the device thread, and at the other end may be a pipe
whose reader is slow, stopped or gone, or a full disk. `put` neither blocks nor raises; what finds
no room or cannot be written is counted, and said as soon as the stream takes text again.
"""

import contextlib
import os
import queue
import select
import threading
import weakref
from collections.abc import Callable
from typing import Final, TextIO

MOST_LINES: Final = 10_000  # that wait; some minutes of a busy server
MOST_CHARACTERS: Final = 16 << 20  # that wait, since a line may carry a prompt

_WRITERS: Final["weakref.WeakSet[Writer]"] = weakref.WeakSet()


class Writer:
    """Writes to one stream, in order.

    Args:
        stream: Where text goes, by a descriptor of our own where it has one, so that closing the
            stream cannot turn our text to another file; None (closed) drops everything.
        lost: Says in a line, without its end, that so many pieces were dropped.
    """

    def __init__(self, stream: TextIO | None, lost: Callable[[int], str]) -> None:
        self._write = _sink(stream)
        self._lost = lost
        self.dropped = 0
        self._unsaid = 0  # dropped since the stream was last told
        self._fresh()
        _WRITERS.add(self)

    def put(self, text: str) -> None:
        """Queue text, most often a line with its end; drops it when too much waits."""
        with self._lock:
            full = self._lines.qsize() >= MOST_LINES
            if full or (self._waiting and self._waiting + len(text) > MOST_CHARACTERS):
                self._drop(0)
                return
            self._enqueue(text)

    def flush(self, timeout_s: float) -> bool:
        """Wait until all that was put is written or dropped; False when that took too long."""
        done = threading.Event()
        with self._lock:
            if self._unsaid:
                self._enqueue("")
            if self._thread is None:
                return True
            self._lines.put(done)
        return done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write what waits, for so long at most, and end the thread."""
        self.flush(timeout_s)
        self._lines.put(None)

    def _fresh(self) -> None:
        """Begin with an empty queue; a forked child has no thread and may have a held lock."""
        # Reentrant: collecting garbage may warn, and so log, in the middle of `put`.
        self._lock = threading.RLock()
        self._lines: queue.SimpleQueue[tuple[str, int] | threading.Event | None]
        self._lines = queue.SimpleQueue()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def _enqueue(self, text: str) -> None:
        said, self._unsaid = self._unsaid, 0
        if said:
            text = f"{self._lost(said)}\n{text}"
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._main, name="paceline-log", daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError:  # no more threads
            self._drop(said)
            return
        self._waiting += len(text)
        self._lines.put((text, said))

    def _drop(self, said: int) -> None:
        with self._lock:
            self.dropped += 1
            self._unsaid += 1 + said

    def _main(self) -> None:
        while (line := self._lines.get()) is not None:
            if isinstance(line, threading.Event):
                line.set()
                continue
            text, said = line
            try:
                self._write(text)
            except Exception:  # closed, gone, full: whatever a stream may raise
                self._drop(said)
            with self._lock:
                self._waiting -= len(text)


def _sink(stream: TextIO | None) -> Callable[[str], object]:
    if stream is None:
        return _Nowhere()
    with contextlib.suppress(OSError, ValueError, AttributeError):
        stream.flush()
    try:
        return _Descriptor(os.dup(stream.fileno()))
    except (OSError, ValueError, AttributeError):
        return _Object(stream)


class _Nowhere:
    def __call__(self, text: str) -> None:
        raise OSError("closed")


class _Object:
    """A stream without a descriptor, as a test has."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


class _Descriptor:
    """A file, pipe or terminal; a line that was cut off is ended before the next begins."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._torn = False
        weakref.finalize(self, os.close, number).atexit = False

    def __call__(self, text: str) -> None:
        data = memoryview(text.encode("utf-8", "backslashreplace"))
        if self._torn:
            data = memoryview(b"\n" + data)
        size = len(data)
        try:
            while data:
                data = data[self._some(data) :]
        finally:
            self._torn = self._torn if len(data) == size else bool(data)

    def _some(self, data: memoryview) -> int:
        while True:
            try:
                return os.write(self._number, data)
            except BlockingIOError:  # somebody who shares it made it non-blocking
                select.select([], [self._number], [])


def _after_fork() -> None:
    for writer in list(_WRITERS):
        writer._fresh()


os.register_at_fork(after_in_child=_after_fork)
