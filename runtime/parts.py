"""An answer's text, split as it grows into thought, content and calls: pure, and in order."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal

import msgspec

from .dialect import Dialect

# Families' parsers take up to the square of a call's length where a model repeats its marks.
_INLINE_CALL: Final = 4_096  # characters; what is longer is not read on the event loop
_LONGEST_CALL: Final = 1 << 17  # characters between two marks; more than that is text

Calling = Literal["never", "maybe", "always"]

# Bounded in all its parts, since it is tried again at each token until there is one.
_HEAD: Final = re.compile(
    r'\s{0,64}\{\s{0,64}"name"\s{0,64}:\s{0,64}(?P<name>"(?:[^"\\]|\\.){0,256}")\s{0,64},'
    r'\s{0,64}"(?:arguments|parameters)"\s{0,64}:\s{0,64}(?=\{)'
)
_INSIDE: Final = re.compile(r'["{}\[\]]')
_STRING_END: Final = re.compile(r'(?:[^"\\]|\\.)*"', re.DOTALL)


class Manner(msgspec.Struct, frozen=True):
    """How to read a request's answers.

    Args:
        dialect: The model's marks.
        thinking: Whether the prompt has begun a thought that the answer goes on with.
        calling: "always" means that an answer is one call in JSON and nothing else.
        most_calls: The answer is over once it holds so many; None for any number.
        tools: The request's tools, for parsers that need their types.
        behind: Whether an answer goes on with text that the caller gave.
    """

    dialect: Dialect = Dialect()
    thinking: bool = False
    calling: Calling = "never"
    most_calls: int | None = None
    tools: tuple[Any, ...] = ()
    behind: bool = False

    @property
    def marked(self) -> bool:
        """Whether there is anything to tell apart."""
        return bool(self.dialect.think_open) or self.thinking or self.calling != "never"


class Thought(msgspec.Struct, frozen=True):
    """A piece of reasoning."""

    text: str


class Content(msgspec.Struct, frozen=True):
    """A piece of what is said.

    Args:
        start: Where it stands in the answer's whole text, in characters.
    """

    text: str
    start: int


class Call(msgspec.Struct, frozen=True):
    """A piece of a call.

    Args:
        index: Counts an answer's calls.
        id: With the first piece only, as the name.
        arguments: The next piece of the arguments' JSON.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


Part = Thought | Content | Call


class Splitter:
    """Splits one answer. Nothing that may become a mark is given out before that is clear.

    `calls` counts complete calls; `thinking` says whether a thought goes on.
    """

    def __init__(self, manner: Manner) -> None:
        dialect = manner.dialect
        self._manner = manner
        self._dialect = dialect
        self._held = ""
        self._at = 0  # where `_held` begins
        self._fresh = True  # nothing was said yet, so a thought may begin
        self._skip = manner.thinking  # white space beside a mark belongs to it
        self._call_marks = [dialect.call_open] if manner.calling == "maybe" else []
        self._marks = [*self._call_marks, *([dialect.think_open] if dialect.think_open else [])]
        self._call: _OpenCall | None = None
        self._begun = 0
        self.calls = 0
        self.thinking = manner.thinking
        self._plain = not manner.marked

    @property
    def reads_long(self) -> bool:
        """Whether the next text may let a family's own parser read a long call."""
        waiting = self._call is not None and not self._call.begun
        return waiting and len(self._held) > _INLINE_CALL

    def push(self, text: str) -> list[Part]:
        """Take more text; return what is clear by now."""
        if self._plain:
            part = Content(text, self._at)
            self._at += len(text)
            return [part] if text else []
        self._held += text
        return list(self._parts(last=False))

    def finish(self) -> list[Part]:
        """Return the rest, when no more text will come."""
        return list(self._parts(last=True))

    def _parts(self, last: bool) -> Iterator[Part]:
        """Go on as long as there is progress."""
        before = -1
        while self._held and before != self._at:
            before = self._at
            if self._skip:
                self._take(len(self._held) - len(self._held.lstrip()))
            if self.thinking:
                yield from self._think(last)
            elif self._call is not None:
                yield from self._read_call(self._call, last)
            elif self._manner.calling == "always":
                if self.calls:
                    self._take(len(self._held))  # nothing that counts follows a forced call
                else:
                    self._call, before = _OpenCall(self._begun), -1
            else:
                yield from self._say(last)

    def _think(self, last: bool) -> Iterator[Part]:
        end, mark = _find(self._held, [self._dialect.think_close], last)
        if text := self._take(len(self._held[:end].rstrip())):
            self._skip = False
            yield Thought(text)
        if mark is not None:
            self._take(self._held.index(mark) + len(mark))
            self.thinking, self._fresh, self._skip = False, False, True

    def _say(self, last: bool) -> Iterator[Part]:
        marks = self._marks if self._fresh else self._call_marks
        end, mark = _find(self._held, marks, last)
        said = bool(self._held[:end].strip())
        if self._fresh and not said and not last:
            if mark is None:
                return  # white space shows only when something is said behind it
            self._take(end)
            end = 0
        start = self._at
        if text := self._take(end):
            self._fresh = self._skip = False
            yield Content(text, start)
        if mark is None or (said and mark == self._dialect.think_open):
            return
        self._take(len(mark))
        self._fresh = False
        if mark == self._dialect.think_open:
            self.thinking = self._skip = True
        else:
            self._call = _OpenCall(self._begun)

    def _read_call(self, call: _OpenCall, last: bool) -> Iterator[Part]:
        """Read a call's JSON as it comes; what is none waits for its end."""
        forced = self._manner.calling == "always"
        in_json = forced or self._dialect.json_calls
        if in_json and not call.begun and (head := _head(self._held)) is not None:
            name, end = head
            self._take(end)
            self._begun += 1
            call.begun, self._skip = True, False
            yield Call(call.index, _call_id(), name, "")
        if call.begun and not call.done:
            piece = self._take(call.end_of_value(self._held))
            if piece:
                yield Call(call.index, None, None, piece)
        close = "" if forced else self._dialect.call_close
        end = self._held.find(close) if close else -1
        if call.done and (end >= 0 or last or forced):
            self._take(end + len(close) if end >= 0 else len(self._held))
            self.calls += 1
            self._call, self._skip = None, True
        elif not call.begun and (end >= 0 or last):
            inside = self._take(end if end >= 0 else len(self._held))
            before = self.calls
            yield from self._whole(inside, self._take(len(close)), call.index)
            self._call, self._skip = None, self.calls > before

    def _whole(self, inside: str, close: str, index: int) -> Iterator[Part]:
        """Return whole calls, or the text as it stood when it holds none."""
        found = _parse(inside, self._manner)
        if not found:
            opened = self._dialect.call_open if self._manner.calling == "maybe" else ""
            text = opened + inside + close
            yield Content(text, self._at - len(text))
        for at, (name, arguments) in enumerate(found):
            yield Call(index + at, _call_id(), name, arguments)
        self._begun += len(found)
        self.calls += len(found)

    def _take(self, count: int) -> str:
        out, self._held = self._held[:count], self._held[count:]
        self._at += len(out)
        return out


class _OpenCall:
    """A JSON call whose arguments come piece by piece.

    `begun` once its name was read, `done` at the end of its arguments.
    """

    def __init__(self, index: int) -> None:
        self.index = index
        self.begun = False
        self.done = False
        self._depth = 0
        self._string = False

    def end_of_value(self, text: str) -> int:
        """Return how much of the text belongs to the arguments; it goes on from the last time."""
        at = 0
        while at < len(text):
            if self._string:
                end = _STRING_END.match(text, at)
                if end is None:
                    # An escape may be cut in two; its backslash waits for what it escapes.
                    return len(text) - (len(text) - len(text.rstrip("\\"))) % 2
                self._string, at = False, end.end()
                continue
            found = _INSIDE.search(text, at)
            if found is None:
                return len(text)
            at = found.end()
            if found[0] == '"':
                self._string = True
                continue
            self._depth += 1 if found[0] in "{[" else -1
            if self._depth == 0:
                self.done = True
                return at
        return at


def _find(text: str, marks: Sequence[str], last: bool) -> tuple[int, str | None]:
    """Return where the first mark begins, or else how much of the text can be none."""
    found = [(at, mark) for mark in marks if (at := text.find(mark)) >= 0]
    if found:
        return min(found)
    if last:
        return len(text), None
    longest = max((_possible_start(text, mark) for mark in marks), default=0)
    return len(text) - longest, None


def _possible_start(text: str, mark: str) -> int:
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if text.endswith(mark[:size])), 0)


def _head(text: str) -> tuple[str, int] | None:
    """Return the name that a call in JSON begins with and where its arguments begin.

    One whose name is no JSON, or no text that can be sent, is not begun: it stays text.
    """
    head = _HEAD.match(text)
    if head is None:
        return None
    try:
        name = json.loads(head["name"])
        name.encode()
    except ValueError:
        return None
    return name, head.end()


def _parse(text: str, manner: Manner) -> list[tuple[str, str]]:
    """Return the calls that a text holds, as names and JSON; none when it cannot be read."""
    if len(text) > _LONGEST_CALL:
        return []
    read = manner.dialect.parse or (lambda text, tools: json.loads(text))
    try:
        found = read(text, list(manner.tools))
        return [_named(call) for call in (found if isinstance(found, list) else [found])]
    except Exception:  # each family's parser fails in its own way on what a model makes up
        return []


def _named(call: Any) -> tuple[str, str]:
    """Return a call's name and its arguments' JSON.

    Raises:
        TypeError: When it is no call.
        ValueError: For a number that JSON has not, or text that is no Unicode.
    """
    if not isinstance(call, dict) or not isinstance(name := call.get("name"), str):
        raise TypeError("no call")
    given = call.get("arguments", call.get("parameters"))
    given = {} if given is None else given
    arguments = given if isinstance(given, str) else json.dumps(given, allow_nan=False)
    (name + arguments).encode()
    return name, arguments


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
