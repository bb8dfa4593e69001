"""How slow a client may be: what is sent to it and what it sends is bounded by progress.

A client is cut when nothing moves for `client_stall_s`, or when one write or one body takes
longer than that and a second for each KiB. So one that goes on, however slowly within that, is
served to the end; one that takes or gives a byte now and then is not waited for for ever.
"""

from collections.abc import Callable
from io import BytesIO
from typing import Final

import trio
from quart import Request
from werkzeug.exceptions import RequestEntityTooLarge, RequestTimeout

LEAST_RATE: Final = 1024  # bytes a second, on the whole, that a client has to take or give
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


async def read_body(request: Request, stall_s: float, took: Callable[[int], None]) -> bytes:
    """Return a request's whole body.

    Args:
        took: Told of the bytes of each part as it comes.

    Raises:
        RequestTimeout: When the client sends too slowly; see `Patience`.
        RequestEntityTooLarge: When the body is larger than the app allows.
    """
    most = request.max_content_length
    patience = Patience(stall_s)
    data = BytesIO()  # gives its bytes away without a copy
    while True:
        try:
            with trio.fail_at(patience.deadline):
                part = await anext(request.body)
        except StopAsyncIteration:
            return data.getvalue()
        except trio.TooSlowError:
            raise RequestTimeout("the body came too slowly; send it faster") from None
        took(len(part))
        data.write(part)
        patience.saw(len(part))
        if most is not None and data.tell() > most:
            raise RequestEntityTooLarge
