"""The front door: `paceline COMMAND`. Errors become one line and an exit status here.

Nothing is imported before `main` has seen to signals that Python has not imported by itself, but
what `shutdown` needs for them.
"""

from __future__ import annotations

import os
import sys

from ...runtime import shutdown

TYPE_CHECKING = False  # typing's own would have to be imported
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import NoReturn


def main() -> NoReturn:
    """Run a command and leave with its status: 2 settings, 3 model, 4 port."""
    shutdown.open_streams()
    if "serve" in sys.argv[1:2]:
        shutdown.arm()
    # transformers advises on every import that PyTorch is missing; nothing here needs it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        status = _run()
    except BaseException as error:
        status = 0 if shutdown.signalled() else _explained(error)
    shutdown.leave(status)


def _run() -> int:
    """Run the command that the command line names and return the exit status click gives it."""
    import click

    from .commands import cli

    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.exceptions.Exit as leaving:
        return leaving.exit_code
    except click.Abort:
        return shutdown.EXIT_SECOND_SIGNAL
    return 0


def _explained(error: BaseException) -> int:
    """Print the one line a known failure deserves; anything else is a bug and shows its trace."""
    from ...runtime.errors import (
        EXIT_MODEL,
        EXIT_PORT,
        EXIT_SETTINGS,
        ModelError,
        OwnerDied,
        SettingsError,
    )

    for single in _singles(error):
        match single:
            case KeyboardInterrupt():
                return shutdown.EXIT_SECOND_SIGNAL
            case SystemExit():
                return _status_of(single)
            case SettingsError():
                return _say(single, EXIT_SETTINGS)
            case ModelError() | OwnerDied():
                return _say(single, EXIT_MODEL)
            case BrokenPipeError():
                return 1  # whoever read our output has seen enough
            case OSError() if single.errno is not None:
                return _say(single, EXIT_PORT)
            case ImportError():
                return _say(f"{single}; `paceline doctor` names packages that do not fit", 1)
    import traceback

    return _say("".join(traceback.format_exception(error)).rstrip(), 1, "")


def _singles(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _singles(inner)
    else:
        yield error


def _status_of(leaving: SystemExit) -> int:
    """Return what the interpreter would make of it."""
    if leaving.code is None or isinstance(leaving.code, int):
        return leaving.code or 0
    return _say(leaving.code, 1, "")


def _say(what: object, status: int, head: str = "paceline: ") -> int:
    """Say it in a line on standard error, whose reader may have stopped."""
    from ...runtime.log import say_error

    say_error(f"{head}{what}")
    return status


if __name__ == "__main__":
    main()
