"""Speculation behind the whole server: what ran is in /health, and tokens are plain decoding's."""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from tests.e2e.conftest import Server, running
from tests.e2e.test_server import _health, _one_line, _paceline

pytestmark = pytest.mark.slow

_TOKENS = 16
_FLAGS = ("--scheduler-mode", "mtp_batch", "--batch-wait-ms", "1000", "--log-format", "json")


@pytest.fixture(scope="module")
def drafting(starter_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server in mode mtp_batch that waits for company, so that widths are settled."""
    log = tmp_path_factory.mktemp("drafting") / "log.jsonl"
    with running(log, *_FLAGS) as server:
        yield server


def _ask(server: Server, number: int, **more: Any) -> dict[str, Any]:
    """Send one request; what it asks for depends on its number alone."""
    body = {
        "messages": [{"role": "user", "content": f"Write {number + 2} lines about rain."}],
        "max_tokens": _TOKENS,
        "seed": number,
        "temperature": (0.0, 0.7, 1.0, 1.3)[number % 4],
        "top_p": (1.0, 0.9)[number % 2],
        "frequency_penalty": (0.0, 0.0, 0.5)[number % 3],
        **more,
    }
    request = Request(
        f"{server.url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=120) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _together(server: Server, count: int) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda number: _ask(server, number), range(count)))


@pytest.fixture(scope="module")
def plain(server: Server) -> Callable[[int], dict[str, Any]]:
    """What a server that never drafts answers to a numbered request, asked once each."""
    return lru_cache(lambda number: _ask(server, number))


@pytest.mark.parametrize(("count", "lane"), [(1, "b1"), (3, "b3"), (5, "b8"), (8, "b8")])
def test_health_proves_which_lane_carried_how_many(
    drafting: Server, plain: Callable[[int], dict[str, Any]], count: int, lane: str
) -> None:
    """1, 3, 5 and 8 concurrent requests: lane, width, histogram, acceptance; tokens of ar_batch."""
    before = _health(drafting)["scheduler"]["telemetry"]
    answers = _together(drafting, count)
    after = _health(drafting)["scheduler"]
    told = after["telemetry"]
    assert after["mode"] == "mtp_batch"
    installed = {lane["name"]: lane for lane in after["installed_lanes"]}
    assert set(installed) == {"mtp-b1", "mtp-b3", "mtp-b8"}
    assert installed["mtp-b8"]["acceptance"] == "coupled"
    if count > 1:
        grown = told["batch_histogram"].get(str(count), 0)
        assert grown > before["batch_histogram"].get(str(count), 0)
    wanted = {"event": "cohort.sealed", "lane": f"mtp-{lane}", "real_width": count}
    drafting.events(lambda events: any(wanted.items() <= e.items() for e in events))
    assert told["steps"] > before["steps"]
    assert told["drafted_tokens"] > before["drafted_tokens"]
    assert 0 < told["acceptance_by_depth"]["1"] <= 1
    assert told["mean_accepted"] > 0
    for number, answer in enumerate(answers):
        assert answer["choices"] == plain(number)["choices"]
        assert answer["paceline"]["mode"] == "mtp_batch"
        assert plain(number)["paceline"]["drafted_tokens"] == 0


def test_cohorts_log_their_acceptance(drafting: Server) -> None:
    """A dissolved cohort says what share of its drafts was accepted, and at which depths."""
    _ask(drafting, 0, max_tokens=40)
    events = drafting.events(lambda events: any(e.get("acceptance") is not None for e in events))
    over = [e for e in events if e["event"] == "cohort.dissolved" and e["depths"]]
    shares = [e["acceptance"] for e in over if e["acceptance"] is not None]
    assert all(0 <= share <= 1 for share in shares)
    assert all(e["acceptance"] is None for e in over if set(e["depths"]) == {"0"})
    assert all(sum(e["depths"].values()) == e["steps"] for e in over)


def test_mtp_batch_without_a_head_exits_with_3(tiny: dict[str, Path]) -> None:
    """No other mode runs in its place, and a depth that cannot be had is refused alike."""
    done = _paceline("serve", "--model", str(tiny["plain"]), "--scheduler-mode", "mtp_batch")
    assert done.returncode == 3
    assert "needs an MTP head" in _one_line(done)
    done = _paceline("serve", "--model", str(tiny["plain"]), "--speculative-depth", "2")
    assert done.returncode == 3
    assert "speculative_depth 2 needs an MTP head" in _one_line(done)


def test_serial_drafts_where_there_is_a_head_and_says_so(
    tiny: dict[str, Path], tmp_path: Path
) -> None:
    """mtp-b1 with a head, ar-b1 without one or with --no-mtp; the reason is in /health."""
    for model, flag, kind, why in (
        ("headed", "--mtp", "mtp-b1", "mtp.* of"),
        ("headed", "--no-mtp", "ar-b1", "none wanted"),
        ("plain", "--mtp", "ar-b1", "no mtp.* weights"),
    ):
        log = tmp_path / f"{model}{flag}"
        with running(log, "--model", str(tiny[model]), flag, "--log-format", "json") as server:
            _ask(server, 1)
            health = _health(server)
            assert health["scheduler"]["active_lane"] == kind
            assert why in health["model"]["head"]


def test_every_numerics_and_acceptance_serves(tiny: dict[str, Path], tmp_path: Path) -> None:
    """balanced and b1-exact with rejection: eight requests at once are answered in full."""
    for numerics in ("balanced", "b1-exact"):
        flags = (*_FLAGS, "--numerics", numerics, "--acceptance", "rejection")
        model = ("--model", str(tiny["headed"]), "--speculative-depth", "2")
        with running(tmp_path / numerics, *model, *flags) as server:
            answers = _together(server, 8)
            lanes = _health(server)["scheduler"]["installed_lanes"]
        assert [a["usage"]["completion_tokens"] for a in answers] == [_TOKENS] * 8
        assert {lane["numerics"] for lane in lanes[1:]} == {numerics}
        assert {lane["acceptance"] for lane in lanes} == {"rejection"}


def test_inspect_says_what_a_checkpoint_gets(tiny: dict[str, Path]) -> None:
    """With a head seven lanes install and are measured; without one three do, four say why."""
    done = _paceline("inspect", str(tiny["headed"]), "--thorough", "--tokens", "6", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    names = [f"{kind}-b{g}" for kind in ("ar", "mtp") for g in (1, 3, 8)]
    assert [lane["name"] for lane in found["lanes"]] == [*names, "hyper-b8"]
    assert all(lane["installs"] for lane in found["lanes"])
    assert [row["numerics"] for row in found["numerics"]] == ["throughput", "balanced", "b1-exact"]
    assert all(row["identical"] == row["requests"] == 8 for row in found["numerics"])
    assert [row["temperature"] for row in found["acceptance"]] == [0.0, 0.7, 1.0]
    assert found["row_bytes_per_token"] == 3 * 2 * 2 * 16 * 4  # layers, K and V, heads, size, bytes
    done = _paceline("inspect", str(tiny["plain"]), "--tokens", "6")
    assert done.returncode == 0, done.stderr
    assert "no mtp.* weights" in done.stdout.replace("\n", " ")
    assert "inspect" not in done.stdout
    assert _paceline("inspect", "/nowhere").returncode == 3


def test_inspect_is_quick_unless_asked_and_tells_each_stage(tiny: dict[str, Path]) -> None:
    """Stages go to standard error, one a line and in order; the result alone to the other."""
    done = _paceline("inspect", str(tiny["headed"]), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["effort"] == {"tokens": 8, "temperatures": [0.0, 1.0]}
    assert [row["temperature"] for row in found["acceptance"]] == [0.0, 1.0]
    assert [row["numerics"] for row in found["numerics"]] == ["throughput", "balanced", "b1-exact"]
    stages = ["loading", "(ar)", "(mtp)", "(hyper)", "temperature 0", "temperature 1"]
    stages += ["alone", "throughput", "balanced", "b1-exact", "--thorough"]
    lines = [line for line in done.stderr.splitlines() if line.startswith("paceline inspect:")]
    assert len(lines) == len(stages)
    assert all(stage in line for stage, line in zip(stages, lines, strict=True))


def test_hyper_serves_one_request_on_its_own_branches(
    starter_path: Path, plain: Callable[[int], dict[str, Any]], tmp_path: Path
) -> None:
    """Four at once are answered in turn with the tokens of ar_batch; receipts show branches."""
    flags = ("--scheduler-mode", "hyper", "--log-format", "json")
    with running(tmp_path / "log", *flags) as hyper:
        answers = _together(hyper, 4)
        health = _health(hyper)["scheduler"]
        sealed = [
            event
            for event in hyper.events(lambda events: any("real_width" in e for e in events))
            if event["event"] == "cohort.sealed"
        ]
    for number, answer in enumerate(answers):
        assert answer["choices"] == plain(number)["choices"]
    receipts = health["hyper"]["receipts"]
    assert max(receipt["branches"] for receipt in receipts) > 1
    assert sum(receipt["tokens"] for receipt in receipts) > len(receipts)
    assert health["telemetry"]["rows_peak"] == 1
    assert {event["real_width"] for event in sealed} == {1}
    lanes = {lane["name"]: lane for lane in health["installed_lanes"]}
    checks = {check["name"] for check in lanes["hyper-b8"]["receipt"]["checks"]}
    assert {"branches against B1", "branch isolation", "kept branch against B1"} <= checks


def test_a_trial_warns_at_start_and_serves(tiny: dict[str, Path], tmp_path: Path) -> None:
    """Each cohort policy answers eight requests, with the warning first in its log."""
    for trial in ("depth", "length", "fair-finish"):
        flags = ("--scheduler-mode", "mtp_cohort_experimental", "--cohort-policy", trial)
        model = ("--model", str(tiny["headed"]), "--log-format", "json")
        with running(tmp_path / trial, *model, *flags) as server:
            answers = _together(server, 8)
            warned = [e for e in server.events() if e["event"] == "mode.experimental"]
        assert [a["usage"]["completion_tokens"] for a in answers] == [_TOKENS] * 8
        assert [e["cohort_policy"] for e in warned] == [trial]


@pytest.mark.parametrize("mode", ["hyper", "mtp_cohort_experimental"])
def test_modes_that_must_draft_refuse_a_model_without_a_head(
    tiny: dict[str, Path], mode: str
) -> None:
    """Exit status 3 and one line."""
    done = _paceline("serve", "--model", str(tiny["plain"]), "--scheduler-mode", mode)
    assert done.returncode == 3
    assert "needs an MTP head" in _one_line(done)
