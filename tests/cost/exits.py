"""Start a server and end it at a random moment, many times, beside a core that is kept busy.

    python -m tests.cost.exits --mode ar_batch --times 50 [--model tiny]

Moments: loading (from the first handler on), idle, and with 1 and 3 open streams. Prints a table of
moments, exit statuses and the slowest exit, and ends with 1 when any status was not 0. `tiny` is a
model of random weights with a head, the starter's tokenizer and the same native threads, for a
machine on which the starter takes minutes to load.
"""

import argparse
import collections
import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from paceline.runtime import blas, shutdown

MOMENTS = ("loading", "idle", "1 stream", "3 streams")
DRAIN_S = 1.0
_UP = re.compile(r"at (http://\S+)/v1")


def main() -> None:
    """Run as many times as asked, the moments in turn, and print what came of it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="ar_batch")
    parser.add_argument("--model", default="starter", help="as for serve, or tiny")
    parser.add_argument("--times", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--moments", default=",".join(MOMENTS))
    parser.add_argument("--quiet-machine", action="store_true", help="no busy core beside it")
    args = parser.parse_args()
    chance = random.Random(args.seed)
    moments = args.moments.split(",")
    statuses: dict[str, collections.Counter[int]] = {m: collections.Counter() for m in moments}
    slowest = dict.fromkeys(moments, 0.0)
    load_s = 10.0
    with ExitStack() as stack:
        model = args.model
        if model == "tiny":
            model = _tiny(Path(stack.enter_context(tempfile.TemporaryDirectory())))
        if not args.quiet_machine:
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        for number in range(args.times):
            moment = moments[number % len(moments)]
            status, seconds, load_s = _once(args.mode, model, moment, chance, load_s)
            statuses[moment][status] += 1
            slowest[moment] = max(slowest[moment], seconds)
            print(f"{number + 1}: {moment}: {status} after {seconds:.2f} s", flush=True)
    print(f"\n{args.mode}, {args.model}\n{'moment':10} {'count':>5}  {'statuses':20} slowest exit")
    for moment in moments:
        seen = ", ".join(f"{status}: {n}" for status, n in sorted(statuses[moment].items()))
        print(f"{moment:10} {statuses[moment].total():5}  {seen:20} {slowest[moment]:.2f} s")
    shutdown.leave(int(any(status for seen in statuses.values() for status in seen)))


def _tiny(folder: Path) -> str:
    """Write a small checkpoint and return where."""
    blas.preload()
    from tests.lanes.test_heads import saved
    from tests.lanes.tiny import LLAMA, tensors_of, tiny_head, tiny_llama

    from paceline.runtime.model import find_model

    size = {"vocab_size": 49152, "max_position_embeddings": 8192}
    net = tiny_llama(**size)
    saved(folder, net, {**LLAMA, **size}, tensors_of(tiny_head(net)))
    for file in find_model("starter").glob("tokenizer*"):
        shutil.copy(file, folder)
    return str(folder)


def _once(
    mode: str, model: str, moment: str, chance: random.Random, load_s: float
) -> tuple[int, float, float]:
    """Return the exit status, how long the exit took, and how long a load takes as seen so far."""
    with tempfile.TemporaryDirectory() as place, ExitStack() as stack:
        log = Path(place, "log")
        with log.open("w") as err:
            process = stack.enter_context(
                subprocess.Popen(
                    [
                        *(sys.executable, "-m", "paceline.api.cli.main", "serve", "--port", "0"),
                        *("--model", model, "--scheduler-mode", mode, "--log-format", "json"),
                        *("--drain-timeout-s", str(DRAIN_S)),
                    ],
                    stdout=subprocess.PIPE,
                    stderr=err,
                    text=True,
                )
            )
        stack.callback(process.kill)
        began = time.monotonic()
        if moment == "loading":
            _until_armed(process.pid)
            time.sleep(chance.uniform(0, load_s))
        else:
            url = _url(process, log)
            load_s = time.monotonic() - began
            for stream in range({"idle": 0, "1 stream": 1, "3 streams": 3}[moment]):
                _open_stream(stack, url, stream)
            time.sleep(chance.uniform(0, 2))
        process.terminate()
        began = time.monotonic()
        status = process.wait(120)
        if status:
            print(log.read_text()[-2000:], file=sys.stderr)
        return status, time.monotonic() - began, load_s


def _until_armed(pid: int) -> None:
    """Wait until the process catches SIGTERM: before that no program of Python's can."""
    status = Path(f"/proc/{pid}/status")
    while status.exists():
        caught = re.search(r"SigCgt:\s*(\w+)", status.read_text())
        if caught and int(caught[1], 16) >> (15 - 1) & 1:
            return
        time.sleep(0.001)


def _url(process: "subprocess.Popen[str]", log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if match := _UP.search(line):
            return match[1]
    raise SystemExit(f"the server did not come up: {log.read_text()[-2000:]}")


def _open_stream(stack: ExitStack, url: str, number: int) -> None:
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": f"Count from {number} to one thousand."}],
        "max_tokens": 4000,
        "ignore_eos": True,
        "stream": True,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    answer = stack.enter_context(urllib.request.urlopen(request, timeout=300))
    answer.readline()
    threading.Thread(target=_drain, args=(answer,), daemon=True).start()


def _drain(answer: Any) -> None:
    try:
        while answer.readline():
            pass
    except (OSError, ValueError, AttributeError):
        pass


if __name__ == "__main__":
    main()
