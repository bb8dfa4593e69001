"""Answered responses, kept in memory for `previous_response_id`: the oldest go first."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

import msgspec

from ...runtime.errors import CallerError, UnknownThing
from ..schemas import Message
from .replies import ResponseReply

MOST_RESPONSES: Final = 256
MOST_CHARACTERS: Final = 16 << 20  # of all conversations together

_ENCODER: Final = msgspec.json.Encoder()


class Kept(msgspec.Struct, frozen=True):
    """A response and the conversation up to its end."""

    reply: ResponseReply
    messages: tuple[Message, ...]
    size: int


class ResponseStore:
    """Bounded by number and by size; what is gone is named as such."""

    def __init__(self, most: int = MOST_RESPONSES, most_characters: int = MOST_CHARACTERS) -> None:
        self._most = most
        self._most_characters = most_characters
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._size = 0

    def put(self, reply: ResponseReply, messages: Sequence[Message]) -> None:
        """Keep a response; a conversation larger than all room is not kept."""
        size = len(_ENCODER.encode(messages))
        if size > self._most_characters:
            return
        self._kept[reply.id] = Kept(reply, tuple(messages), size)
        self._size += size
        while len(self._kept) > self._most or self._size > self._most_characters:
            _, gone = self._kept.popitem(last=False)
            self._size -= gone.size

    def history(self, response_id: str | None) -> tuple[Message, ...]:
        """Return what was said up to the end of a response.

        Raises:
            CallerError: When it is not kept.
        """
        if response_id is None:
            return ()
        try:
            return self.get(response_id).messages
        except UnknownThing as error:
            raise CallerError(
                f"previous_response_id: {error.message}",
                param="previous_response_id",
                code="previous_response_not_found",
            ) from None

    def get(self, response_id: str) -> Kept:
        """Return a response.

        Raises:
            UnknownThing: When it is not kept.
        """
        if response_id not in self._kept:
            raise UnknownThing(
                f"no response {response_id!r} is kept here; it was sent with store: false, was "
                "dropped for newer ones, or the server was restarted",
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
        self._size -= self.get(response_id).size
        del self._kept[response_id]
