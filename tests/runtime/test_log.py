"""Logs: one JSON object a line, no prompt in a traceback, and nobody who logs waits or fails."""

import io
import json
import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest

from paceline.runtime import log, writer


@pytest.fixture
def out() -> Iterator[io.StringIO]:
    """What is logged in JSON at level info."""
    stream = io.StringIO()
    log.configure("info", "json", stream)
    yield stream
    log.configure("error", "json")


def _events(out: io.StringIO) -> list[dict[str, Any]]:
    log.flush(10)
    return [json.loads(line) for line in out.getvalue().splitlines()]


class _Pipe:
    """A log whose reader does what the test wants."""

    def __init__(self) -> None:
        reads, writes = os.pipe()
        self.reader = os.fdopen(reads)
        with os.fdopen(writes, "w") as stream:
            log.configure("info", "json", stream)  # which keeps a descriptor of its own

    def lines(self) -> list[dict[str, Any]]:
        """Read up to a line that is logged now, logging it again where it was dropped."""
        found: list[dict[str, Any]] = []
        reader = threading.Thread(target=self._read, args=(found,))
        reader.start()
        while reader.is_alive():
            log.logger().info("now")
            reader.join(0.1)
        return found

    def _read(self, found: list[dict[str, Any]]) -> None:
        while not found or found[-1]["event"] != "now":
            found.append(json.loads(self.reader.readline()))


@pytest.fixture
def pipe() -> Iterator[_Pipe]:
    made = _Pipe()
    yield made
    made.reader.close()
    log.configure("error", "json")


def test_a_line_is_one_json_object_with_event_and_time(out: io.StringIO) -> None:
    """Event, time and level stand on every line, and fields keep their types."""
    log.logger().info("cohort.sealed", rows=("a", "b"), real_width=2)
    log.logger().debug("hidden")
    (event,) = _events(out)
    assert list(event)[:2] == ["event", "ts"]
    assert (event["event"], event["level"]) == ("cohort.sealed", "info")
    assert (event["rows"], event["real_width"]) == (["a", "b"], 2)


@pytest.mark.parametrize("style", ["json", "pretty"])
def test_a_traceback_does_not_carry_local_variables(style: str) -> None:
    """An error's trace names files and lines; what a caller sent stays out of the log."""
    stream = io.StringIO()
    log.configure("info", style, stream)

    def fail(prompt: str) -> None:
        raise RuntimeError("broken")

    try:
        fail("very private" + " words")
    except RuntimeError as error:
        log.logger().error("request.crashed", exc_info=error)
    finally:
        log.configure("error", "json")
    assert "broken" in stream.getvalue()
    assert "very private words" not in stream.getvalue()


class _Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __str__ = __repr__


class _HostileError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class _HostileDict(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("no items")


_NEST: list[Any] = []
for _ in range(100_000):
    _NEST = [_NEST]
_SELF: list[Any] = []
_SELF.append(_SELF)


@pytest.mark.parametrize("style", ["json", "pretty"])
@pytest.mark.parametrize(
    "fields",
    [
        {"x": float("nan"), "y": float("-inf"), "z": 10**400},
        {"x": "a\ud800b", "\udfff": 1},
        {"x": b"\xff\x00", "y": bytearray(b"\xff"), "z": memoryview(b"\xff")},
        {"x": "long" * 1_000_000, "y": ["long" * 10_000] * 1000},
        {"x": _Hostile(), "y": {"in": [_Hostile()]}, "z": {_Hostile(): 1, (1, 2): 2, None: 3}},
        {"x": _HostileDict(a=1)},
        {"x": _NEST, "y": _SELF},
        {"exc_info": _HostileError()},
        {"exc_info": ExceptionGroup("many", [_HostileError(), ValueError("\ud800")])},
        {"level": 5, "ts": object(), "method_name": 1},
    ],
    ids=lambda fields: "-".join(map(ascii, fields)),
)
def test_no_field_is_too_odd_to_log(fields: dict[str, Any], style: str) -> None:
    """A field that cannot be encoded, is huge or raises is tamed; its line is one JSON object."""
    stream = io.StringIO()
    log.configure("info", style, stream)
    try:
        log.logger().error("odd", **fields)
        log.logger().info("\ud800")
        log.logger().info("next")
    finally:
        log.configure("error", "json")
    lines = stream.getvalue().splitlines()
    assert len(stream.getvalue()) < 2_000_000
    assert "next" in lines[-1]
    if style == "json":
        assert [json.loads(line)["event"] for line in lines] == ["odd", "\\ud800", "next"]


def test_what_cannot_be_said_costs_no_other_field(out: io.StringIO) -> None:
    """A value whose repr raises is named by its type, beside what could be logged."""
    log.logger().error("odd", x=_Hostile(), kept=1)
    (event,) = _events(out)
    assert event["x"] == "<_Hostile: its repr raised RuntimeError>"
    assert event["kept"] == 1


def test_lines_of_many_threads_keep_their_order_and_their_time(out: io.StringIO) -> None:
    """Each thread's lines come in its order, none is torn, and times do not run backwards."""

    def run(name: int) -> None:
        for number in range(200):
            log.logger().info("line", name=name, number=number)

    threads = [threading.Thread(target=run, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = _events(out)
    for name in range(4):
        mine = [e for e in events if e["name"] == name]
        assert [e["number"] for e in mine] == list(range(200))
        assert [e["ts"] for e in mine] == sorted(e["ts"] for e in mine)


def test_a_reader_that_goes_away_is_counted_and_harms_nobody(pipe: _Pipe) -> None:
    """Writing to a pipe without a reader raises in no one who logs; the lines are counted."""
    before = log.dropped()
    pipe.reader.close()
    for _ in range(5):
        log.logger().info("into.nothing")
    log.flush(10)
    assert log.dropped() == before + 5


def test_a_reader_that_stops_holds_nobody_up_and_is_told_what_it_missed(
    pipe: _Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a full pipe and a full queue lines are dropped; the rest comes, with their number."""
    monkeypatch.setattr(writer, "MOST_LINES", 100)
    before = log.dropped()
    for number in range(5000):  # far more than a pipe holds
        log.logger().info("line", number=number, padding="x" * 100)
    assert log.dropped() > before
    log.flush(0)  # as at the exit: it does not wait for the reader
    expected = 0
    for event in pipe.lines():
        if event["event"] == "line":
            assert event["number"] == expected
        expected += event["lines"] if event["event"] == "log.dropped" else 1
    assert expected > 5000


def test_what_waits_for_a_stopped_reader_is_bounded_in_characters_too(
    pipe: _Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few lines, but long ones: those beyond the bound are dropped."""
    monkeypatch.setattr(writer, "MOST_CHARACTERS", 1 << 20)
    before = log.dropped()
    for _ in range(40):  # 4 MB, of which a pipe holds a part of one line
        log.logger().info("line", padding="x" * 100_000)
    assert 25 <= log.dropped() - before < 40
    log.flush(0)
    assert pipe.lines()


class _FullDisk(io.StringIO):
    """Takes nothing for a while, as a full disk does."""

    full = True

    def write(self, text: str) -> int:
        if self.full:
            raise OSError(28, "No space left on device")
        return super().write(text)


def test_a_disk_that_has_room_again_is_told_once_what_it_missed() -> None:
    """Lines that could not be written are counted in one line, in front of the next that can."""
    disk = _FullDisk()
    log.configure("info", "json", disk)
    try:
        for _ in range(3):
            log.logger().info("lost")
        log.flush(10)
        disk.full = False
        log.logger().info("kept")
        log.logger().info("kept")
    finally:
        log.configure("error", "json")
    events = [json.loads(line) for line in disk.getvalue().splitlines()]
    assert [e["event"] for e in events] == ["log.dropped", "kept", "kept"]
    assert events[0]["lines"] == 3


def test_a_line_that_was_cut_off_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a line is ended before the next one begins."""
    reads, writes = os.pipe()
    real, calls = os.write, []

    def write(number: int, data: Any) -> int:
        calls.append(number)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(number, data[:4] if len(calls) == 1 else data)

    stream = os.fdopen(writes, "w")
    made = writer.Writer(stream, lambda lines: f"lost {lines}")
    monkeypatch.setattr(os, "write", write)
    made.put("first line\n")
    made.flush(10)
    made.put("second line\n")
    made.close(10)
    assert os.read(reads, 100) == b"firs\nlost 1\nsecond line\n"
    stream.close()
    os.close(reads)


def test_a_pipe_that_was_made_non_blocking_loses_nothing(pipe: _Pipe) -> None:
    """Another process may have done that to a shared pipe or terminal; the thread waits then."""
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    stream = os.fdopen(writes, "w")
    made = writer.Writer(stream, str)
    stream.close()  # the writer has its own
    text = "x" * 300_000
    made.put(text)
    made.put("\n")
    with os.fdopen(reads) as reader:
        assert reader.readline() == text + "\n"
    made.close(10)


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_a_closed_stream_is_no_reason_to_fail(stream: io.StringIO | None) -> None:
    """Neither a stream closed from the start nor one closed later makes a writer raise."""
    made = writer.Writer(stream, str)
    if stream is not None:
        stream.close()
    made.put("line\n")
    made.close(10)
    assert made.dropped == 1


def test_a_logger_made_before_writes_where_the_log_goes_now(out: io.StringIO) -> None:
    """A bound logger that an actor keeps follows a later `configure`."""
    kept = log.logger().bind(mode="serial")
    later = io.StringIO()
    log.configure("info", "json", later)
    kept.info("hello")
    (event,) = _events(later)
    assert event["mode"] == "serial"
    assert out.getvalue() == ""


def test_a_forked_child_logs_and_leaves_the_parents_lines_alone(pipe: _Pipe) -> None:
    """The child has no writer thread and must not wait for one, nor write lines twice."""
    log.logger().info("parent")
    log.flush(10)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # this process has threads
        child = os.fork()
    if child == 0:
        try:
            log.logger().info("child")
            log.flush(10)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert [e["event"] for e in pipe.lines()] == ["parent", "child", "now"]


def test_what_libraries_log_warn_and_print_becomes_lines(
    out: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records, warnings, prints, progress bars and threads' tracebacks: one JSON object each."""
    monkeypatch.setattr(sys, "stderr", sys.stderr)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    monkeypatch.setattr(log._OUT, "real", None)
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [*root.handlers])
    log.capture()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(False)
        logging.captureWarnings(True)  # pytest has put a recorder of its own in between
        warnings.warn("old thing", DeprecationWarning, stacklevel=1)
    logging.getLogger("some.library").error("value %d", "not a number")
    print("two\nlines", file=sys.stderr)
    sys.stderr.write("\r 10%\r 50%\r100%\n")
    with pytest.raises(TypeError):
        sys.stderr.write(b"bytes")  # type: ignore[arg-type]  # as click finds out
    events = _events(out)
    for _ in range(3):  # a line that never ends is not kept whole
        sys.stderr.write("x" * log._LONGEST)
    begun: Any = sys.stderr
    assert len(begun._begun) <= log._LONGEST
    assert [e["event"] for e in events] == ["library"] * 2 + ["stderr"] * 3
    assert "old thing" in events[0]["message"]
    assert events[1]["library"] == "some.library"
    assert [e["message"] for e in events[2:]] == ["two", "lines", "100%"]
