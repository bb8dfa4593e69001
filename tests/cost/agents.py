"""Eight agents' conversations, side by side: what the prefix bank saves of their prompts.

    python -m tests.cost.agents FOLDER [--turns 4] [--servers "bank,no bank"]

FOLDER holds first requests as agents send them (JSON files with a `body`). Every agent asks, gets
an answer, and asks again with all that was said before; tools stand in the system message as
text, so every server reads the same prompt. Servers take turns within one run.
"""

import json
import statistics
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
from tests.e2e.conftest import running

from paceline.api.cli.bench_targets import spawn

_AGENTS = (
    "opencode-chat_completions-1",
    "cline-tool-chat_completions-1",
    "sgpt-text-chat_completions-1",
    "cn-tool-chat_completions-1",
    "pi-tool-chat_completions-1",
    "mini-tool-chat_completions-1",
    "smol-tool-chat_completions-1",
    "aider-text-chat_completions-1",
)
_SERVERS = ("bank", "no bank", "mlx_lm.server")
_TOKENS = 16


class Turn(NamedTuple):
    """One turn of one agent."""

    number: int
    prompt: int
    cached: int
    first_s: float


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--turns", default=4)
@click.option("--servers", default=",".join(_SERVERS))
def main(folder: Path, turns: int, servers: str) -> None:
    starts = [_start(json.loads((folder / f"{name}.json").read_text())) for name in _AGENTS]
    for name in servers.split(","):
        began = time.monotonic()
        with _server(name) as (url, model):
            told = _all_agents(url, model, starts, turns)
        _print(name, told, turns, time.monotonic() - began)


def _start(recorded: dict[str, Any]) -> list[dict[str, str]]:
    """Return a first request's messages as plain text, its tools in front of them."""
    body = recorded["body"]
    tools = "\n".join(json.dumps(tool) for tool in body.get("tools") or [])
    messages = [{"role": m["role"], "content": _text(m["content"])} for m in body["messages"]]
    system = "\n\n".join([m["content"] for m in messages if m["role"] == "system"] + [tools])
    rest = [message for message in messages if message["role"] != "system"]
    return [{"role": "system", "content": system}, *rest]


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(part.get("text", "") for part in content or [])


@contextmanager
def _server(name: str) -> Iterator[tuple[str, str]]:
    if name == "mlx_lm.server":
        with spawn("mlx-lm", "starter") as target:
            yield f"{target.url}/chat/completions", target.model
        return
    flags = ["--scheduler-mode", "mtp_batch"]
    flags += ["--prefix-cache-bytes", "0"] if name == "no bank" else []
    with tempfile.TemporaryDirectory() as home, running(Path(home) / "log", *flags) as server:
        yield f"{server.url}/v1/chat/completions", "m"


def _all_agents(
    url: str, model: str, starts: list[list[dict[str, str]]], turns: int
) -> list[list[Turn]]:
    told: list[list[Turn]] = [[] for _ in starts]

    def live(at: int) -> None:
        messages = list(starts[at])
        for number in range(1, turns + 1):
            turn, answer = _ask(url, model, messages, number)
            told[at].append(turn)
            messages += [
                {"role": "assistant", "content": answer},
                {"role": "user", "content": f"Step {number} is done: 3 files changed. Go on."},
            ]

    threads = [threading.Thread(target=live, args=(at,)) for at in range(len(starts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def _ask(url: str, model: str, messages: list[dict[str, str]], number: int) -> tuple[Turn, str]:
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": _TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    began, first, answer = time.monotonic(), 0.0, ""
    usage: dict[str, Any] = {}
    with urllib.request.urlopen(request, timeout=1800) as stream:
        for line in stream:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = first or time.monotonic() - began
                    answer += piece
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return Turn(number, usage["prompt_tokens"], cached, first), answer


def _print(name: str, told: list[list[Turn]], turns: int, seconds: float) -> None:
    print(f"{name}: {seconds:.0f} s in all")
    for number in range(1, turns + 1):
        these = [turn for agent in told for turn in agent if turn.number == number]
        prompt, cached = sum(t.prompt for t in these), sum(t.cached for t in these)
        firsts = sorted(turn.first_s for turn in these)
        print(
            f"  turn {number}: {prompt} prompt tokens, {100 * cached / prompt:.0f} % cached, first "
            f"token median {statistics.median(firsts):.2f} s, worst {firsts[-1]:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
