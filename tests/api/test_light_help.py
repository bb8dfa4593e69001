"""Help and completion import every command, so no command may import much by that."""

import json
import subprocess
import sys
from typing import Final

import pytest

from paceline.api.cli.commands import House

HEAVY: Final = frozenset(
    {"anyio", "flask", "huggingface_hub", "hypercorn", "jinja2", "llguidance", "mlx", "mlx_lm"}
    | {"numpy", "openai", "packaging", "prometheus_client", "quart", "quart_trio", "rich"}
    | {"structlog", "tokenizers", "tomlkit", "transformers", "trio", "werkzeug"}
)
_RUN: Final = """
import json, sys
from paceline.api.cli.commands import cli
try:
    cli(sys.argv[1:], standalone_mode=False)
finally:
    sys.stdout.write("\\n" + json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
_CONFIG: Final = [["config", name, "--help"] for name in ("show", "get", "set", "unset", "path")]


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        *([], ["--help"], ["--version"], ["config", "path"]),
        *([name, "--help"] for name in House.names),
        *_CONFIG,
    ],
    ids=" ".join,
)
def test_help_imports_no_framework_and_no_arrays(arguments: list[str]) -> None:
    """What a command needs to run it imports when it runs."""
    done = subprocess.run(
        [sys.executable, "-c", _RUN, *arguments], capture_output=True, text=True, timeout=120
    )
    modules = set(json.loads(done.stdout.rpartition("\n")[2]))
    assert "click" in modules
    assert modules & HEAVY == set()


def test_a_command_that_is_not_there_is_none() -> None:
    """A name is looked up in the list, not imported."""
    assert House("paceline").get_command(None, "os") is None  # type: ignore[arg-type] # not used
