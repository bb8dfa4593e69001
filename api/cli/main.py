"""The front door: `paceline COMMAND`. Errors become one line and an exit status here."""

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any, NoReturn

import click

from ... import __version__
from ...runtime.errors import (
    EXIT_MODEL,
    EXIT_PORT,
    EXIT_SETTINGS,
    ModelError,
    OwnerDied,
    SettingsError,
)


class House(click.Group):
    """Commands in the order a newcomer needs them, each imported only when it is used.

    Help and completion import all of them, so a command imports MLX, trio, the web framework and
    the like only where it runs.
    """

    names = ("serve", "health", "models", "pull", "config", "doctor", "inspect", "bench")

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Name the commands."""
        return list(self.names)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        """Import one command."""
        if name not in self.names:
            return None
        from importlib import import_module

        command: click.Command = import_module(f"{__package__}.{name}").command
        return command


@click.command(cls=House, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="paceline")
def cli() -> None:
    """A local, OpenAI-compatible LLM server on MLX: one actor a request, stepped in lockstep."""


def main() -> NoReturn:
    """Run a command and leave with its status: 2 settings, 3 model, 4 port."""
    # transformers advises on every import that PyTorch is missing; nothing here needs it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    try:
        cli(standalone_mode=False)
        status = 0
    except click.ClickException as error:
        error.show()
        status = error.exit_code
    except click.exceptions.Exit as leaving:
        status = leaving.exit_code
    except (click.Abort, KeyboardInterrupt):
        status = 130
    except BaseException as error:
        status = _explained(error)
    _leave(status)


def _explained(error: BaseException) -> int:
    """Print the one line a known failure deserves; anything else is a bug and shows its trace."""
    for single in _singles(error):
        match single:
            case SettingsError():
                return _say(single, EXIT_SETTINGS)
            case ModelError() | OwnerDied():
                return _say(single, EXIT_MODEL)
            case OSError() if single.errno is not None:
                return _say(single, EXIT_PORT)
            case ImportError():
                return _say(f"{single}; `paceline doctor` names packages that do not fit", 1)
    raise error


def _singles(error: BaseException) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _singles(inner)
    else:
        yield error


def _say(error: Any, status: int) -> int:
    click.echo(f"paceline: {error}", err=True)
    return status


def _leave(status: int) -> NoReturn:
    """Exit; at once where MLX would abort a normal exit.

    It does when a device thread is stuck inside it, or when an error keeps arrays alive beyond
    the thread that made them.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    stuck = any(thread.name == "paceline-device" for thread in threading.enumerate())
    if stuck or (status and "mlx.core" in sys.modules):
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    main()
