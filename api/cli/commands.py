"""The commands, each imported only when it is used."""

import click

from ... import __version__


class House(click.Group):
    """Commands in the order a newcomer needs them.

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
