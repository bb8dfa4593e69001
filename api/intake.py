"""A request's body, read and measured before anything is made of it.

How deep it nests and how many values it holds is told from its bytes, in steps that let other
threads run; so decoding, and every walk over what was decoded, is bounded.
"""

from collections.abc import Iterator
from functools import partial
from typing import Final

import trio
from quart import Request, g, has_app_context

from ..runtime.errors import BusyError, CallerError
from ..runtime.memory import Trimmer
from .offload import INLINE_BYTES, aside
from .patience import read_body

MOST_NESTING: Final = 100  # levels of objects and arrays, far above what any schema has
MOST_VALUES: Final = 1_000_000  # commas; a long prompt of token ids has some hundred thousand
MOST_CONTAINERS: Final = 100_000  # objects and arrays, which cost most to build
MOST_KEYS: Final = 200_000  # of all objects; one of a million would hold the interpreter 0.8 s
_STEP: Final = 1 << 18  # bytes between two chances for other threads
_STRUCTURE: Final = b'"[]{},:'
_OTHERS: Final = bytes(set(range(256)) - set(_STRUCTURE))
_MOST_ARRIVING: Final = 4  # times the largest body that all on their way may have
_ROOM_SECONDS: Final = 10.0
_RETRY_SECONDS: Final = 5
_TOO_MANY: Final = "too many large request bodies at a time; try again, and send it at once"
_LEVELS: Final = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}


class _Arrival:
    """One body on its way, and what it has of the server's memory."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.bytes = 0
        self.cut = False
        self._began = trio.current_time()

    @property
    def weight(self) -> float:
        """How much it holds and for how long: who sends slowly weighs most."""
        return self.bytes * (trio.current_time() - self._began)


class Intake:
    """Reads bodies; those that arrive, and the large ones in work, have each a bound in bytes.

    What counts is what has come and not what a client announces. At the bound the body that has
    held most for longest is cut, so that slow ones keep no newcomer out.

    Args:
        most_bytes: The largest single body, and what all that are in work may have together;
            those that arrive may have four times as much.
        stall_s: How slowly one may arrive; see `patience.Patience`.
    """

    def __init__(self, most_bytes: int, stall_s: float) -> None:
        self._stall_s = stall_s
        self._most_arriving = _MOST_ARRIVING * most_bytes
        self._arriving: list[_Arrival] = []
        self._free = most_bytes
        self._changed = trio.Event()
        self._trimmer = Trimmer()

    async def read(self, request: Request) -> bytes:
        """Return a request's body once it is known to be bounded in depth and number.

        A large one has its room among those in work until `prepared` or the request's end. It
        gets it when it is here, so that a client that sends slowly keeps nobody waiting.

        Raises:
            BusyError: When other bodies leave no room for too long, or this one has held too
                much for too long.
            CallerError: When it nests too deeply or holds too much.
            RequestTimeout: When it comes too slowly.
            RequestEntityTooLarge: When it is larger than the app allows.
        """
        body = await self._arrived(request)
        if len(body) <= INLINE_BYTES:
            JsonBounds().check(body)
        else:
            await aside(lambda: JsonBounds().check(body))
        return body

    async def _arrived(self, request: Request) -> bytes:
        arrival = _Arrival()
        self._arriving.append(arrival)
        try:
            with arrival.scope:
                body = await read_body(request, self._stall_s, partial(self._took, arrival))
                await self._take_room(len(body))
                return body
        finally:
            self._arriving.remove(arrival)
        raise BusyError(_TOO_MANY, _RETRY_SECONDS)

    def _took(self, arrival: _Arrival, count: int) -> None:
        """Count what came, and cut the heaviest while all together have too much."""
        arrival.bytes += count
        while True:
            held = [one for one in self._arriving if not one.cut]
            if sum(one.bytes for one in held) <= self._most_arriving:
                return
            heaviest = max(held, key=lambda one: one.weight)
            heaviest.cut = True
            heaviest.scope.cancel(reason="too many bytes of bodies on their way")

    async def _take_room(self, size: int) -> None:
        if size <= INLINE_BYTES:
            return
        with trio.move_on_after(_ROOM_SECONDS) as waited:
            while self._free < size:
                await self._changed.wait()
        if waited.cancelled_caught:
            raise BusyError(_TOO_MANY, _RETRY_SECONDS)
        self._free -= size
        g.give_room_back = partial(self._give_back, size)

    def _give_back(self, size: int) -> None:
        self._free += size
        self._trimmer.ask()
        self._changed.set()
        self._changed = trio.Event()


def prepared() -> None:
    """Give a request's room among the large bodies back: what it asks is known by now."""
    if has_app_context() and (give_back := g.pop("give_room_back", None)) is not None:
        give_back()


class JsonBounds:
    """What all JSON texts of one request may hold together, each told before it is decoded."""

    def __init__(self) -> None:
        self._values = self._containers = self._keys = 0

    def check(self, raw: bytes, where: str = "") -> None:
        """Bound one more text.

        Args:
            where: The field that holds the text, when it is a part of a body.

        Raises:
            CallerError: When it nests deeper than MOST_NESTING, or holds too many values with
                the texts before it.
        """
        name, param = (where, where) if where else ("the body", None)
        depth = 0
        for structure in _outside_strings(raw):
            self._values += structure.count(b",")
            opened = structure.count(b"[") + structure.count(b"{")
            self._containers += opened
            self._keys += structure.count(b":")
            if (
                self._values > MOST_VALUES
                or self._containers > MOST_CONTAINERS
                or self._keys > MOST_KEYS
            ):
                others = f"{where}, with such texts before it," if where else "the body"
                raise CallerError(
                    f"{others} holds more than {MOST_VALUES} values, {MOST_CONTAINERS} objects "
                    f"and arrays, or {MOST_KEYS} keys",
                    param=param,
                )
            if depth + opened <= MOST_NESTING:
                depth += opened - structure.count(b"]") - structure.count(b"}")
                continue
            for byte in structure:
                depth += _LEVELS.get(byte, 0)
                if depth > MOST_NESTING:
                    raise CallerError(
                        f"{name} is nested too deeply: more than {MOST_NESTING} levels",
                        param=param,
                    )


def _outside_strings(raw: bytes) -> Iterator[bytes]:
    """Give what is structure in a JSON text, step by step."""
    inside = False
    rest = b""
    for start in range(0, len(raw), _STEP):
        piece = rest + raw[start : start + _STEP]
        # A backslash at the end may escape what the next step begins with.
        open_escape = (len(piece) - len(piece.rstrip(b"\\"))) % 2
        rest = piece[len(piece) - open_escape :]
        piece = piece[: len(piece) - open_escape]
        piece = piece.replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHERS)
        parts = piece.split(b'"')
        yield b"".join(parts[inside::2])
        inside ^= (len(parts) - 1) % 2 == 1
