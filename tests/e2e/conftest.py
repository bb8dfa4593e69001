"""A real server process on loopback, port 0, serving the starter model."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.lanes.test_heads import saved
from tests.lanes.tiny import LLAMA, tensors_of, tiny_head, tiny_llama

_UP = re.compile(r"at (http://\S+)/v1")
_START_SECONDS = 600  # self-checks of every lane, on a machine that others keep busy
_LOG_SECONDS = 60.0  # its thread writes when it gets to it


class Server:
    """A running `paceline serve`."""

    def __init__(self, process: "subprocess.Popen[str]", url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def events(self, until: Callable[[list[dict[str, Any]]], Any] = bool) -> list[dict[str, Any]]:
        """Return what is logged, as soon as `until` holds for it."""
        end = time.monotonic() + _LOG_SECONDS
        while True:
            whole = self.log.read_text().rpartition("\n")[0]  # the last line may be half written
            events = [json.loads(line) for line in whole.splitlines()]
            if until(events):
                return events
            assert time.monotonic() < end, f"never logged; the last lines:\n{whole[-2000:]}"
            threading.Event().wait(0.02)

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Send a signal and return the exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout)


@contextmanager
def running(log: Path, *flags: str, program: str | None = None) -> Iterator[Server]:
    """Start a server and make sure that it is gone at the end."""
    start = ["-c", program] if program else ["-m", "paceline.api.cli.main"]
    with log.open("w") as err:
        process = subprocess.Popen(
            [sys.executable, *start, "serve", "--port", "0", *flags],
            stdout=subprocess.PIPE,
            stderr=err,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
    try:
        yield Server(process, _wait_for_url(process, log), log)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def _wait_for_url(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    watchdog = threading.Timer(_START_SECONDS, process.kill)
    watchdog.start()
    try:
        for line in process.stdout:
            if match := _UP.search(line):
                return match.group(1)
    finally:
        watchdog.cancel()
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-2000:]}")


Running = Callable[..., Server]


@pytest.fixture(scope="session")
def server(starter_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server in mode ar_batch for all tests that do not stop it."""
    log = tmp_path_factory.mktemp("server") / "log.jsonl"
    with running(log, "--scheduler-mode", "ar_batch", "--log-format", "json") as server:
        yield server


@pytest.fixture(scope="session")
def tiny(starter_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Two tiny checkpoints with the starter's tokenizer: with a head of their own and without."""
    found = {}
    size = {"vocab_size": 49152, "max_position_embeddings": 8192}
    for name in ("headed", "plain"):
        net = tiny_llama(**size)
        head = tensors_of(tiny_head(net)) if name == "headed" else {}
        found[name] = saved(tmp_path_factory.mktemp(name), net, {**LLAMA, **size}, head)
        for file in starter_path.glob("tokenizer*"):
            shutil.copy(file, found[name])
    return found
