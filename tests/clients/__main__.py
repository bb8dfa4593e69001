"""`make test-clients`: real clients, each from its own registry, against a real server.

    python -m tests.clients [NAME ...]

Libraries run a driver that chats, streams and forces a call; agents do a task that needs a tool.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table
from tests.clients.agents import AGENTS, SECRET, Agent, Place, run
from tests.clients.gateway import Exchange, Gateway
from tests.clients.install import Client, Installed, install
from tests.clients.libraries import LIBRARIES, Library
from tests.e2e.conftest import Server, running

_SECONDS = 600
_CLIENTS = Path(".clients")
# Agents' prompts are longer than the starter model's own context; what it says is not looked at.
_CONTEXT = "32768"


class Result(NamedTuple):
    """One client's line of the table."""

    name: str
    version: str
    exercised: str
    good: bool
    seconds: float


def main(names: Sequence[str]) -> int:
    """Run the named clients, or all; return the exit status."""
    known = {entry.client.name: entry for entry in (*LIBRARIES, *AGENTS)}
    if unknown := [name for name in names if name not in known]:
        print(f"unknown clients: {', '.join(unknown)}; known: {', '.join(known)}")
        return 2
    results = []
    with _server() as server:
        for name in names or known:
            entry = known[name]
            kind = _library if isinstance(entry, Library) else _agent
            results.append(_tried(entry.client, kind, entry, server))
            print(*results[-1][:3], "ok" if results[-1].good else "FAILED", flush=True)
    _show(results)
    return 0 if all(result.good for result in results) else 1


@contextmanager
def _server() -> Iterator[Server]:
    with tempfile.TemporaryDirectory() as folder:
        flags = ("--scheduler-mode", "mtp_batch", "--context-tokens", _CONTEXT)
        with running(Path(folder) / "server.log", *flags) as server:
            yield server


def _tried(client: Client, exercise: Callable[..., str], entry: object, server: Server) -> Result:
    began, version = time.monotonic(), "?"
    try:
        installed = install(client, _CLIENTS.resolve())
        version, began = installed.version, time.monotonic()
        told, good = exercise(entry, installed, server), True
    except (RuntimeError, AssertionError, subprocess.SubprocessError) as error:
        told, good = " ".join(str(error).split())[-500:], False
    return Result(client.name, version, told, good, time.monotonic() - began)


def _library(library: Library, installed: Installed, server: Server) -> str:
    python = library.client.registry == "pip"
    driver = library.driver
    if not python:  # Node looks for packages beside the program
        driver = installed.folder / library.driver.name
        driver.write_text(library.driver.read_text())
    program = str(installed.python) if python else "node"
    done = subprocess.run(
        [program, str(driver), server.url],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
        cwd=installed.folder,
        stdin=subprocess.DEVNULL,
    )
    did = [line.removeprefix("did ") for line in done.stdout.splitlines() if line[:4] == "did "]
    if done.returncode:
        raise RuntimeError(f"after {', '.join(did) or 'nothing'}: {done.stderr[-600:]}")
    return ", ".join(did)


def _agent(agent: Agent, installed: Installed, server: Server) -> str:
    with tempfile.TemporaryDirectory() as folder, Gateway(server.url, agent.wanted) as gateway:
        home, work = Path(folder) / "home", Path(folder) / "work"
        home.mkdir()
        work.mkdir()
        run(agent, installed, Place(home, work, gateway.url))
        return _judged(agent, gateway.seen)


def _judged(agent: Agent, seen: Sequence[Exchange]) -> str:
    """Say what an agent did.

    Raises:
        AssertionError: When it did not do what it was to do.
    """
    asked = [one for one in seen if isinstance(one.body, dict) and "model" in one.body]
    assert asked, "it asked for nothing"
    bad = [one for one in asked if one.status != 200]
    assert not bad, f"{bad[0].path} answered {bad[0].status}: {bad[0].answer[:300]!r}"
    streamed = [one for one in asked if one.body.get("stream")]
    ends = (b"[DONE]", b"response.completed", b"response.incomplete", b"message_stop")
    assert all(any(end in one.answer for end in ends) for one in streamed), "a stream has no end"
    told = [f"{len(asked)} requests", f"{len(streamed)} streamed"]
    if agent.wanted is not None:
        called = [at for at, one in enumerate(asked) if one.forced]
        assert called, f"it offered no tool {agent.wanted.name!r}"
        after = json.dumps([one.body for one in asked[called[0] + 1 :]])
        assert SECRET in after, "the tool's result never came back"
        told.append(f"tool round trip ({agent.wanted.name})")
    return ", ".join(told)


def _show(results: Sequence[Result]) -> None:
    table = Table("client", "version", "exercised", "result", "seconds")
    for name, version, exercised, good, seconds in results:
        table.add_row(name, version, exercised, "ok" if good else "FAILED", f"{seconds:.0f}")
    Console(width=140).print(table)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
