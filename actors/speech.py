"""From a row's tokens to what it says: thought, content and calls, stops, log probabilities.

Plain code: the request actor asks it about each message and passes on what it returns.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final, Literal

import msgspec

from ..runtime.context import TokenLogprob
from ..runtime.parts import Call, Content, Manner, Part, Splitter, Thought
from ..runtime.stops import StopMatcher
from ..runtime.text import Detokenizer, Text
from .messages import Finish, Tokens

Ending = Finish | Literal["tool_calls"]

CREDITS: Final = 32  # tokens a row may be ahead of its reader


class Piece(msgspec.Struct, frozen=True):
    """What a row gained: thought before content before calls.

    Args:
        logprobs: Of the tokens that the content is made of.
    """

    index: int
    text: str = ""
    thought: str = ""
    calls: tuple[Call, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @property
    def empty(self) -> bool:
        """Whether it says nothing."""
        said = self.text or self.thought or self.calls
        return not (said or self.logprobs or self.prompt_logprobs)


class Ended(msgspec.Struct, frozen=True):
    """A row is over.

    Args:
        stop: The stop string that ended it.
    """

    index: int
    finish: Ending
    stop: str | None = None


Said = Piece | Ended


class Speech:
    """What one row says: detokenizer, splitter, stop strings, and the tokens behind the text.

    Args:
        index: Of the row in its request.
        stops: Stop strings; one that appears in the content ends the row just before it.
    """

    def __init__(self, index: int, text: Text, manner: Manner, stops: Sequence[str]) -> None:
        marks = text.marks_of(manner.dialect) if manner.marked else frozenset[int]()
        self.index = index
        self._most_calls = manner.most_calls
        self._detokenizer = Detokenizer(text, marks, behind=manner.behind)
        self._splitter = Splitter(manner)
        self._matcher = StopMatcher(stops)
        self._entries = _Entries()
        self._pushed = 0  # characters of the whole text so far
        self._taken = 0  # tokens passed on since the last grant
        self.tokens = 0
        self.thought_tokens = 0
        self.ended: Ended | None = None

    @property
    def takes_long(self) -> bool:
        """Whether the next message may have a long call read."""
        return self._splitter.reads_long

    def take(self, message: Tokens) -> Sequence[Said]:
        """Return what to pass on for a row's new tokens."""
        pieces: list[Piece] = []
        if message.prompt_logprobs:
            pieces.append(Piece(self.index, prompt_logprobs=message.prompt_logprobs))
        for at, token in enumerate(message.tokens):
            self.tokens += 1
            self.thought_tokens += self._splitter.thinking
            is_end = message.finish == "stop" and at == len(message.tokens) - 1
            if message.logprobs and not is_end:
                self._entries.add(self._pushed, message.logprobs[at])
            added = "" if is_end else self._detokenizer.push(token)
            self._pushed += len(added)
            pieces += self._pieces(self._splitter.push(added))
            if (finish := self._finish(None)) is not None:
                return [*_joined(pieces), self._end(finish)]
        if message.finish is None:
            return _joined(pieces)
        pieces += self._pieces(self._splitter.finish())
        finish = self._finish(message.finish)
        assert finish is not None
        if self._matcher.matched is None:
            rest = self._matcher.flush()
            pieces.append(Piece(self.index, rest, logprobs=self._entries.rest(self._pushed)))
        return [*_joined(pieces), self._end(finish)]

    def credit(self, tokens: int) -> int:
        """Note tokens that were passed on; return how many to grant now, a few at a time."""
        self._taken += tokens
        if self._taken < CREDITS // 4:
            return 0
        granted, self._taken = self._taken, 0
        return granted

    def _finish(self, finish: Finish | None) -> Ending | None:
        """Return how the row ended, if it has."""
        if self._matcher.matched is not None:
            return "stop"
        enough = self._most_calls is not None and self._splitter.calls >= self._most_calls
        if enough or (finish == "stop" and self._splitter.calls):
            return "tool_calls"
        return finish

    def _end(self, finish: Ending) -> Ended:
        self.ended = Ended(self.index, finish, self._matcher.matched)
        return self.ended

    def _pieces(self, parts: list[Part]) -> list[Piece]:
        """Return parts as pieces; content passes the stop strings first."""
        pieces: list[Piece] = []
        for part in parts:
            match part:
                case Thought(text):
                    pieces.append(Piece(self.index, thought=text))
                case Call():
                    pieces += self._said(self._matcher.flush())
                    pieces.append(Piece(self.index, calls=(part,)))
                case Content(text, start):
                    self._entries.say(start, len(text))
                    pieces += self._said(self._matcher.push(text))
            if self._matcher.matched is not None:
                break
        return pieces

    def _said(self, shown: str) -> list[Piece]:
        entries = self._entries.until(self._matcher.emitted)
        return [Piece(self.index, shown, logprobs=entries)] if shown or entries else []


class _Entries:
    """Log probabilities that wait until the text of their tokens is shown as content."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()  # where in the whole text
        self._placed: deque[tuple[int, TokenLogprob]] = deque()  # where in the content
        self._said = 0
        self._end = 0  # of the content, in the whole text

    def add(self, at: int, entry: TokenLogprob) -> None:
        """Take a token's entry; its text begins `at` characters into the whole."""
        self._waiting.append((at, entry))

    def say(self, start: int, length: int) -> None:
        """Note that these characters are content; what began before them and waits is none."""
        while self._waiting and self._waiting[0][0] < start + length:
            at, entry = self._waiting.popleft()
            if at >= start:
                self._placed.append((self._said + at - start, entry))
        self._said += length
        self._end = start + length

    def until(self, shown: int) -> tuple[TokenLogprob, ...]:
        """Return entries of tokens of which so many characters of content show a part."""
        out = []
        while self._placed and self._placed[0][0] < shown:
            out.append(self._placed.popleft()[1])
        return tuple(out)

    def rest(self, total: int) -> tuple[TokenLogprob, ...]:
        """Return what is left when all content is shown, tokens without text at its end too.

        Args:
            total: Characters of the whole text.
        """
        ends = [entry for at, entry in self._waiting if at == self._end == total]
        left = (*(entry for _, entry in self._placed), *ends)
        self._placed.clear()
        self._waiting.clear()
        return left


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Join pieces that follow each other, as long as thought stays before content and calls."""
    out: list[Piece] = []
    for piece in pieces:
        if out and _follows(out[-1], piece):
            last = out[-1]
            out[-1] = Piece(
                last.index,
                last.text + piece.text,
                last.thought + piece.thought,
                last.calls + piece.calls,
                last.logprobs + piece.logprobs,
                last.prompt_logprobs + piece.prompt_logprobs,
            )
        else:
            out.append(piece)
    return [piece for piece in out if not piece.empty]


def _follows(last: Piece, piece: Piece) -> bool:
    content = piece.text or piece.logprobs
    return not (last.calls and (content or piece.thought)) and not (last.text and piece.thought)
