"""One round of load: concurrent streamed chats over plain sockets, timed token by token."""

import http.client
import json
import threading
import time
from typing import Final
from urllib.parse import urlsplit

import msgspec

from .bench_targets import Target

_SUBJECTS: Final = ("the sea", "a mountain", "bread", "clocks", "rivers", "winter", "a fox", "maps")
_TIMEOUT_SECONDS: Final = 900.0


class Round(msgspec.Struct):
    """What came of one round."""

    tokens_per_s: float = 0.0
    first_token_s: list[float] = []
    gap_s: list[float] = []
    request_s: list[float] = []
    errors: int = 0


class _Stream(msgspec.Struct):
    """One request's own times, written by its thread only."""

    tokens: int = 0
    arrivals: list[float] = []
    ended: float = 0.0
    failed: bool = False


def run_round(
    target: Target, concurrency: int, tokens: int, temperature: float, salt: int
) -> Round:
    """Send `concurrency` requests at once and wait for all of them.

    Args:
        salt: Goes into the prompts, so that no server answers from what it has seen before.
    """
    streams = [_Stream() for _ in range(concurrency)]
    began = time.perf_counter()
    threads = [
        threading.Thread(
            target=_run, args=(target, _body(target, i, tokens, temperature, salt), stream)
        )
        for i, stream in enumerate(streams)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    good = [stream for stream in streams if not stream.failed and stream.arrivals]
    if not good:
        return Round(errors=len(streams))
    seconds = max(stream.ended for stream in good) - began
    return Round(
        sum(stream.tokens for stream in good) / seconds,
        [stream.arrivals[0] - began for stream in good],
        [b - a for s in good for a, b in zip(s.arrivals, s.arrivals[1:], strict=False)],
        [stream.ended - began for stream in good],
        len(streams) - len(good),
    )


def _body(target: Target, index: int, tokens: int, temperature: float, salt: int) -> bytes:
    subject = _SUBJECTS[index % len(_SUBJECTS)]
    content = f"Note {salt + 2}-{index}: write a long story about {subject}, with many details."
    body = {
        "model": target.model,
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }
    return json.dumps(body).encode()


def _run(target: Target, body: bytes, stream: _Stream) -> None:
    url = urlsplit(target.url)
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=_TIMEOUT_SECONDS)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"{url.path}/chat/completions", body, headers)
        answer = connection.getresponse()
        stream.failed = answer.status != 200
        for line in answer:
            if line.startswith(b"data: {"):
                _take(json.loads(line[6:]), stream)
    except (OSError, http.client.HTTPException, ValueError):
        stream.failed = True
    finally:
        connection.close()
    stream.ended = time.perf_counter()


def _take(event: dict[str, object], stream: _Stream) -> None:
    """Note an event: text has an arrival time, usage says how many tokens there were."""
    now = time.perf_counter()
    if "error" in event:
        stream.failed = True
    choices = event.get("choices")
    if isinstance(choices, list) and choices and choices[0].get("delta", {}).get("content"):
        stream.arrivals.append(now)
    usage = event.get("usage")
    if isinstance(usage, dict):
        stream.tokens = int(usage["completion_tokens"])
