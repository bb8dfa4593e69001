"""How a route writes an answer: the one thing that differs between the dialects of HTTP clients."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Final

import msgspec

from ..actors.house import House
from ..actors.request import Broken, Finished
from ..actors.speech import Ended, Piece
from ..runtime.context import TokenLogprob
from .problems import broken_body
from .replies import ErrorReply
from .translate import Order

_INLINE_ENTRIES: Final = 1_024  # tokens and alternatives that are written on the event loop


class Collected(msgspec.Struct):
    """One choice of an unstreamed answer.

    Args:
        calls: Id, name and arguments of each call.
    """

    text: str = ""
    thought: str = ""
    calls: list[list[str]] = []
    finish: str = ""
    stop: str | None = None
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []

    def take(self, piece: Piece) -> None:
        """Add what a row gained."""
        self.text += piece.text
        self.thought += piece.thought
        for call in piece.calls:
            if call.id is not None:
                self.calls.append([call.id, call.name or "", ""])
            self.calls[call.index][2] += call.arguments
        self.logprobs += piece.logprobs
        self.prompt_logprobs += piece.prompt_logprobs

    @property
    def likelihood(self) -> float:
        """Its mean log probability a token."""
        scores = [entry.logprob or 0.0 for entry in self.logprobs]
        return sum(scores) / max(1, len(scores))


class Shape(ABC):
    """One request's answer in its route's own words, streamed or whole.

    Long parts of it are written in a thread, one after the other. `named` events carry their type
    as the event's name; `mark` stands behind a good end, and `alive` is what an idle stream says.
    """

    named: ClassVar[bool] = False
    mark: ClassVar[bytes] = b"data: [DONE]\n\n"
    alive: ClassVar[bytes] = b": keep-alive\n\n"

    def __init__(self, house: House, order: Order) -> None:
        self._house = house
        self._order = order

    def is_long(self, tokens: int) -> bool:
        """Say whether writing about so many tokens, with their alternatives, takes long."""
        return tokens * (1 + (self._order.alternatives or 0)) > _INLINE_ENTRIES

    def ends_long(self, tokens: int) -> bool:
        """Say whether the end, or the whole, of an answer of so many tokens takes long."""
        return self.is_long(tokens)

    @property
    def opens_long(self) -> bool:
        """Whether a stream begins with much, such as an echo of its prompts."""
        return self._order.echo and self.is_long(sum(map(len, self._order.prompts)))

    @abstractmethod
    def whole(self, choices: list[Collected], finished: Finished) -> msgspec.Struct:
        """Return the body of a whole answer."""

    @abstractmethod
    def opening(self) -> Iterable[msgspec.Struct]:
        """Return what a stream begins with."""

    @abstractmethod
    def piece(self, piece: Piece) -> Iterable[msgspec.Struct]:
        """Return the events for what a row gained."""

    @abstractmethod
    def ended(self, ended: Ended) -> Iterable[msgspec.Struct]:
        """Return the events for a choice that is over; its last may wait for `closing`."""

    @abstractmethod
    def closing(self, finished: Finished) -> Iterable[msgspec.Struct]:
        """Return what stands before the mark."""

    def failure(self, broken: Broken) -> msgspec.Struct:
        """Return the error in place of a whole answer."""
        return ErrorReply(broken_body(broken))

    def failing(self, broken: Broken) -> Iterable[msgspec.Struct]:
        """Return the events that end a stream which cannot go on."""
        return [self.failure(broken)]
