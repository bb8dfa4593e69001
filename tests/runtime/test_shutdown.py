"""The one way out of a process, tried in processes of their own that load no model."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.runtime import errors, shutdown

_LOUD_END = """
import atexit, ctypes, sys
from paceline.runtime import log, shutdown
atexit.register(lambda: print("the interpreter finalized", flush=True))
log.configure("info", "json")
"""


def _run(program: str, *, stdout: int = subprocess.PIPE) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-c", _LOUD_END + program],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
    )


def test_leaving_writes_what_waits_and_runs_no_finalizer() -> None:
    """Buffered output and logged lines come out, the status holds, destructors do not run."""
    done = _run("sys.stdout.write('half a line'); log.logger().info('last'); shutdown.leave(3)")
    assert (done.returncode, done.stdout) == (3, "half a line")
    assert '"event":"last"' in done.stderr


def test_leaving_from_another_thread_takes_the_whole_process_along() -> None:
    """As the watchdog does."""
    done = _run(
        "import threading\n"
        "threading.Thread(target=shutdown.leave, args=(75,)).start()\n"
        "threading.Event().wait()"
    )
    assert done.returncode == 75


def test_a_reader_that_stopped_does_not_hold_the_exit() -> None:
    """With full pipes on both streams that nobody reads the process still ends, by its status."""
    program = (
        "import os, threading\n"
        "reads, writes = os.pipe()\n"
        "os.dup2(writes, 1); os.dup2(writes, 2)\n"
        "os.set_blocking(writes, False)\n"
        "try:\n"
        "    while True: os.write(writes, b'x' * 4096)\n"
        "except BlockingIOError: os.set_blocking(writes, True)\n"
        "log.say('up'); log.say_error('down'); log.logger().info('last'); sys.stdout.write('x')\n"
        "shutdown.leave(3)"
    )
    assert _run(program).returncode == 3


def test_a_full_disk_behind_standard_output_is_no_success() -> None:
    """What was printed is lost, so the status says so; a status that says more is kept."""
    with open("/dev/full", "w") as full:
        assert _run("print('result'); shutdown.leave(0)", stdout=full.fileno()).returncode == 1
        assert _run("print('result'); shutdown.leave(3)", stdout=full.fileno()).returncode == 3


def test_a_reader_that_has_seen_enough_is_no_failure() -> None:
    """`paceline models | head -1` ends with 0."""
    reads, writes = os.pipe()
    os.close(reads)
    assert _run("print('result'); shutdown.leave(0)", stdout=writes).returncode == 0
    os.close(writes)


def _signalled(program: str, *numbers: int) -> int:
    """Start a program, wait for its line, send signals, and return its exit status."""
    process = subprocess.Popen(
        [sys.executable, "-c", "from paceline.runtime import shutdown\n" + program],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        for number in numbers:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(number)
        return process.wait(60)
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


_WAYS = {
    "in Python": "while True: pass",
    "in a wait": "import threading; threading.Event().wait()",
    "in a child process": "import subprocess; subprocess.run(['sleep', '600'])",
    "in an import": "import sys; sys.meta_path.insert(0, type('F', (), {'find_spec': "
    "staticmethod(lambda *a: __import__('time').sleep(600))})); import nothing_there",
    "in native code that Python's handlers cannot interrupt": (
        "import ctypes; ctypes.CDLL(None).pause.restype\n"
        "libc = ctypes.CDLL(None)\nwhile True: libc.sleep(600)"
    ),
    "swallowed": "import time\nwhile True:\n try: time.sleep(600)\n except BaseException: pass",
    # In short sleeps: a signal just before a long one is seen only behind it, and nobody watches.
    "after the loop": "shutdown.hand_over(); import time\nwhile True: time.sleep(0.01)",
}


@pytest.mark.parametrize("number", shutdown.STOP_SIGNALS)
@pytest.mark.parametrize("way", _WAYS)
def test_a_signal_before_the_event_loop_ends_with_0(way: str, number: int) -> None:
    """Whatever the main thread does, and even if something swallows the exception."""
    program = f"shutdown.arm()\nprint('ready', flush=True)\n{_WAYS[way]}"
    ended = f"try:\n {program.replace(chr(10), chr(10) + ' ')}\nfinally:\n shutdown.leave(0)"
    assert _signalled(ended, number) == 0


def test_hardly_anything_is_imported_before_signals_are_seen_to() -> None:
    """Until then a SIGTERM ends the process with 143, so the way there has to be short."""
    program = (
        "import sys\n"
        "before = set(sys.modules)\n"
        "from paceline.api.cli.main import main\n"
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60)
    others = {name for name in done.stdout.decode().split() if not name.startswith("paceline")}
    assert others <= {"__future__", "select"}


def test_a_signal_tidies_up_what_was_begun(tmp_path: Path) -> None:
    """A scratch folder is gone and a child process ended, as they would be after an error."""
    program = (
        "import subprocess, tempfile\n"
        "shutdown.arm()\n"
        "try:\n"
        f"  with tempfile.TemporaryDirectory(dir={str(tmp_path)!r}) as place:\n"
        "    code = 'import os, time; print(\"ready\", flush=True); time.sleep(600)'\n"
        "    import sys; subprocess.run([sys.executable, '-c', code])\n"
        "finally: shutdown.leave(0)"
    )
    assert _signalled(program, signal.SIGTERM) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_ends_at_once() -> None:
    """Also while what the first one began is still tidied up."""
    program = (
        "import os, time\n"
        "shutdown.arm()\n"
        "try:\n"
        "  os.write(1, b'ready\\n'); time.sleep(600)\n"
        "finally:\n"  # not by print, which a signal may find in the middle of a line
        "  os.write(1, b'ready\\n')\n"
        "  while True: time.sleep(600)"
    )
    assert _signalled(program, signal.SIGTERM, signal.SIGTERM) == 130


def test_closed_streams_are_not_taken_by_other_files() -> None:
    """With 0, 1 and 2 closed the next file gets a higher number, and printing harms nothing."""
    program = (
        "import os, sys; from paceline.runtime import log, shutdown\n"
        "shutdown.open_streams()\n"
        "print('x'); print('x', file=sys.stderr); log.say('x'); log.say_error('x')\n"
        "shutdown.leave(7 if os.open(os.devnull, os.O_RDONLY) > 2 else 1)"
    )
    words = 'exec "$0" -c "$1" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", words, sys.executable, program], timeout=60)
    assert done.returncode == 7


def test_every_exit_status_is_in_the_docs() -> None:
    """docs/operate.md has a row for each."""
    page = Path(__file__).parents[2].joinpath("docs", "operate.md").read_text()
    named = {**vars(errors), **vars(shutdown)}
    statuses = {value for name, value in named.items() if name.startswith("EXIT_")}
    assert statuses >= {2, 3, 4, 75, 130}
    assert [s for s in {0, 1, *statuses} if f"| {s} |" not in page] == []
