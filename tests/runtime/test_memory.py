"""What a large request needed is given back to the system."""

import subprocess
import sys
import threading

import pytest

from paceline.runtime.memory import Trimmer

_KEPT = """
import ctypes, os
from paceline.runtime.memory import give_back

libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = [ctypes.c_size_t], [ctypes.c_void_p]
libc.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

blocks = [libc.malloc(65536) for _ in range(2048)]
for block in blocks:
    libc.memset(block, 1, 65536)
for block in blocks[:-1]:  # the last one keeps the allocator from returning those below it
    libc.free(block)
before = resident()
give_back()
print(before - resident())
"""


def _has_glibc() -> bool:
    try:
        import ctypes

        return sys.platform.startswith("linux") and hasattr(ctypes.CDLL(None), "malloc_trim")
    except OSError:
        return False


@pytest.mark.skipif(not _has_glibc(), reason="only glibc keeps freed memory so")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Of 128 MiB that were freed below one block in use, nearly all is given back."""
    done = subprocess.run(
        [sys.executable, "-c", _KEPT], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) > 100


def test_it_is_done_once_for_all_who_ask_meanwhile_and_again_later() -> None:
    """In a thread of its own, so that nobody who asks waits."""
    done = threading.Semaphore(0)
    threads: list[str] = []

    def trim() -> None:
        threads.append(threading.current_thread().name)
        done.release()

    patient = Trimmer(trim, wait_s=3600)
    before = threading.active_count()
    for _ in range(5):
        patient.ask()
    assert threading.active_count() - before == 1
    assert threads == []
    quick = Trimmer(trim, wait_s=0)
    for _ in range(2):
        quick.ask()
        assert done.acquire(timeout=60)
    assert threads == ["memory", "memory"]
