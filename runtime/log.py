"""Structured logs: one JSON object a line, or a readable line when a person is watching."""

import logging
import sys
from typing import Any, Final, TextIO

import msgspec
import structlog

_LEVELS: Final = {"debug": 10, "info": 20, "warning": 30, "error": 40}
# Without the frames' locals: they would carry prompts and keys into the log.
_TRACES: Final = structlog.processors.ExceptionRenderer(
    structlog.tracebacks.ExceptionDictTransformer(show_locals=False)
)
_ENCODER: Final = msgspec.json.Encoder(enc_hook=str)


def configure(level: str, style: str, stream: TextIO | None = None) -> None:
    """Set up structlog for the process.

    Args:
        style: "json", "pretty", or "auto" for pretty on a terminal and JSON elsewhere.
        stream: Where lines go; standard error when None.
    """
    out = stream or sys.stderr
    pretty = style == "pretty" or (style == "auto" and out.isatty())
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
    ]
    tail: list[Any] = (
        [structlog.dev.ConsoleRenderer(colors=out.isatty(), timestamp_key="ts")]
        if pretty
        else [_TRACES, _event_first, _render]
    )
    structlog.configure(
        processors=[*shared, *tail],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=out),
        cache_logger_on_first_use=False,
    )
    logging.captureWarnings(True)


def logger() -> Any:
    """Return the process's logger; bind ids with `structlog.contextvars.bound_contextvars`."""
    return structlog.get_logger()


def _event_first(_: Any, __: str, event: dict[str, Any]) -> dict[str, Any]:
    head = {"event": event.pop("event", ""), "ts": event.pop("ts", None)}
    return {**head, **event}


def _render(_: Any, __: str, event: dict[str, Any]) -> str:
    return _ENCODER.encode(event).decode()
