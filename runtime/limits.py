"""How much memory and how many cores this process may use, control groups included.

A container's limits are those of its control group and of every group above it, in the layouts
of cgroup v1 and v2; the least of them holds. Where there are none (macOS), the machine's own.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

_V1: Final = "cgroup"  # kinds of mounts, and so of layouts
_V2: Final = "cgroup2"


class MemoryLimit(msgspec.Struct, frozen=True):
    """The most memory this process may use, in bytes, and what sets it."""

    bytes: int
    source: str


def memory_limit(root: Path = Path("/"), physical: int | None = None) -> MemoryLimit:
    """Return the least of the machine's memory and the limits of all control groups.

    Args:
        root: Where `proc` and the mounted control groups are found.
        physical: The machine's memory in bytes; by default it is asked.
    """
    if physical is None:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    least = MemoryLimit(physical, "this machine")
    for folder in _groups(root, "memory"):
        for name, size in _memory_files(folder):
            if size < least.bytes:
                least = MemoryLimit(size, f"control group: {folder / name}")
    return least


def cores(root: Path = Path("/"), usable: int | None = None) -> int:
    """Return how many cores this process may keep busy: its affinity, or a group's quota if less.

    A quota of two and a half cores counts as two: a thread more would make all of them wait.

    Args:
        root: Where `proc` and the mounted control groups are found.
        usable: The cores of its affinity; by default they are asked.
    """
    least = float(usable or usable_cores())
    for folder in _groups(root, "cpu"):
        least = min(least, _quota(folder))
    return max(1, int(least))


def usable_cores() -> int:
    """Return the cores this process may run on, quotas left out of account."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _memory_files(folder: Path) -> Iterator[tuple[str, int]]:
    for name in ("memory.max", "memory.high", "memory.limit_in_bytes"):
        word = _read(folder / name).strip()
        if word.isdecimal():  # "max" is none
            yield name, int(word)
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "hierarchical_memory_limit" and value.isdecimal():  # v1 tells of groups above
            yield "memory.stat", int(value)


def _quota(folder: Path) -> float:
    """Return the cores a group's quota is worth."""
    words = _read(folder / "cpu.max").split()
    if not words:
        words = [_read(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
    if len(words) == 2 and all(word.isdecimal() for word in words) and int(words[1]):
        return int(words[0]) / int(words[1])  # "max" and -1 are none
    return float("inf")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of each control group this process is in, the innermost first."""
    ours = _memberships(root, controller)
    for kind, mounted_root, point in _mounts(root, controller):
        if kind not in ours:
            continue
        top = root / point.lstrip("/")
        # A container may see the groups of its host in its path, but only its own mounted.
        inside = os.path.relpath(ours[kind], mounted_root)
        folder = top if inside.startswith("..") else top / inside
        while True:
            yield folder
            if folder == top:
                break
            folder = folder.parent


def _memberships(root: Path, controller: str) -> dict[str, str]:
    """Return the path of this process's group by kind of layout."""
    found = {}
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0" and not controllers:
            found[_V2] = path
        elif controller in controllers.split(","):
            found[_V1] = path
    return found


def _mounts(root: Path, controller: str) -> Iterator[tuple[str, str, str]]:
    """Yield kind of layout, group that is mounted, and mount point; see proc(5), mountinfo."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == _V2 or (kind[0] == _V1 and controller in kind[2].split(",")):
            yield kind[0], fields[3], fields[4]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
