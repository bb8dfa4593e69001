"""Who may talk to this server: host, origin, content type and key, before any body is read."""

import hashlib
import hmac
import re
from typing import Final
from urllib.parse import urlsplit

from quart import Request, Response

from ..runtime.settings import LOOPBACK, ServerArgs
from .problems import problem

_HOST: Final = re.compile(r"(\[[0-9a-fA-F:]+\]|[^:\[\]@/]+)(?::\d+)?")
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})
_OPEN_PATHS: Final = frozenset({"/", "/health", "/metrics"})
_METHODS: Final = "GET, HEAD, POST, DELETE, OPTIONS"
_PREFLIGHT_SECONDS: Final = "600"
_EXPOSED: Final = "x-request-id, request-id, retry-after"


class Guard:
    """Checks every request; a browser page of another site gets nothing by luck."""

    def __init__(self, args: ServerArgs) -> None:
        self._keys = [hashlib.sha256(key.encode()).digest() for key in args.api_key]
        self._origins = frozenset(origin.rstrip("/").lower() for origin in args.cors_origins)
        # With a key required, a rebound name gains nothing; without one it must be ours.
        self._check_host = args.host in LOOPBACK
        self._hosts = _LOCAL_NAMES | {name.lower() for name in args.allowed_hosts}

    def check(self, request: Request) -> Response | None:
        """Return the refusal, or None to go on."""
        if self._check_host and self._host(request) not in self._hosts:
            return problem(421, "this Host is not served here", code="misdirected_request")
        origin = request.headers.get("Origin")
        if origin is not None and not self._allows(origin):
            return problem(
                403,
                f"origin {origin!r} is not allowed; add it to cors_origins",
                code="origin_not_allowed",
            )
        if request.method == "OPTIONS":
            return Response(b"", status=204)
        if self._keys and request.path not in _OPEN_PATHS and not self._knows(request):
            return problem(
                401,
                "a valid API key is required: Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        # A page can send text/plain anywhere without asking; JSON needs the preflight above.
        if request.method == "POST" and request.mimetype != "application/json":
            return problem(
                415, "Content-Type must be application/json", code="unsupported_media_type"
            )
        return None

    def dress(self, request: Request, response: Response) -> Response:
        """Add what lets an allowed page read the answer."""
        origin = request.headers.get("Origin")
        if origin is not None and self._allows(origin):
            asked = request.headers.get("Access-Control-Request-Headers")
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Allow-Methods"] = _METHODS
            response.headers["Access-Control-Allow-Headers"] = (
                asked or "authorization, content-type"
            )
            response.headers["Access-Control-Expose-Headers"] = _EXPOSED
            response.headers["Access-Control-Max-Age"] = _PREFLIGHT_SECONDS
            response.headers.add("Vary", "Origin")
        return response

    def _host(self, request: Request) -> str:
        match = _HOST.fullmatch(request.headers.get("Host", ""))
        return match.group(1).lower() if match else ""

    def _allows(self, origin: str) -> bool:
        if "*" in self._origins or origin.rstrip("/").lower() in self._origins:
            return True
        try:
            name = urlsplit(origin).hostname
        except ValueError:
            return False
        return name in LOOPBACK

    def _knows(self, request: Request) -> bool:
        """Compare digests of bytes, all of them, so that time tells nothing."""
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip() if scheme.lower() == "bearer" else ""
        given = given or request.headers.get("X-Api-Key", "")
        digest = hashlib.sha256(given.encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        return any(matches)
