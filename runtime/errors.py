"""Every exception paceline raises, in one tree; what they become outside is decided at the edge.

PacelineError
+-- CallerError         the request is wrong; trying it again changes nothing
|   +-- ContextOverflow the prompt does not fit the model's context window
|   +-- UnknownThing    what the request names does not exist here
+-- BusyError           nothing is wrong, but there is no room now; try again later
+-- RowError            one row cannot go on; its neighbours can
|   +-- FormError       the form its answer must have cannot be followed any further
+-- SettingsError       a setting is unknown, malformed or at odds with another
+-- ModelError          the model cannot be had or cannot do what is asked of it
|   +-- HeadRefused     the model's MTP head cannot be used
|   |   +-- NoHead      the model has none, or none that can be used with it
|   +-- LaneRefused     a lane failed a check at load and is not installed
+-- OwnerDied           the model owner is gone; the process must be restarted
"""

from typing import Final

EXIT_SETTINGS: Final = 2
EXIT_MODEL: Final = 3
EXIT_PORT: Final = 4


class PacelineError(Exception):
    """The root of all errors paceline raises on purpose."""


class CallerError(PacelineError):
    """A request that cannot be served as it was written.

    Args:
        message: One line for the caller.
        param: The field of the request that is wrong, as a path (`messages[0].content`).
        code: A stable machine word, where OpenAI defines one.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ContextOverflow(CallerError):
    """The prompt alone fills the context window.

    Args:
        exact: Whether the prompt's tokens were counted; else it has more than so many.
        only_counted: Whether `context` is how far anything is counted, and no model's window.
    """

    def __init__(
        self,
        prompt_tokens: int,
        context: int,
        *,
        param: str,
        exact: bool = True,
        only_counted: bool = False,
    ) -> None:
        if only_counted:
            super().__init__(
                f"{param}: texts of more than {context} tokens are not counted; send a shorter one",
                param=param,
                code="context_length_exceeded",
            )
            return
        count = str(prompt_tokens) if exact else f"more than {prompt_tokens}"
        super().__init__(
            f"This model's maximum context length is {context} tokens, but the prompt has "
            f"{count} tokens; at least one must be left to generate. Shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )


class UnknownThing(CallerError):
    """A request names a model or a kept answer that does not exist here."""


class BusyError(PacelineError):
    """The server has no room for the request now; `retry_after_s` is an honest guess."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RowError(PacelineError):
    """One row failed in its own work; raised inside a lane and kept from its neighbours."""


class FormError(RowError):
    """The form that a caller asked for led a row to where it can go no further."""


class SettingsError(PacelineError):
    """A setting is wrong; the message names it, its value and where that came from."""


class ModelError(PacelineError):
    """The model cannot be found, read or run; the message says what to do."""


class HeadRefused(ModelError):
    """An MTP head is needed or present and cannot be used; the message says why."""


class NoHead(HeadRefused):
    """The model has no MTP head; a mode that can do without one goes on without."""


class LaneRefused(ModelError):
    """A lane did not pass a check when the model loaded, so the server does not start."""

    def __init__(self, lane: str, check: str, found: str) -> None:
        super().__init__(f"lane {lane} is not installed: check '{check}' failed: {found}")
        self.lane = lane
        self.check = check


class OwnerDied(PacelineError):
    """The device thread ended; every open request has been told."""
