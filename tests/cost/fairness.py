"""cooperative against serial and ar_batch: eight requests of mixed length and one long prompt.

    python -m tests.cost.fairness [--long 4000]

Real servers. Seven chats of different lengths stream; when all decode, a prompt of `--long`
tokens comes, and a second later a short chat. Printed are tokens a second of each chat while the
long prompt is read and at least four of them decode, the longest gap between two arrivals, and
when the short one's first token came.
"""

import argparse
import json
import tempfile
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

from tests.e2e.conftest import running

BUDGETS = (400, 380, 360, 340, 320, 300, 280)
WORDS = (2, 40, 10, 80, 4, 20, 60)


class Chat(threading.Thread):
    """One streamed chat and when its text came."""

    def __init__(self, url: str, words: int, budget: int, seed: int) -> None:
        super().__init__()
        self._url = url
        self._body = {
            "messages": [{"role": "user", "content": "Tell a story. " + "river " * words}],
            "max_tokens": budget,
            "ignore_eos": True,
            "seed": seed,
            "stream": True,
            "logprobs": True,  # so that every chunk says how many tokens it holds
            "stream_options": {"include_usage": True},
        }
        self.sent = 0.0
        self.times: list[float] = []
        self.told: dict[str, Any] = {}

    def run(self) -> None:
        request = Request(
            f"{self._url}/v1/chat/completions",
            json.dumps(self._body).encode(),
            {"Content-Type": "application/json"},
        )
        self.sent = time.perf_counter()
        with urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                chunk = json.loads(line[6:])
                if chunk.get("choices") and (logprobs := chunk["choices"][0].get("logprobs")):
                    self.times += [time.perf_counter()] * len(logprobs["content"])
                self.told = chunk.get("usage") or self.told


def serve(mode: str, long: int, flags: tuple[str, ...]) -> None:
    """Run the load through one mode and print what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        with running(log, "--scheduler-mode", mode, "--log-level", "warning", *flags) as server:
            chats = [
                Chat(server.url, words, budget, i)
                for i, (words, budget) in enumerate(zip(WORDS, BUDGETS, strict=True))
            ]
            for chat in chats:
                chat.start()
            while mode != "serial" and not all(chat.times for chat in chats):
                time.sleep(0.05)
            reader = Chat(server.url, long - 50, 8, 90)
            reader.start()
            time.sleep(1)
            short = Chat(server.url, 1, 16, 91)
            short.start()
            for chat in (*chats, reader, short):
                chat.join()
    begin, end = reader.sent, reader.times[0]
    line = f"{mode}: short first token {short.times[0] - short.sent:.2f} s, "
    line += f"long ({reader.told.get('prompt_tokens')} tokens) {end - begin:.2f} s"
    gaps = [max(b - a for a, b in pairwise(chat.times)) for chat in chats]
    line += f", longest gap of a chat {max(gaps):.2f} s"
    if mode != "serial":
        until = min(end, *(chat.times[-1] for chat in chats))
        rates = [sum(begin < at <= until for at in c.times) / (until - begin) for c in chats]
        line += (
            f", tokens/s of the seven for {until - begin:.1f} s beside the long prompt "
            f"{min(rates):.2f} to {max(rates):.2f} (spread {max(rates) / min(rates) - 1:.1%})"
        )
    print(line, flush=True)


def main() -> None:
    """Run all three modes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--long", type=int, default=4000)
    parser.add_argument("--modes", default="cooperative,serial,ar_batch")
    given = parser.parse_args()
    for mode in given.modes.split(","):
        flags = ("--max-active-requests", "9") if mode == "cooperative" else ()
        serve(mode, given.long, flags)


if __name__ == "__main__":
    main()
