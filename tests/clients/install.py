"""Each client from its own registry into its own folder."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

_SECONDS = 900


class Client(NamedTuple):
    """What to install, and where its version is read.

    Args:
        registry: "pip" or "npm".
        packages: The first is the client, whose version is told.
    """

    name: str
    registry: str
    packages: Sequence[str]


class Installed(NamedTuple):
    """A client in its folder."""

    folder: Path
    version: str

    @property
    def python(self) -> Path:
        """The interpreter that has it."""
        return self.folder / "bin" / "python"

    def command(self, name: str) -> Path:
        """Return one of its programs."""
        inside = self.folder / "node_modules" / ".bin" / name
        return inside if inside.exists() else self.folder / "bin" / name


def install(client: Client, root: Path) -> Installed:
    """Install a client, unless an earlier run has.

    Raises:
        RuntimeError: When its registry does not give it.
    """
    folder = root / client.name
    done = folder / ".installed"
    if not done.exists():
        folder.mkdir(parents=True, exist_ok=True)
        if client.registry == "pip":
            _run([sys.executable, "-m", "venv", str(folder)], folder)
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            _run([*pip, *client.packages], folder)
        else:
            _run(["npm", "install", "--no-audit", "--no-fund", *client.packages], folder)
        done.touch()
    return Installed(folder, _version(client, folder))


def _version(client: Client, folder: Path) -> str:
    name = client.packages[0]
    if client.registry == "pip":
        program = f"import importlib.metadata as m; print(m.version({name!r}))"
        return _run([str(folder / "bin" / "python"), "-c", program], folder).strip()
    program = f"console.log(require('./node_modules/{name}/package.json').version)"
    return _run(["node", "-e", program], folder).strip()


def _run(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(
        command,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "npm_config_update_notifier": "false"},
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} failed: {(done.stderr or done.stdout)[-600:]}")
    return done.stdout
