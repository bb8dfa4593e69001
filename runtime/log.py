"""Structured logs: one JSON object a line, or a readable line when a person is watching.

A line is made, with its time, where it is logged; a thread writes it (runtime/writer.py). No
field, however odd, and no reader of the log can make logging raise or wait. What a program around
this one makes of structlog for itself changes nothing here, nor the other way round.
"""

import contextlib
import io
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO

import msgspec
import structlog

from .writer import Writer

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
_LONGEST: Final = 1 << 18  # characters of a line; its strings are cut when there are more
_CUT: Final = 1 << 12  # characters that a string keeps then
_ITEMS: Final = 256  # items that a collection keeps then
_DEEPEST: Final = 8  # levels that are kept then
_CLOSE_SECONDS: Final = 1.0  # for what waits for a stream that is replaced
# Without the frames' locals: they would carry prompts and keys into the log.
_TRACES: Final = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)
_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)


class _Outputs:
    """The process's two ways out; loggers keep this, so they follow a later `configure`."""

    def __init__(self) -> None:
        self.log: Writer | None = None
        self.console: Writer | None = None
        self.before = 0  # lines that replaced writers dropped
        self.pretty = False
        self.real: TextIO | None = None  # standard error, while `capture` stands in for it
        self.processors: list[Any] = []
        self.logger: type[Any] | None = None

    def line(self, text: str) -> None:
        """Write one line of the log."""
        self.errors().put(text + "\n")

    debug = info = warning = error = critical = line  # what structlog calls

    def errors(self) -> Writer:
        if self.log is None:
            self.log = Writer(sys.stderr, _lost_plainly)
        return self.log

    def replace(self, stream: TextIO | None, lost: Callable[[int], str]) -> None:
        old, self.log = self.log, Writer(stream, lost)
        if old is not None:
            old.close(_CLOSE_SECONDS)
            self.before += old.dropped


_OUT: Final = _Outputs()


def configure(level: str, style: str, stream: TextIO | None = None) -> None:
    """Set up what is logged from here on, and where it goes.

    Args:
        style: "json", "pretty", or "auto" for pretty on a terminal and JSON elsewhere.
        stream: Where lines go; standard error when None.
    """
    out = stream or _OUT.real or sys.stderr
    terminal = _is_terminal(out)
    pretty = style == "pretty" or (style == "auto" and terminal)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    tail: list[Any] = [_TRACES, _event_first, _render]
    if pretty:
        plain = structlog.dev.plain_traceback  # the rich one shows variables
        tail = [
            structlog.dev.ConsoleRenderer(
                colors=terminal, timestamp_key="ts", exception_formatter=plain
            ),
            lambda _, __, line: line[:_LONGEST],
        ]
    _OUT.processors = [*shared, *tail]
    _OUT.logger = _never_raising(_LEVELS[level])
    _OUT.replace(out, _lost_plainly if pretty else _lost)
    _OUT.pretty = pretty
    logging.captureWarnings(True)


def capture() -> None:
    """Take in what libraries log, warn and print to standard error, for the whole process.

    They would write to it themselves otherwise, and wait for its reader or fail with it.
    """
    if _OUT.real is None:
        _OUT.real = sys.stderr
        sys.stderr = _StandardError(_OUT.real)
    root = logging.getLogger()
    if not any(isinstance(handler, _Library) for handler in root.handlers):
        root.addHandler(_Library())
    logging.raiseExceptions = False


def logger() -> Any:
    """Return a logger that neither raises nor waits; `bind` gives it fixed fields."""
    if _OUT.logger is None:  # a program of one's own that has not called `configure`
        configure("info", "auto")
    assert _OUT.logger is not None
    return _OUT.logger(_OUT, _OUT.processors, {})


def say(text: str) -> None:
    """Write a line to standard output, which may be closed or have no reader."""
    if _OUT.console is None:
        _OUT.console = Writer(sys.stdout, _lost_plainly)
    _OUT.console.put(text + "\n")


def say_error(text: str) -> None:
    """Write a line for a person to standard error, behind what was logged before."""
    _OUT.errors().put(text + "\n")


def dropped() -> int:
    """Return how many lines of the log could not be written since the process began."""
    return _OUT.before + (_OUT.log.dropped if _OUT.log is not None else 0)


def flush(timeout_s: float) -> None:
    """Wait, for so long at most, until everything above is written."""
    for writer in (_OUT.log, _OUT.console):
        if writer is not None:
            writer.flush(timeout_s)


class _Library(logging.Handler):
    """Log records of libraries as lines of ours."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage()
        except Exception as error:  # arguments that do not fit the text
            message = f"{record.msg!r}: {error!r}"
        say_it = logger().error if record.levelno >= logging.ERROR else logger().warning
        say_it("library", library=record.name, message=message, exc_info=record.exc_info or None)


class _StandardError(io.TextIOBase):
    """Stands in for standard error: whole lines become events, or stay as is in a pretty log."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, real: TextIO | None) -> None:
        self._real = real
        self._begun = ""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return _OUT.pretty and _is_terminal(self._real)

    def fileno(self) -> int:
        if self._real is None:
            raise io.UnsupportedOperation("standard error is closed")
        return self._real.fileno()

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() needs str, not {type(text).__name__}")
        if _OUT.pretty:
            _OUT.errors().put(text)
            return len(text)
        *whole, begun = (self._begun + text).split("\n")
        self._begun = begun.rpartition("\r")[2][-_LONGEST:]  # a progress bar goes back and over
        for line in whole:
            if seen := line.rstrip("\r").rpartition("\r")[2].strip():
                # Past the level: a traceback of a thread comes this way too.
                _OUT.line(_bare("stderr", "warning", {"message": seen}))
        return len(text)


def _is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # closed
        return False


def _never_raising(level: int) -> type[Any]:
    """Return structlog's filtering logger for a level, which takes any event and any fields."""
    base: Any = structlog.make_filtering_bound_logger(level)

    class Logger(base):  # type: ignore[misc]  # structlog makes its classes at run time
        def _proxy_to_logger(self, level: str, /, *event: Any, **fields: Any) -> None:
            try:
                super()._proxy_to_logger(level, *event, **fields)
            except Exception as error:
                with contextlib.suppress(Exception):  # no memory left, for that either
                    held = {**self._context, **fields, "log_error": error}
                    _OUT.line(_bare(event[0] if event else "", level, held))

    return Logger


def _event_first(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
    head = {"event": event.pop("event", ""), "ts": event.pop("ts", None)}
    return {**head, **event}


def _render(_: Any, __: str, event: dict[str, Any]) -> str:
    line = _ENCODER.encode(event)
    return (line if len(line) <= _LONGEST else _ENCODER.encode(_tame(event))).decode()


def _bare(event: Any, level: str, fields: Mapping[str, Any]) -> str:
    """Return a line of JSON from anything, without structlog."""
    now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
    head = {"event": _tame(event), "ts": now, "level": level}
    try:
        return _ENCODER.encode({**head, **_tame(fields)}).decode()
    except Exception as error:  # a number or a collection that is not what it says
        return _ENCODER.encode({**head, "log_error": type(error).__name__}).decode()


def _lost(lines: int) -> str:
    return _bare("log.dropped", "warning", {"lines": lines})


def _lost_plainly(lines: int) -> str:
    return f"(paceline could not write {lines} lines here)"


def _tame(value: Any, depth: int = 0) -> Any:
    """Return something like it that surely can be encoded and is of bounded size."""
    if value is None or type(value) is bool:
        return value
    if type(value) in (float, int) and abs(value) < 2**63:
        return value
    if depth < _DEEPEST and isinstance(value, Mapping):
        return {_words(k): _tame(v, depth + 1) for k, v in _first(value.items())}
    if depth < _DEEPEST and isinstance(value, list | tuple | set | frozenset):
        return [_tame(item, depth + 1) for item in _first(value)]
    return _words(value)


def _first(items: Iterable[Any]) -> list[Any]:
    return [item for _, item in zip(range(_ITEMS), items, strict=False)]


def _words(value: Any) -> str:
    try:
        text = value if isinstance(value, str) else repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
    left_out = len(text) - _CUT
    text = text if left_out <= 0 else f"{text[:_CUT]}... ({left_out} characters left out)"
    return str.encode(text, "utf-8", "backslashreplace").decode()
