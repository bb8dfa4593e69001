"""A real app over a real house on fake lanes, reached without sockets, in virtual time."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from quart.typing import TestClientProtocol
from tests.fakes import FakeText, Nature, Stand, stand, threads_hold_time
from werkzeug.datastructures import Headers

from paceline.api.app import make_app
from paceline.lanes.base import Row
from paceline.runtime.settings import ServerArgs


async def read_stream(client: TestClientProtocol, path: str, body: dict[str, Any]) -> bytes:
    """Post a body and read the answer as it comes; the client's own buffer holds ten writes."""
    headers = {"Host": "localhost", "Content-Type": "application/json"}
    data = b""
    request: Any = client.request(path, method="POST", headers=Headers(headers))
    async with request as connection:
        await connection.send(json.dumps(body).encode())
        await connection.send_complete()
        while part := await connection.receive():
            data += part
    assert connection.headers["content-type"] == "text/event-stream"
    return data


def named_events(raw: bytes) -> list[Any]:
    """Return the events of a stream in which each carries its type as its name."""
    found = []
    for block in raw.decode().strip().split("\n\n"):
        name, data = block.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@pytest.fixture(autouse=True)
def _virtual_time_waits_for_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep a virtual clock from jumping past every deadline while a thread works in real time."""
    threads_hold_time(monkeypatch)


Serving = Callable[..., AbstractAsyncContextManager[tuple[TestClientProtocol, Stand]]]


@pytest.fixture
def serving() -> Serving:
    """Return a context manager that serves fakes: `async with serving(...) as (client, place)`."""

    @asynccontextmanager
    async def open_app(
        script: Callable[[Row], int] | None = None,
        context: int = 8192,
        nature: Nature | None = None,
        text: FakeText | None = None,
        **settings: Any,
    ) -> AsyncIterator[tuple[TestClientProtocol, Stand]]:
        async with stand(ServerArgs(**settings), script, context, nature, text=text) as place:
            yield make_app(place.house).test_client(), place

    return open_app
