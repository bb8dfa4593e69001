"""The servers a bench compares: paceline's modes, and mlx_lm.server on the same weights."""

import http.client
import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click
import msgspec

from ...runtime import blas
from ...runtime.cache import cache_dir, locked
from ...runtime.modes import Mode

_START_SECONDS: Final = 180.0
_NEVER_ENDS: Final = 5  # a control token the starter model does not produce
MLX_LM: Final = "mlx-lm"
MLX_LM_PLAIN: Final = "mlx-lm-as-installed"
SERIAL_PLAIN: Final = "serial-no-mtp"
KINDS: Final = (*(mode.value for mode in Mode), SERIAL_PLAIN, MLX_LM, MLX_LM_PLAIN)

# mlx_lm.server behind the same BLAS as ours, for a comparison of the servers alone.
_WITH_BLAS: Final = (
    "from paceline.runtime import blas; blas.preload(); from mlx_lm.server import main; main()"
)


class Target(msgspec.Struct, frozen=True):
    """A running server; `url` ends in /v1."""

    name: str
    url: str
    model: str


def external(name: str, url: str) -> Target:
    """Return a server that somebody else runs.

    Raises:
        ClickException: When no OpenAI-compatible server answers there.
    """
    url = url.rstrip("/")
    try:
        with urllib.request.urlopen(f"{url}/models", timeout=10) as answer:
            model = json.load(answer)["data"][0]["id"]
    except (OSError, ValueError, LookupError, TypeError, http.client.HTTPException) as error:
        raise click.ClickException(f"{name}: {url}/models lists no model ({error})") from None
    return Target(name, url, model)


@contextmanager
def spawn(kind: str, model: str) -> Iterator[Target]:
    """Start a server of one kind and stop it at the end.

    Raises:
        ClickException: When the kind is unknown or the server does not come up.
    """
    if kind not in KINDS:
        raise click.ClickException(f"unknown target {kind!r}; choose of: {', '.join(KINDS)}")
    port = _free_port()
    if kind in (MLX_LM, MLX_LM_PLAIN):
        folder = str(_unpacked_model(model))
        start = ["-c", _WITH_BLAS] if kind == MLX_LM else ["-m", "mlx_lm.server"]
        command = [sys.executable, *start, "--model", folder, "--port", str(port)]
        name = folder
    else:
        mode = ("serial", "--no-mtp") if kind == SERIAL_PLAIN else (kind,)
        command = [
            *(sys.executable, "-m", "paceline.api.cli.main", "serve", "--model", model),
            *("--port", str(port), "--log-level", "warning", "--scheduler-mode", *mode),
        ]
        name = "default"
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            _wait_until_up(process, port, kind)
            yield Target(kind, f"http://127.0.0.1:{port}/v1", name)
        finally:
            process.terminate()
            process.wait(30)


def _wait_until_up(process: "subprocess.Popen[bytes]", port: int, kind: str) -> None:
    end = time.monotonic() + _START_SECONDS
    while time.monotonic() < end and process.poll() is None:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=2):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.2)
    raise click.ClickException(f"target {kind} did not come up")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _unpacked_model(model: str) -> Path:
    """Return a float32 copy of a model that mlx_lm.server can run to the full length.

    Its products then run on the same BLAS from the same weights. mlx_lm knows no `ignore_eos`,
    so the copy's end token is one the model never produces.
    """
    blas.preload()
    from ...runtime.model import find_model

    source = find_model(model)
    name = re.sub(r"\W+", "-", source.resolve().name)
    target = cache_dir() / "bench" / f"{name}-float32"
    with locked(target.with_name(f".{target.name}.lock")):
        if not target.exists():
            _write_unpacked(source, target)
    return target


def _write_unpacked(source: Path, target: Path) -> None:
    from ...runtime.model import save_unpacked

    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        draft = Path(scratch, "model")
        save_unpacked(source, draft, end_token=_NEVER_ENDS)
        for file in source.glob("tokenizer*.json"):
            shutil.copy(file, draft)
        config = draft / "tokenizer_config.json"
        settings = json.loads(config.read_text())
        settings.pop("eos_token", None)
        config.write_text(json.dumps(settings))
        draft.rename(target)
