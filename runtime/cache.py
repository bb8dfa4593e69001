"""Where paceline keeps what it made once, and how two processes make it only once."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def cache_dir() -> Path:
    """Return the cache folder: $PACELINE_CACHE or ~/.cache/paceline (not created here)."""
    named = os.environ.get("PACELINE_CACHE")
    return Path(named).absolute() if named else Path.home() / ".cache" / "paceline"


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock file; the kernel lets it go when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
