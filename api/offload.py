"""Work on requests and answers that takes long, done in threads and not on the event loop.

Each kind has a queue of its own, so that no kind keeps another waiting.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import msgspec
import trio

from ..runtime.errors import BusyError, CallerError

Result = TypeVar("Result")

INLINE_BYTES: Final = 65_536  # a shorter body is decoded where it is, in about a millisecond
INLINE_CHARACTERS: Final = 16_384  # a longer text is tokenized in a thread
_INLINE_PARTS: Final = 1_024  # messages, blocks, keys and values that are looked through here
_MOST_WAITING: Final = 64
_RETRY_SECONDS: Final = 2


class Queue:
    """Work of one kind: a few pieces at a time, since each holds memory, and few that wait.

    Args:
        what: What it works on, for errors and for telling queues apart.
        at_a_time: Pieces in work.
        most_waiting: None for work that was paid for already, such as an answer.
    """

    def __init__(
        self, what: str, at_a_time: int = 2, most_waiting: int | None = _MOST_WAITING
    ) -> None:
        self._what = what
        self._at_a_time = at_a_time
        self._most_waiting = most_waiting
        self._limiter = trio.lowlevel.RunVar[trio.CapacityLimiter](what)

    async def do(self, work: Callable[[], Result]) -> Result:
        """Do work in a thread, in its turn.

        Raises:
            BusyError: When too many wait already.
        """
        try:
            limiter = self._limiter.get()
        except LookupError:
            limiter = trio.CapacityLimiter(self._at_a_time)
            self._limiter.set(limiter)
        waiting = limiter.statistics().tasks_waiting
        if self._most_waiting is not None and waiting >= self._most_waiting:
            raise BusyError(f"too many {self._what} wait for work on them", _RETRY_SECONDS)
        return await aside(work, limiter)


PROMPTS: Final = Queue("long requests")
COUNTS: Final = Queue("long texts to count", at_a_time=1)
FORMS: Final = Queue("schemas and grammars")  # of which one may take seconds
ANSWERS: Final = Queue("long answers", most_waiting=None)


async def at_length(work: Callable[[], Result], long: bool, queue: Queue = PROMPTS) -> Result:
    """Do work at once, or in a thread where it is long.

    Raises:
        BusyError: When it is long and too many wait already.
    """
    return await queue.do(work) if long else work()


async def aside(work: Callable[[], Result], limiter: trio.CapacityLimiter | None = None) -> Result:
    """Do work in a thread.

    A caller's error comes out of it as a result and is raised anew: one that crosses threads is
    held in a cycle by its traceback, and so would the long texts of every frame in it be, until
    the collector looks at the oldest objects.
    """
    found = await trio.to_thread.run_sync(_settled, work, limiter=limiter)
    try:
        if isinstance(found, CallerError):
            raise found
        return found
    finally:
        del found  # or the new traceback would hold it in the same way


def _settled(work: Callable[[], Result]) -> Result | CallerError:
    try:
        return work()
    except CallerError as error:
        error.__context__ = None  # has a traceback, too
        return error.with_traceback(None)


def is_long(value: Any) -> bool:
    """Say whether work on a value's texts takes long, without looking through all of a long one."""
    left, parts = INLINE_CHARACTERS, _INLINE_PARTS
    todo: list[Any] = [value]
    while todo:
        item = todo.pop()
        parts -= 1
        if isinstance(item, str):
            left -= len(item)
        elif isinstance(item, Mapping):
            parts -= len(item)
            todo += [*item, *item.values()] if parts > 0 else []
        elif isinstance(item, list | tuple):
            parts -= len(item)
            todo += item if parts > 0 else []
        elif isinstance(item, msgspec.Struct):
            todo += [getattr(item, name) for name in item.__struct_fields__]
        if left < 0 or parts < 0:
            return True
    return False
