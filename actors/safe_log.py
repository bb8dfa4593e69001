"""A bound logger that never raises: what cannot be logged is no fault of who logs it.

An exception here would end a request that is well, or the owner of the model; the log itself
promises the same, but a processor that someone adds to it may not.
"""

from contextlib import suppress
from typing import Any

from ..runtime.log import logger


class SafeLog:
    """Logs under fixed fields."""

    def __init__(self, **fields: Any) -> None:
        self._fields = fields
        self._log: Any = None

    def debug(self, event: str, **fields: Any) -> None:
        """Log at level debug."""
        self._say("debug", event, fields)

    def info(self, event: str, **fields: Any) -> None:
        """Log at level info."""
        self._say("info", event, fields)

    def warning(self, event: str, **fields: Any) -> None:
        """Log at level warning."""
        self._say("warning", event, fields)

    def error(self, event: str, **fields: Any) -> None:
        """Log at level error."""
        self._say("error", event, fields)

    def _say(self, level: str, event: str, fields: dict[str, Any]) -> None:
        with suppress(Exception):
            if self._log is None:
                self._log = logger().bind(**self._fields)
            getattr(self._log, level)(event, **fields)
