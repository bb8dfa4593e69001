"""The fastest BLAS this machine can have, loaded before MLX is imported.

MLX's Linux CPU wheel is linked against the reference BLAS and looks its three products up by
their plain names. The wheel `scipy-openblas32` carries OpenBLAS under prefixed names; a copy
with those renamed, loaded with global symbols before MLX, is what the linker then finds.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import msgspec

from .cache import cache_dir
from .limits import cores, usable_cores

_PRODUCTS: Final = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
_PREFIX: Final = "scipy_"
_SYSTEM: Final = ("libopenblas.so.0", "libopenblas.so")


class Blas(msgspec.Struct, frozen=True):
    """Which BLAS MLX's CPU products run on, and why."""

    name: str
    detail: str
    fast: bool


def preload(enabled: bool = True) -> Blas:
    """Load the best BLAS to be had; never raises, since MLX works without it, only slower.

    The order is the renamed wheel, then a system OpenBLAS, then MLX's own.
    """
    if sys.platform != "linux":
        return Blas("built in", "MLX brings its own fast BLAS on this platform", True)
    if not enabled:
        return Blas("reference", "switched off by fast_blas=false", False)
    if "mlx.core" in sys.modules:
        return Blas("reference", "MLX was imported before paceline could load another BLAS", False)
    # An idle OpenBLAS worker spins for 2^26 cycles by default, on a core the server needs; 2^4
    # made steps 3 to 6 % faster here (docs/performance.md).
    os.environ.setdefault("OPENBLAS_THREAD_TIMEOUT", "4")
    if (allowed := cores()) < usable_cores():
        # OpenBLAS counts the cores of its affinity; those past a quota only make the rest wait.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", str(allowed))
    reasons = []
    for attempt in (_from_wheel, _from_system):
        try:
            return attempt()
        except Exception as error:  # a linker's, a wheel's, a folder's: each fails in its own way
            reasons.append(f"{attempt.__name__.removeprefix('_from_')}: {error}")
    return Blas("reference", "slow; no OpenBLAS to be had (" + "; ".join(reasons) + ")", False)


def _from_wheel() -> Blas:
    import scipy_openblas32

    source = Path(scipy_openblas32.get_lib_dir(), scipy_openblas32.get_library(fullname=True))
    library = ctypes.CDLL(str(_renamed_copy(source)), mode=ctypes.RTLD_GLOBAL)
    for product in _PRODUCTS:
        getattr(library, product)
    get_config = library.scipy_openblas_get_config
    get_config.restype = ctypes.c_char_p
    return Blas("scipy-openblas32", str(get_config().decode()), True)


def _from_system() -> Blas:
    for name in _SYSTEM:
        try:
            library = ctypes.CDLL(name, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        for product in _PRODUCTS:
            getattr(library, product)
        get_config = library.openblas_get_config
        get_config.restype = ctypes.c_char_p
        return Blas(name, str(get_config().decode()), True)
    raise OSError("no libopenblas installed")


def _renamed_copy(source: Path) -> Path:
    """Return the cached copy of the library with plain names, making it if need be.

    Its name holds the source's size and time, so a newer wheel gets a new copy; it is renamed
    into place, so another process sees all of it or none.
    """
    stat = source.stat()
    stamp = hashlib.sha256(f"{source.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    target = cache_dir() / "blas" / f"libopenblas-{stamp.hexdigest()[:16]}.so"
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        copy, names = Path(scratch, "copy.so"), Path(scratch, "names")
        shutil.copyfile(source, copy)
        names.write_text("".join(f"{_PREFIX}{name} {name}\n" for name in _PRODUCTS))
        command = [_patchelf(), "--rename-dynamic-symbols", str(names), str(copy)]
        subprocess.run(command, check=True, capture_output=True, timeout=60)
        os.replace(copy, target)
    return target


def _patchelf() -> str:
    beside = Path(sys.executable).with_name("patchelf")
    found = str(beside) if beside.exists() else shutil.which("patchelf")
    if found is None:
        raise OSError("patchelf is not installed")
    return found
