"""Memory and cores as control groups allow them, over made-up /proc and /sys/fs/cgroup trees."""

from pathlib import Path
from typing import Final

import pytest

from paceline.runtime.limits import MemoryLimit, cores, memory_limit

GIB: Final = 1 << 30
UNLIMITED_V1: Final = "9223372036854771712"
V2_MOUNT: Final = "30 24 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw\n"
V1_MOUNT: Final = (
    "33 30 0:29 {root} /sys/fs/cgroup/{name} rw,nosuid shared:9 - cgroup cgroup rw,{name}\n"
)


def _tree(root: Path, cgroup: str, mounts: str, files: dict[str, str]) -> Path:
    proc = {"proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts}
    named = {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in (proc | named).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def _v2(root: Path, files: dict[str, str], path: str = "/a/b", mounted: str = "/") -> Path:
    return _tree(root, f"0::{path}\n", V2_MOUNT.format(root=mounted), files)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/b/memory.max": f"{2 * GIB}\n"}, 2 * GIB),
        ({"a/b/memory.max": "max\n"}, 16 * GIB),
        ({"a/b/memory.max": f"{3 * GIB}\n", "a/b/memory.high": f"{GIB}\n"}, GIB),
        ({"a/memory.max": f"{2 * GIB}\n", "a/b/memory.max": f"{3 * GIB}\n"}, 2 * GIB),
        ({"memory.max": f"{GIB}\n", "a/b/memory.max": "max\n"}, GIB),
        ({"other/memory.max": f"{GIB}\n"}, 16 * GIB),
        ({"a/b/memory.max": f"{64 * GIB}\n"}, 16 * GIB),
        ({"a/b/memory.max": "rubbish\n"}, 16 * GIB),
    ],
    ids=["own", "none", "high", "above", "topmost", "not ours", "more than there is", "rubbish"],
)
def test_the_least_limit_of_a_v2_group_and_all_above_it_holds(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    """memory.max and memory.high count, of each group on the way up, never above the machine."""
    assert memory_limit(_v2(tmp_path, files), 16 * GIB).bytes == expected


@pytest.mark.parametrize("path", ["/", "/docker/123", "/../../elsewhere"])
def test_a_container_that_sees_only_its_own_group_reads_that(tmp_path: Path, path: str) -> None:
    """The path in /proc may be the host's, while the container's own group is what is mounted."""
    mounted = "/docker/123" if path == "/docker/123" else "/"
    root = _v2(tmp_path, {"memory.max": f"{GIB}\n"}, path, mounted)
    found = memory_limit(root, 16 * GIB)
    assert found == MemoryLimit(GIB, f"control group: {root}/sys/fs/cgroup/memory.max")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory/a/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ({"memory/a/memory.limit_in_bytes": f"{UNLIMITED_V1}\n"}, 16 * GIB),
        ({"memory/memory.limit_in_bytes": f"{GIB}\n"}, GIB),
        ({"memory/a/memory.stat": f"cache 1\nhierarchical_memory_limit {GIB}\n"}, GIB),
    ],
    ids=["own", "none", "above", "above and unseen"],
)
def test_v1_limits_are_seen_beside_a_v2_group_without_the_controller(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    """A hybrid host has both layouts; memory is where its controller is."""
    mounts = V2_MOUNT.format(root="/") + V1_MOUNT.format(root="/", name="memory")
    root = _tree(tmp_path, "4:memory:/a\n0::/\n", mounts, files)
    assert memory_limit(root, 16 * GIB).bytes == expected


def test_without_control_groups_the_machine_decides(tmp_path: Path) -> None:
    """macOS has neither file."""
    assert memory_limit(tmp_path, GIB) == MemoryLimit(GIB, "this machine")
    assert cores(tmp_path, 12) == 12


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"a/b/cpu.max": "200000 100000\n"}, 2),
        ({"a/b/cpu.max": "max 100000\n"}, 8),
        ({"a/cpu.max": "250000 100000\n", "a/b/cpu.max": "max 100000\n"}, 2),
        ({"a/b/cpu.max": "5000 100000\n"}, 1),
        ({"a/b/cpu.max": "6400000 100000\n"}, 8),
    ],
    ids=["two", "none", "two and a half above", "a part of one", "more than there are"],
)
def test_a_quota_bounds_the_cores(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    """Whole cores of the least quota on the way up, at least one, at most the affinity's."""
    assert cores(_v2(tmp_path, files), 8) == expected


@pytest.mark.parametrize(("quota", "expected"), [("300000", 3), ("-1", 8)])
def test_a_v1_quota_bounds_the_cores(tmp_path: Path, quota: str, expected: int) -> None:
    """The quota and its period are two files there."""
    files = {"cpu/cpu.cfs_quota_us": f"{quota}\n", "cpu/cpu.cfs_period_us": "100000\n"}
    root = _tree(tmp_path, "1:cpu:/\n", V1_MOUNT.format(root="/", name="cpu"), files)
    assert cores(root, 8) == expected
