"""A whole process: exit statuses, signals, dropped clients, logs that can be followed."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.conftest import Server, running

pytestmark = pytest.mark.slow

_LONG = {
    "messages": [{"role": "user", "content": "Count from one to one thousand."}],
    "max_tokens": 4000,
    "ignore_eos": True,
}


def _post(server: Server, body: dict[str, Any]) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    headers = {"Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return connection


def _stream(stack: ExitStack, server: Server, body: dict[str, Any]) -> http.client.HTTPResponse:
    """Send a request and return its answer; the stack closes what was opened."""
    connection = stack.enter_context(closing(_post(server, body)))
    return stack.enter_context(closing(connection.getresponse()))


def _health(server: Server) -> dict[str, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("GET", "/health")
    found: dict[str, Any] = json.loads(connection.getresponse().read())
    connection.close()
    return found


def _paceline(*words: str, **environ: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "paceline.api.cli.main", *words],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=120,
    )


def _one_line(done: "subprocess.CompletedProcess[str]") -> str:
    """Return the one line for people beside the log's own."""
    (line,) = (line for line in done.stderr.strip().splitlines() if not line.startswith("{"))
    return line


def test_a_bad_setting_exits_with_2_and_one_line() -> None:
    """The line names key, value, source and what is allowed."""
    done = _paceline("serve", "--decode-batch-max", "99")
    assert done.returncode == 2
    assert "decode_batch_max='99' (flag --decode-batch-max)" in _one_line(done)
    done = _paceline("serve", "--scheduler-mode", "hyper", PACELINE_MAX_ACTIVE_REQUESTS="2")
    assert done.returncode == 2
    assert "environment PACELINE_MAX_ACTIVE_REQUESTS" in _one_line(done)


def test_a_prompt_that_came_before_is_not_read_again(server: Server) -> None:
    """The second time its whole tiles come from the bank, and the answer is the same."""
    words = " ".join(f"word {i}" for i in range(80))
    body = {
        "messages": [{"role": "user", "content": f"Note these: {words}"}],
        "max_tokens": 8,
        "temperature": 0.7,
        "seed": 3,
        "logprobs": True,
    }
    answers = []
    for _ in range(2):
        connection = _post(server, body)
        answers.append(json.load(connection.getresponse()))
        connection.close()
    first, second = answers
    assert first["choices"] == second["choices"]
    cached = [a["usage"]["prompt_tokens_details"]["cached_tokens"] for a in answers]
    assert cached[1] > cached[0]
    assert cached[1] % 64 == 0
    assert cached[1] >= second["usage"]["prompt_tokens"] - 64 - 64


def test_a_model_that_is_not_there_exits_with_3(tmp_path: Path) -> None:
    """A wrong path and a hub id without a network are one line each."""
    done = _paceline("serve", "--model", str(tmp_path))
    assert done.returncode == 3
    assert "no config.json" in _one_line(done)
    done = _paceline("serve", "--model", "nobody/nothing", HF_HUB_OFFLINE="1")
    assert done.returncode == 3
    assert "nobody/nothing" in _one_line(done)


def test_a_port_in_use_exits_with_4(server: Server) -> None:
    """The line names the reason."""
    done = _paceline("serve", "--port", str(server.port), "--log-level", "error")
    assert done.returncode == 4
    assert "in use" in _one_line(done)


def test_a_dropped_client_frees_its_row(server: Server) -> None:
    """Whether it streamed or waited, a client that leaves leaves no row behind."""
    for stream in (True, False):
        connection = _post(server, {**_LONG, "stream": stream})
        _wait_until(lambda: _health(server)["scheduler"]["telemetry"]["active_rows"] == 1)
        connection.close()
        _wait_until(lambda: _health(server)["open_requests"] == 0)
        _wait_until(lambda: _health(server)["scheduler"]["telemetry"]["active_rows"] == 0)


def test_a_request_and_its_cohorts_can_be_followed_by_id(server: Server) -> None:
    """From received to finished every line of a request has its id, and so have its cohorts."""
    with ExitStack() as stack:
        answer = _stream(stack, server, {**_LONG, "max_tokens": 5})
        request_id = answer.headers["x-request-id"]
        answer.read()
    events = server.events(lambda events: _ended(events, request_id))
    own = [e["event"] for e in events if e.get("request_id") == request_id]
    assert own == [
        "request.received",
        "request.queued",
        "request.admitted",
        "request.first_token",
        "request.finished",
    ]
    sealed = [e for e in events if request_id in e.get("request_ids", ())]
    assert sealed
    assert all(e["mode"] == "ar_batch" for e in events if "request_id" in e or "cohort_id" in e)
    assert not any("Count from" in json.dumps(e) for e in events), "no content in the log"


def _ended(events: list[dict[str, Any]], request_id: str) -> bool:
    """Whether the log has the end of a request and of each of its cohorts."""
    sealed = {e["cohort_id"] for e in events if request_id in e.get("request_ids", ())}
    dissolved = {e["cohort_id"] for e in events if e["event"] == "cohort.dissolved"}
    finished = {e["request_id"] for e in events if e["event"] == "request.finished"}
    return request_id in finished and sealed <= dissolved


def test_a_first_signal_drains_and_a_stalled_reader_does_not_hold_the_exit(
    starter_path: Path, tmp_path: Path
) -> None:
    """SIGTERM: a short stream finishes, an endless one gets an error event, exit status 0."""
    flags = ("--drain-timeout-s", "10", "--client-stall-s", "2", "--scheduler-mode", "ar_batch")
    with ExitStack() as stack:
        server = stack.enter_context(running(tmp_path / "log", *flags, "--log-format", "json"))
        endless = _stream(stack, server, {**_LONG, "stream": True})
        endless.readline()
        short = _stream(stack, server, {**_LONG, "max_tokens": 8, "stream": True})
        short.readline()
        stalled = stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
        stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        body = json.dumps({**_LONG, "stream": True}).encode()
        stalled.sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        texts: dict[str, bytes] = {}
        readers = [
            threading.Thread(target=lambda: texts.update(endless=endless.read())),
            threading.Thread(target=lambda: texts.update(short=short.read())),
        ]
        for reader in readers:
            reader.start()
        assert server.stop(signal.SIGTERM) == 0
        for reader in readers:
            reader.join(10)
    assert texts["short"].endswith(b"data: [DONE]\n\n")
    assert b'"code":"server_shutdown"' in texts["endless"]
    assert b"[DONE]" not in texts["endless"]
    assert {"server.draining", "server.stopped"} <= {e["event"] for e in server.events()}


def test_a_second_signal_ends_at_once(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Nobody has to wait for a drain they do not want."""
    model = ("--model", str(tiny["plain"]))
    with ExitStack() as stack:
        server = stack.enter_context(running(tmp_path / "log", "--drain-timeout-s", "600", *model))
        _stream(stack, server, {**_LONG, "stream": True}).readline()
        server.process.send_signal(signal.SIGINT)
        _wait_until(lambda: _health(server)["status"] == "draining")
        assert server.stop(signal.SIGINT, timeout=10) == 130


_NEVER_LOADS = """
import threading
from paceline.runtime import blas
blas.preload()
from paceline.runtime import model
model.load = lambda *_: threading.Event().wait()
from paceline.api.cli.main import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_during_the_load_ends_at_once(tmp_path: Path, number: int) -> None:
    """With a load that never ends the server still ends, with 0, and never opened its port."""
    (tmp_path / "config.json").write_text("{}")
    words = [sys.executable, "-c", _NEVER_LOADS, "serve", "--port", "0", "--model", str(tmp_path)]
    process = subprocess.Popen(
        [*words, "--log-format", "json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    with process:
        try:
            assert process.stderr is not None
            while json.loads(process.stderr.readline())["event"] != "owner.loading":
                pass
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert out == ""
    events = [json.loads(line)["event"] for line in err.splitlines()]
    assert events == ["server.signal", "server.stopped"]


def test_a_server_outlives_the_readers_of_its_output(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Standard output closed from the start and a log whose reader goes: it serves and counts."""
    reads, writes = os.pipe()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "paceline.api.cli.main", "serve", "--port", str(port)]
    words += ["--model", str(tiny["plain"])]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" >&-', "sh", *words, "--log-format", "json"], stderr=writes
    )
    os.close(writes)
    try:
        with os.fdopen(reads) as reader:
            while "owner.started" not in reader.readline():
                pass
        server = Server(process, f"http://127.0.0.1:{port}", tmp_path)  # type: ignore[arg-type]
        _wait_until(lambda: _is_up(port))
        for _ in range(3):
            with closing(_post(server, {**_LONG, "max_tokens": 3})) as connection:
                answer = connection.getresponse()
                assert answer.status == 200
                answer.read()
        assert _health(server)["log_lines_dropped"] > 0
        assert server.stop(signal.SIGTERM) == 0
    finally:
        process.kill()
        process.wait()


def _is_up(port: int) -> bool:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            return True
    threading.Event().wait(0.05)
    return False


_BREAKS = """
from paceline.lanes import ar
step, seen = ar.ArLane.step, []
def broken(self, rows, depth=0):
    if rows[0].context.budget == 4000:
        seen.append(1)
        if len(seen) > 3:
            raise RuntimeError("device lost")
    return step(self, rows, depth)
ar.ArLane.step = broken
from paceline.runtime import blas
from paceline.api.cli.main import main
main()
"""


def test_a_broken_device_tells_its_clients_and_exits_with_3(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    """A forward pass that raises: the stream gets an error event, the process leaves with 3."""
    program = "from paceline.runtime import blas\nblas.preload()\n" + _BREAKS
    with ExitStack() as stack:
        model = ("--model", str(tiny["plain"]))
        server = stack.enter_context(running(tmp_path / "log", *model, program=program))
        text = _stream(stack, server, {**_LONG, "stream": True}).read()
        assert b'"code":"model_failed"' in text
        assert b"[DONE]" not in text
        assert server.process.wait(30) == 3
    assert "device lost" in server.log.read_text()


def test_the_settings_file_is_written_checked_and_shown(tmp_path: Path) -> None:
    """config set, get, show and unset work on the file and refuse what the server would."""
    file = str(tmp_path / "made" / "config.toml")
    assert _paceline("config", "set", "port", "9001", PACELINE_CONFIG=file).returncode == 0
    assert _paceline("config", "get", "port", PACELINE_CONFIG=file).stdout == "9001\n"
    shown = json.loads(_paceline("config", "show", "--json", PACELINE_CONFIG=file).stdout)
    assert shown["port"] == {"value": 9001, "from": f"file {file}"}
    bad = _paceline("config", "set", "port", "high", PACELINE_CONFIG=file)
    assert bad.returncode == 2
    clash = _paceline("config", "set", "numerics", "balanced", PACELINE_CONFIG=file)
    assert clash.returncode == 2
    assert _paceline("config", "unset", "port", PACELINE_CONFIG=file).returncode == 0
    assert _paceline("config", "get", "port", PACELINE_CONFIG=file).stdout == "8000\n"
    assert _paceline("config", "path", PACELINE_CONFIG=file).stdout == f"{file}\n"


def test_health_models_and_doctor_answer(server: Server) -> None:
    """The small commands work against a running server and on this machine."""
    asked = ("health", "--port", str(server.port))
    assert "ok: SmolLM2-135M-Instruct (float32)" in _paceline(*asked).stdout
    assert _paceline("health", "--port", "1").returncode == 1
    models = json.loads(_paceline("models", "--json").stdout)
    assert models[0]["model"].startswith("starter")
    findings = {f["topic"]: f for f in json.loads(_paceline("doctor", "--json").stdout)}
    assert {"blas", "device", "cache", "starter model", "versions"} <= set(findings)
    assert _paceline("--version").stdout.startswith("paceline, version 0.1.0")


def _wait_until(holds: Any) -> None:
    """Ask until it holds; each question is a round trip, and there is an end to them."""
    for _ in range(2000):
        if holds():
            return
    raise AssertionError("it never held")
