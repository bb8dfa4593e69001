"""Answered responses, kept in memory for `previous_response_id`: the oldest go first.

They are kept as the bytes they are sent as, so what they weigh is what is counted: the whole
reply with what it repeats of its request, the conversation up to its end, and its input.
"""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from ...runtime.errors import CallerError, UnknownThing
from ..schemas import Message
from .items import KeptItem, kind_of, told
from .replies import ResponseReply

MOST_RESPONSES: Final = 256
MOST_BYTES: Final = 16 << 20  # of all of them together
MOST_REFERENCES: Final = 1024  # of one input
MOST_REFERRED: Final = 4 << 20  # bytes that they stand for
_CUT_BYTES: Final = 64  # what a piece of a stream is counted as
_ITEM_BYTES: Final = 128  # what an item is counted as, beside its text

_ENCODER: Final = msgspec.json.Encoder()
_MESSAGES: Final = msgspec.json.Decoder(tuple[Message, ...])
_ITEM: Final = msgspec.json.Decoder(dict[str, Any])

# Of each item of an output: its pieces' characters and log probabilities, as they were streamed.
Cuts = list[list[tuple[int, int]]]


class Kept(msgspec.Struct, frozen=True):
    """A response, the conversation up to its end and its own input, encoded.

    Args:
        items: Of its input.
        output: Its items once more, as a later input may refer to them.
        previous: The response that it goes on from.
        cuts: How it was streamed; None when it was not.
    """

    reply: bytes
    messages: bytes
    items: tuple[KeptItem, ...]
    output: tuple[KeptItem, ...]
    previous: str | None
    cuts: Cuts | None

    @property
    def size(self) -> int:
        """What it weighs in bytes."""
        pieces = sum(map(len, self.cuts or ()))
        items = sum(len(item.raw) + _ITEM_BYTES for item in (*self.items, *self.output))
        return len(self.reply) + len(self.messages) + items + _CUT_BYTES * pieces


class Found(msgspec.Struct, frozen=True):
    """An input and what it refers to, which is still encoded.

    Args:
        items: Those the caller sent, and the kept ones in place of references.
        history: The messages up to the end of the previous response, if any.
    """

    items: list[dict[str, Any] | bytes]
    history: bytes | None = None

    @property
    def size(self) -> int:
        """The bytes that are still to decode."""
        kept = sum(len(item) for item in self.items if isinstance(item, bytes))
        return kept + len(self.history or b"")

    def decoded(self) -> tuple[list[dict[str, Any]], tuple[Message, ...]]:
        """Return the items and the messages before them."""
        items = [_ITEM.decode(i) if isinstance(i, bytes) else i for i in self.items]
        return items, () if self.history is None else _MESSAGES.decode(self.history)


class ResponseStore:
    """Bounded by number and by size; what is gone is named as such.

    Threads that write long answers put them here too.
    """

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        # By the ids that this server made: the response an item is kept with, and the item.
        self._home: dict[str, tuple[str, bytes]] = {}
        self._size = 0
        self._lock = threading.RLock()  # held for steps that are short

    def put(
        self,
        reply: ResponseReply,
        messages: Sequence[Message],
        items: Sequence[KeptItem] = (),
        cuts: Cuts | None = None,
    ) -> None:
        """Keep a response; one that is larger than all room is not kept and says so (`store`).

        Args:
            messages: The conversation up to its end.
            items: Its own input.
        """
        kept = Kept(
            _ENCODER.encode(reply),
            _ENCODER.encode(messages),
            tuple(items),
            told(reply.output),
            reply.previous_response_id,
            cuts,
        )
        if kept.size > self._most_bytes:
            reply.store = False
            return
        with self._lock:
            self._keep(reply.id, kept)

    def find(self, given: str | Sequence[dict[str, Any]], previous: str | None) -> Found:
        """Find what an input refers to; nothing is decoded yet.

        An id that this server made is known everywhere; one that a caller chose only where the
        input goes on from a response that was asked with it.

        Args:
            previous: The response that it goes on from.

        Raises:
            CallerError: When something is not kept, is referred to twice, or is too much.
        """
        with self._lock:
            history = None if previous is None else self._previous(previous).messages
            if isinstance(given, str):
                return Found([{"type": "message", "role": "user", "content": given}], history)
            wanted = {
                at: item for at, item in enumerate(given) if kind_of(item) == "item_reference"
            }
            if len(wanted) > MOST_REFERENCES:
                raise CallerError(
                    f"input: at most {MOST_REFERENCES} references to kept items; send the items "
                    "themselves, or previous_response_id",
                    param="input",
                )
            found: list[dict[str, Any] | bytes] = list(given)
            chosen: dict[str, bytes] | None = None
            left, seen = MOST_REFERRED, set[str]()
            for at, item in wanted.items():
                where, item_id = f"input[{at}].id", str(item.get("id"))
                if item_id in seen:  # a short reference must not stand for any number of texts
                    raise CallerError(
                        f"{where}: item {item_id[:80]!r} stands in the input already; refer to "
                        "it once",
                        param=where,
                    )
                seen.add(item_id)
                home, raw = self._home.get(item_id, (None, None))
                if home is not None:
                    self.get(home)
                else:
                    chosen = self._chosen(previous) if chosen is None else chosen
                    raw = chosen.get(item_id)
                if raw is None:
                    raise CallerError(
                        f"{where}: no item {item_id[:80]!r} is kept here; send the item itself",
                        param=where,
                        code="item_not_found",
                    )
                left -= len(raw)
                if left < 0:
                    raise CallerError(
                        f"{where}: the items that are referred to have more than {MOST_REFERRED} "
                        "bytes; use previous_response_id",
                        param=where,
                    )
                found[at] = raw
            return Found(found, history)

    def get(self, response_id: str) -> Kept:
        """Return a response.

        Raises:
            UnknownThing: When it is not kept.
        """
        with self._lock:
            if response_id not in self._kept:
                raise UnknownThing(
                    f"no response {response_id[:80]!r} is kept here; it was sent with store: "
                    "false, was too large, was dropped for newer ones, or the server was restarted",
                    param="response_id",
                    code="response_not_found",
                )
            self._kept.move_to_end(response_id)
            return self._kept[response_id]

    def drop(self, response_id: str) -> None:
        """Forget a response.

        Raises:
            UnknownThing: When it is not kept.
        """
        with self._lock:
            self.get(response_id)
            self._forget(response_id)

    def _keep(self, response_id: str, kept: Kept) -> None:
        self._kept[response_id] = kept
        for item in (*kept.items, *kept.output):
            if item.made:  # one that a caller chose may be another caller's too
                self._home[item.id] = response_id, item.raw
        self._size += kept.size
        while len(self._kept) > self._most or self._size > self._most_bytes:
            self._forget(next(iter(self._kept)))

    def _forget(self, response_id: str) -> None:
        gone = self._kept.pop(response_id)
        self._size -= gone.size
        for item in (*gone.items, *gone.output):
            if item.made:
                self._home.pop(item.id, None)

    def _previous(self, response_id: str) -> Kept:
        try:
            return self.get(response_id)
        except UnknownThing as error:
            raise CallerError(
                f"previous_response_id: {error.message}",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None

    def _chosen(self, response_id: str | None) -> dict[str, bytes]:
        """Return the items of a conversation whose ids its caller chose, the newest of each."""
        chosen: dict[str, bytes] = {}
        while response_id is not None and (kept := self._kept.get(response_id)) is not None:
            for item in reversed(kept.items):
                if not item.made:
                    chosen.setdefault(item.id, item.raw)
            response_id = kept.previous
        return chosen
