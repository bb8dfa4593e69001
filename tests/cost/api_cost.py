"""CPU time of the path from owner to socket a token: real actors and HTTP, a device of air.

    python -m tests.cost.api_cost [--streams 64] [--steps-per-s 50] [--seconds 10]

A task publishes one turn with one token for every open row at a fixed pace; a client in another
process reads all streams. Printed is the server process's CPU time over the tokens it sent.
"""

import argparse
import json
import resource
import selectors
import socket
import sys
import time
from collections.abc import Callable

import trio
from tests.fakes import WORD_BASE, FakeText

from paceline.actors.house import House, Loaded, Served, keep_house
from paceline.actors.messages import Admit, Leave, OwnerMessage, Tokens, Turn
from paceline.api.server import serve_house
from paceline.runtime import log
from paceline.runtime.settings import ServerArgs
from paceline.runtime.thread import Pulse


class PacedDevice:
    """Publishes a token for every open row, `pace` times a second."""

    def __init__(self, pace: float) -> None:
        self._period = 1 / pace
        self._rows: dict[str, Admit] = {}
        self.tokens = 0

    def post(self, message: OwnerMessage) -> None:
        if isinstance(message, Admit):
            self._rows[message.lease.row] = message
        elif isinstance(message, Leave):
            self._rows.pop(message.lease.row, None)

    def pulse(self) -> Pulse:
        return Pulse()

    async def run(
        self,
        publish: Callable[[Turn], None],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        task_status.started()
        due = trio.current_time()
        while True:
            due += self._period
            await trio.sleep_until(due)
            rows = len(self._rows)
            messages = tuple(
                Tokens(row.lease, (WORD_BASE,), (), (), "ar-b8", 8, "cohort-1", None)
                for row in self._rows.values()
            )
            self.tokens += rows
            publish(
                Turn(
                    messages,
                    (),
                    rows,
                    "ar-b8",
                    0.0,
                    0,
                    (),
                    rows,
                    0,
                    0,
                    0.0,
                    active_rows=rows,
                    parked=frozenset(),
                    queue_depth=0,
                    state="decoding",
                )
            )


def read_streams(port: int, streams: int, seconds: float) -> None:
    """Open the streams and read what comes until the time is over; the client's process."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 8000}
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    selector = selectors.DefaultSelector()
    for _ in range(streams):
        connection = socket.create_connection(("127.0.0.1", port))
        connection.sendall(head.encode() + body)
        selector.register(connection, selectors.EVENT_READ)
    end = time.monotonic() + seconds + 4
    while time.monotonic() < end:
        for key, _ in selector.select(0.2):
            key.fileobj.recv(1 << 16)  # type: ignore[union-attr]


async def measure(streams: int, pace: float, seconds: float) -> None:
    """Serve, let the streams settle, and count CPU and tokens over the middle."""
    args = ServerArgs(port=0, max_queue=10_000, log_level="error")
    loaded = Loaded()
    loaded.served = Served("air", "air", "air", "cpu", "air", "none", 8192, 100_000, 1)
    loaded.text = FakeText()  # type: ignore[assignment]
    loaded.lanes = ()
    device = PacedDevice(pace)
    stop = trio.Event()
    async with keep_house(args, device, loaded) as house, trio.open_nursery() as nursery:

        def announce(url: str, _: House) -> None:
            nursery.start_soon(watch, int(url.rpartition(":")[2]))

        async def watch(port: int) -> None:
            command = [sys.executable, "-m", "tests.cost.api_cost", "--client", str(port)]
            command += ["--streams", str(streams), "--seconds", str(seconds)]
            nursery.start_soon(trio.run_process, command)
            await trio.sleep(2)
            before, sent, began = _cpu(), device.tokens, time.monotonic()
            await trio.sleep(seconds)
            spent, sent = _cpu() - before, device.tokens - sent
            rate = sent / (time.monotonic() - began)
            print(f"{streams} streams, {rate:.0f} tokens/s: {spent / sent * 1e6:.1f} us a token")
            stop.set()
            nursery.cancel_scope.cancel()

        await serve_house(house, stop, announce)


def _cpu() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    """Run the server side, or with --client the reading side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--steps-per-s", type=float, default=50)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--client", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.client is not None:
        read_streams(given.client, given.streams, given.seconds)
        return
    log.configure("error", "json")
    trio.run(measure, given.streams, given.steps_per_s, given.seconds)


if __name__ == "__main__":
    main()
