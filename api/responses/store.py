"""Answered responses, kept in memory for `previous_response_id`: the oldest go first.

They are kept as the bytes they are sent as, so what they weigh is what is counted: the whole
reply with what it repeats of its request, the conversation up to its end, and its input.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, Final

import msgspec

from ...runtime.errors import CallerError, UnknownThing
from ..schemas import Message
from .items import kind_of
from .replies import ResponseReply

MOST_RESPONSES: Final = 256
MOST_BYTES: Final = 16 << 20  # of all of them together
_CUT_BYTES: Final = 64  # what a piece of a stream is counted as

_ENCODER: Final = msgspec.json.Encoder()
_MESSAGES: Final = msgspec.json.Decoder(tuple[Message, ...])
_ITEMS: Final = msgspec.json.Decoder(list[dict[str, Any]])

# Of each item of an output: its pieces' characters and log probabilities, as they were streamed.
Cuts = list[list[tuple[int, int]]]


class Kept(msgspec.Struct, frozen=True):
    """A response, the conversation up to its end and its own input, encoded.

    Args:
        ids: Of its items, those of the input and those of the output.
        cuts: How it was streamed; None when it was not.
    """

    reply: bytes
    messages: bytes
    items: bytes
    ids: tuple[str, ...]
    cuts: Cuts | None

    @property
    def size(self) -> int:
        """What it weighs in bytes."""
        pieces = sum(map(len, self.cuts or ()))
        return len(self.reply) + len(self.messages) + len(self.items) + _CUT_BYTES * pieces

    def input_items(self) -> list[dict[str, Any]]:
        """Return the items of its input."""
        return _ITEMS.decode(self.items)

    def all_items(self) -> Iterator[dict[str, Any]]:
        """Give the items of its input and then those of its output."""
        yield from self.input_items()
        yield from msgspec.json.decode(self.reply)["output"]


class ResponseStore:
    """Bounded by number and by size; what is gone is named as such."""

    def __init__(self, most: int = MOST_RESPONSES, most_bytes: int = MOST_BYTES) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._home: dict[str, str] = {}  # an item's id to that of a response it is kept with
        self._size = 0

    def put(
        self,
        reply: ResponseReply,
        messages: Sequence[Message],
        items: Sequence[dict[str, Any]] = (),
        cuts: Cuts | None = None,
    ) -> None:
        """Keep a response; one that is larger than all room is not kept and says so (`store`).

        Args:
            messages: The conversation up to its end.
            items: Its own input, each item with an id.
        """
        ids = (*(str(item["id"]) for item in items), *(item.id for item in reply.output))
        encode = _ENCODER.encode
        kept = Kept(encode(reply), encode(messages), encode(items), ids, cuts)
        if kept.size > self._most_bytes:
            reply.store = False
            return
        self._kept[reply.id] = kept
        self._home.update(dict.fromkeys(ids, reply.id))
        self._size += kept.size
        while len(self._kept) > self._most or self._size > self._most_bytes:
            self._forget(next(iter(self._kept)))

    def history(self, response_id: str | None) -> tuple[Message, ...]:
        """Return what was said up to the end of a response.

        Raises:
            CallerError: When it is not kept.
        """
        if response_id is None:
            return ()
        try:
            return _MESSAGES.decode(self.get(response_id).messages)
        except UnknownThing as error:
            raise CallerError(
                f"previous_response_id: {error.message}",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None

    def resolved(self, given: str | Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return an input as items, with the kept ones in place of references to them.

        Raises:
            CallerError: When an item that is referred to is not kept, or is referred to twice.
        """
        if isinstance(given, str):
            return [{"type": "message", "role": "user", "content": given}]
        opened: dict[str, dict[Any, dict[str, Any]]] = {}  # each kept response is decoded once
        return [
            self._item(str(item.get("id")), f"input[{at}].id", opened)
            if kind_of(item) == "item_reference"
            else item
            for at, item in enumerate(given)
        ]

    def get(self, response_id: str) -> Kept:
        """Return a response.

        Raises:
            UnknownThing: When it is not kept.
        """
        if response_id not in self._kept:
            raise UnknownThing(
                f"no response {response_id[:80]!r} is kept here; it was sent with store: false, "
                "was too large, was dropped for newer ones, or the server was restarted",
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
        self.get(response_id)
        self._forget(response_id)

    def _forget(self, response_id: str) -> None:
        gone = self._kept.pop(response_id)
        self._size -= gone.size
        for item_id in gone.ids:
            if self._home.get(item_id) == response_id:
                del self._home[item_id]

    def _item(
        self, item_id: str, where: str, opened: dict[str, dict[Any, dict[str, Any]]]
    ) -> dict[str, Any]:
        home = self._home.get(item_id)
        if home is None:
            raise CallerError(
                f"{where}: no item {item_id[:80]!r} is kept here; send the item itself",
                param=where,
                code="item_not_found",
            )
        if home not in opened:
            opened[home] = {item["id"]: item for item in self.get(home).all_items()}
        if item_id not in opened[home]:  # a short reference must not stand for any number of texts
            raise CallerError(
                f"{where}: item {item_id[:80]!r} stands in the input already; refer to it once",
                param=where,
            )
        return opened[home].pop(item_id)
