"""Draw what becomes of the same eight requests in every mode, from each server's own log.

    python -m tests.cost.timeline docs/pictures/modes.svg

Each mode is a real server with a JSON log. Eight requests come a quarter of a second apart: chats
of different lengths, one of them with a long prompt. Grey is waiting for a place, amber is up to
the first token, and blue is decoding, darker the more rows step together.
"""

import argparse
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen
from xml.sax.saxutils import escape

from tests.e2e.conftest import running

from paceline.runtime.modes import Mode

APART_S = 0.25
BUDGETS = (60, 20, 90, 12, 40, 24, 70, 16)
LONG = 2  # which request has the long prompt
LONG_WORDS = 900
WIDTH, LEFT, ROW, BAR, TITLE = 900, 40, 13, 10, 26
BLUES = ("#9ecae1", "#6baed6", "#4292c6", "#2171b5", "#084594")


class Line:
    """One request's times, in seconds since the first came, and who stepped with it when."""

    def __init__(self) -> None:
        self.received = self.admitted = self.first = self.finished = 0.0
        self.widths: list[tuple[float, int]] = []


def ask(url: str, number: int) -> None:
    """Send one of the eight requests, at its time."""
    time.sleep(number * APART_S)
    words = " ".join(f"item {i}" for i in range(LONG_WORDS // 2)) if number == LONG else ""
    body = {
        "messages": [{"role": "user", "content": f"Write about rivers. {words}"}],
        "max_tokens": BUDGETS[number],
        "ignore_eos": True,
        "seed": number,
        "user": str(number),
    }
    request = Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=300) as answer:
        answer.read()


def lines_of(events: list[dict[str, Any]]) -> list[Line]:
    """Read the requests of a log but for the first, in the order they were received."""
    lines: dict[str, Line] = {}
    came = [event["ts"] for event in events if event["event"] == "request.queued"]
    begin = datetime.fromisoformat(came[1]).timestamp()
    for event in events:
        at = datetime.fromisoformat(event["ts"]).timestamp()
        request = event.get("request_id", "")
        match event["event"]:
            case "request.queued":
                lines[request] = Line()
                lines[request].received = at - begin
            case "request.admitted":
                lines[request].admitted = at - begin
            case "request.first_token":
                lines[request].first = at - begin
            case "request.finished":
                lines[request].finished = at - begin
            case "cohort.sealed":
                for member in event["request_ids"]:
                    lines[member].widths.append((at - begin, event["real_width"]))
    return list(lines.values())[1:]


def serve(mode: Mode) -> list[Line]:
    """Run the eight requests through one mode."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.jsonl")
        flags = ("--scheduler-mode", mode.value, "--log-format", "json")
        with running(log, *flags) as server, ThreadPoolExecutor(len(BUDGETS)) as pool:
            ask(server.url, 0)  # so that what is only done once is done
            list(pool.map(lambda number: ask(server.url, number), range(len(BUDGETS))))
        events = [json.loads(line) for line in log.read_text().splitlines()]
    return lines_of(events)


def bars(line: Line, top: float, scale: float) -> list[str]:
    """Draw one request."""
    spans = [
        (line.received, line.admitted, "#d9d9d9"),
        (line.admitted, line.first, "#fdae6b"),
    ]
    changes = [(max(at, line.first), width) for at, width in line.widths]
    changes = changes or [(line.first, 1)]
    changes[0] = (line.first, changes[0][1])
    for (at, width), (until, _) in zip(changes, [*changes[1:], (line.finished, 0)], strict=True):
        spans.append((at, until, BLUES[min(width, 8) // 2]))
    return [
        f'<rect x="{LEFT + begin * scale:.1f}" y="{top:.1f}" '
        f'width="{max(0.0, end - begin) * scale:.1f}" height="{BAR}" fill="{colour}"/>'
        for begin, end, colour in spans
        if end > begin
    ]


def draw(found: dict[Mode, list[Line]]) -> str:
    """Return the picture of all modes on one scale of time."""
    longest = max(line.finished for lines in found.values() for line in lines)
    scale = (WIDTH - LEFT - 10) / longest
    out: list[str] = []
    top = 0.0
    for mode, lines in found.items():
        first = sum(line.first - line.received for line in lines) / len(lines)
        last = max(line.finished for line in lines)
        text = f"{mode.value}: mean wait for a first token {first:.1f} s, all done in {last:.1f} s"
        out.append(f'<text x="{LEFT}" y="{top + 17:.0f}">{escape(text)}</text>')
        top += TITLE
        for line in lines:
            out += bars(line, top, scale)
            top += ROW
    for second in range(0, int(longest) + 1, max(1, int(longest) // 10)):
        x = LEFT + second * scale
        out.append(f'<line x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{top:.0f}" stroke="#eee"/>')
        out.append(f'<text x="{x:.1f}" y="{top + 14:.0f}" fill="#666">{second} s</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top + 24:.0f}" '
        'font-family="sans-serif" font-size="12">'
        f'<rect width="{WIDTH}" height="{top + 24:.0f}" fill="white"/>' + "".join(out) + "</svg>\n"
    )


def main() -> None:
    """Draw every mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.write_text(draw({mode: serve(mode) for mode in Mode}), encoding="utf-8")


if __name__ == "__main__":
    main()
