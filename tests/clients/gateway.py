"""A gateway between a client and the server: it records, and it makes a call certain.

A model of 135M parameters calls no tool of its own accord. So where a request offers the tool of
a round trip, the gateway asks for it by name and narrows its schema to the arguments that the
test wants; what comes back is a call that the server's grammar enforced, in a real stream.
"""

import http.client
import json
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

_TALK = "That is all there is to it."  # an answer that is no call ends by itself
_WORDS = 24  # tokens of one where no form can be asked for
_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "host"}
_TIMEOUT = 900


class Wanted(NamedTuple):
    """The call of a round trip."""

    name: str
    arguments: dict[str, Any]

    @property
    def schema(self) -> dict[str, Any]:
        """What lets these arguments through and no others."""
        return {
            "type": "object",
            "properties": {key: {"const": value} for key, value in self.arguments.items()},
            "required": list(self.arguments),
            "additionalProperties": False,
        }


class Exchange(NamedTuple):
    """One request as the client sent it, and what it got."""

    path: str
    body: Any
    status: int
    answer: bytes
    forced: bool


class Gateway:
    """Runs as long as its `with` block; `url` is what a client is given."""

    def __init__(self, target: str, wanted: Wanted | None) -> None:
        host, _, port = target.removeprefix("http://").partition(":")
        self.target = (host, int(port))
        self.wanted = wanted
        self.seen: list[Exchange] = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                gateway.relay(self)

            do_GET = do_HEAD = do_DELETE = do_OPTIONS = do_POST

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Gateway":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def relay(self, handler: BaseHTTPRequestHandler) -> None:
        """Pass one request on, narrowed where a call is wanted, and its answer back."""
        raw = _read_body(handler)
        body: Any = None
        with suppress(ValueError):
            body = json.loads(raw) if raw else None
        sent, forced = narrowed(handler.path, body, self.wanted)
        data = raw if sent is None else json.dumps(sent).encode()
        connection = http.client.HTTPConnection(*self.target, timeout=_TIMEOUT)
        headers = {k: v for k, v in handler.headers.items() if k.lower() not in _HOP}
        headers.pop("Accept-Encoding", None)
        connection.request(handler.command, handler.path, data or None, headers)
        reply = connection.getresponse()
        answer = _pass_back(handler, reply)
        self.seen.append(Exchange(handler.path, body, reply.status, answer, forced))
        connection.close()


def narrowed(path: str, body: Any, wanted: Wanted | None) -> tuple[Any, bool]:
    """Return what to send instead of a body, and whether a call is forced by it."""
    if not isinstance(body, dict):
        return None, False
    kinds: dict[str, Callable[[dict[str, Any], Wanted], bool]] = {
        "/chat/completions": _chat,
        "/responses": _responses,
        "/messages": _messages,
    }
    body = json.loads(json.dumps(body))
    kind = next((k for end, k in kinds.items() if path.split("?")[0].endswith(end)), None)
    forced = kind is not None and wanted is not None and kind(body, wanted)
    if kind is not None and not forced:
        _shorten(body, kind is _messages)
    return body, forced


def _shorten(body: dict[str, Any], anthropic: bool) -> None:
    """Let an answer be talk, and short: some agents give up on one that its budget cut."""
    if body.get("tools"):
        body["tool_choice"] = {"type": "none"} if anthropic else "none"
    if anthropic:
        body["max_tokens"] = min(_WORDS, body.get("max_tokens", _WORDS))
    else:
        body["guided_choice"] = [_TALK]
        body.pop("response_format", None)


def _chat(body: dict[str, Any], wanted: Wanted) -> bool:
    tools = [t for t in body.get("tools") or [] if t["function"]["name"] == wanted.name]
    if not tools:
        return False
    tools[0]["function"]["parameters"] = wanted.schema
    body["tools"] = tools
    if any(message["role"] == "tool" for message in body["messages"]):
        return False
    body["tool_choice"] = {"type": "function", "function": {"name": wanted.name}}
    return True


def _responses(body: dict[str, Any], wanted: Wanted) -> bool:
    tools = [t for t in body.get("tools") or [] if t.get("name") == wanted.name]
    if not tools:
        return False
    tools[0]["parameters"] = wanted.schema
    body["tools"] = tools
    given = body["input"]
    if not isinstance(given, str) and any(i.get("type") == "function_call_output" for i in given):
        return False
    body["tool_choice"] = {"type": "function", "name": wanted.name}
    return True


def _messages(body: dict[str, Any], wanted: Wanted) -> bool:
    tools = [t for t in body.get("tools") or [] if t["name"] == wanted.name]
    if not tools:
        return False
    tools[0]["input_schema"] = wanted.schema
    body["tools"] = tools
    if '"tool_result"' in json.dumps(body["messages"]):
        return False
    body["tool_choice"] = {"type": "tool", "name": wanted.name}
    return True


def _read_body(handler: BaseHTTPRequestHandler) -> bytes:
    if "chunked" in handler.headers.get("Transfer-Encoding", "").lower():
        parts = []
        while size := int(handler.rfile.readline().split(b";")[0], 16):
            parts.append(handler.rfile.read(size))
            handler.rfile.readline()
        handler.rfile.readline()
        return b"".join(parts)
    return handler.rfile.read(int(handler.headers.get("Content-Length") or 0))


def _pass_back(handler: BaseHTTPRequestHandler, reply: http.client.HTTPResponse) -> bytes:
    handler.send_response(reply.status)
    for name, value in reply.getheaders():
        if name.lower() not in _HOP:
            handler.send_header(name, value)
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    parts = []
    with suppress(BrokenPipeError, ConnectionResetError):
        while handler.command != "HEAD" and (part := reply.read1(65_536)):
            parts.append(part)
            handler.wfile.write(b"%x\r\n%s\r\n" % (len(part), part))
            handler.wfile.flush()
        if handler.command != "HEAD":
            handler.wfile.write(b"0\r\n\r\n")
    return b"".join(parts)
