"""The BLAS before MLX: in a process of its own, since a library is loaded once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.runtime import blas

pytestmark = pytest.mark.slow

_PROBE = """
import json, sys
from paceline.runtime import blas
found = blas.preload(sys.argv[1] == "on")
import mlx.core as mx, numpy as np
a = np.random.default_rng(0).standard_normal((64, 300)).astype(np.float32)
b = np.random.default_rng(1).standard_normal((300, 70)).astype(np.float32)
c = np.array(mx.matmul(mx.array(a), mx.array(b), stream=mx.cpu))
maps = open("/proc/self/maps").read()
print(json.dumps([found.name, found.fast, float(abs(c - a @ b).max()), "libopenblas-" in maps]))
"""


def _probe(switch: str, cache: Path, path: str | None = None) -> list[object]:
    environ = {**os.environ, "PACELINE_CACHE": str(cache), "PATH": path or os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-c", _PROBE, switch],
        env=environ,
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[object] = json.loads(done.stdout)
    return found


def test_the_wheels_blas_is_what_mlx_multiplies_with(tmp_path: Path) -> None:
    """The renamed copy is made once in the cache, loaded, and gives right products."""
    name, fast, error, loaded = _probe("on", tmp_path)
    assert (name, fast, loaded) == ("scipy-openblas32", True, True)
    assert isinstance(error, float)
    assert error < 1e-3
    (made,) = (tmp_path / "blas").iterdir()
    stamp = made.stat().st_mtime_ns
    _probe("on", tmp_path)
    assert made.stat().st_mtime_ns == stamp


def test_the_switch_turns_it_off(tmp_path: Path) -> None:
    """fast_blas=false leaves MLX as it was installed, and says so."""
    name, fast, _, loaded = _probe("off", tmp_path)
    assert (name, fast, loaded) == ("reference", False, False)
    assert not (tmp_path / "blas").exists()


def test_a_cache_that_cannot_be_written_costs_speed_and_nothing_else(tmp_path: Path) -> None:
    """Without a place for the copy MLX still works; the reason is told."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    name, _, error, _ = _probe("on", blocked)
    assert name != "scipy-openblas32"
    assert isinstance(error, float)
    assert error < 1e-3


def test_whatever_goes_wrong_the_blas_is_only_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves `preload`, as a missing home folder once did."""

    def broken() -> blas.Blas:
        raise RuntimeError("no home folder")

    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(blas, "_from_wheel", broken)
    monkeypatch.setattr(blas, "_from_system", broken)
    found = blas.preload()
    assert not found.fast
    assert "no home folder" in found.detail
