"""Where paceline keeps what it made once, and how two processes make it only once."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .errors import SettingsError


def cache_dir() -> Path:
    """Return the cache folder: $PACELINE_CACHE or ~/.cache/paceline (not created here).

    Raises:
        SettingsError: When neither is known.
    """
    named = os.environ.get("PACELINE_CACHE")
    return Path(named).absolute() if named else home("PACELINE_CACHE") / ".cache" / "paceline"


def home(instead: str) -> Path:
    """Return the user's home folder.

    Args:
        instead: The environment variable that can say what is looked for there.

    Raises:
        SettingsError: When nothing says where it is.
    """
    try:
        return Path.home()
    except RuntimeError:
        raise SettingsError(
            f"no home folder is known here; set HOME in the environment, or {instead}"
        ) from None


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock file; the kernel lets it go when the holder dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
