"""Memory given back to the system: what a large request needed is not kept for later ones."""

import ctypes
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, Final

_WAIT_S: Final = 1.0  # until what is asked to be given back is free for certain


class Trimmer:
    """Gives memory back a moment after it is asked to: in its own thread, once at a time.

    Args:
        trim: What does it.
        wait_s: Seconds between asking and doing; what is asked meanwhile is the same.
    """

    def __init__(self, trim: Callable[[], None] | None = None, wait_s: float = _WAIT_S) -> None:
        self._trim = give_back if trim is None else trim
        self._wait_s = wait_s
        self._lock = threading.Lock()
        self._asked = False

    def ask(self) -> None:
        """Have it done soon; never waits and never raises."""
        with self._lock:
            if self._asked:
                return
            self._asked = True
        timer = threading.Timer(self._wait_s, self._work)
        timer.name = "memory"
        timer.daemon = True
        try:
            timer.start()
        except RuntimeError:  # no more threads, or the interpreter ends
            self._asked = False

    def _work(self) -> None:
        with self._lock:
            self._asked = False
        self._trim()


def give_back() -> None:
    """Let the allocator return its free pages; other threads run meanwhile.

    Only glibc keeps them: for each thread's arena, and for the larger blocks once some were freed.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Any:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
