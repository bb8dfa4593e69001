"""Errors to status and body; the only file that knows HTTP codes."""

import re
import secrets
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from quart import Request, Response
from werkzeug.exceptions import HTTPException

from ..actors.request import Broken
from ..runtime.errors import BusyError, CallerError, OwnerDied, UnknownThing
from ..runtime.log import logger
from .anthropic.errors import error_reply
from .fields import Refused, check_fields
from .offload import INLINE_BYTES, PROMPTS, Queue, at_length
from .replies import ErrorBody, ErrorReply

_ANTHROPIC_PATH: Final = "/v1/messages"
_OPENAI_PATHS: Final = ("/v1/chat", "/v1/completions", "/v1/responses")
VERSION_HEADER: Final = "anthropic-version"
_LONGEST_ERROR: Final = 320  # characters; a longer one repeats what the caller sent
_KEPT_ERROR: Final = 150
_ENCODER: Final = msgspec.json.Encoder()
_JSON: Final = msgspec.json.Decoder()
_PATH: Final = re.compile(r"^(?P<why>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING: Final = re.compile(r"required field `(?P<field>[^`]+)`")

# What HTTP's own errors say; the web framework's words are for somebody at a browser.
_SAID: Final = {
    400: "the request is not valid HTTP",
    404: "there is no such route; docs/api.md lists them",
    405: "the route does not take this method; see the Allow header",
    408: "the body did not arrive in time; send it at once",
    411: "the request has no Content-Length",
    413: "the body is larger than this server takes (body_limit_mb)",
    414: "the path is too long",
    431: "the request's headers are too large",
    500: "the server failed on this request",
    505: "this server speaks HTTP/1.1 and no other version",
}

_BROKEN_STATUS: Final = {
    "overloaded": 503,
    "model_failed": 503,
    "server_shutdown": 503,
    "deadline": 504,
    "row_failed": 500,
    "form_failed": 400,
    "internal_error": 500,
    "client_stall": 499,
    "client_disconnect": 499,
}


def decode(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Decode a request body.

    Raises:
        CallerError: Naming the field that is wrong, where the decoder can tell.
    """
    try:
        return msgspec.convert(_known(decoder, body), decoder.type)
    except msgspec.ValidationError as error:
        raise explained(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallerError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise CallerError("the body is nested too deeply") from None


async def decoded(decoder: msgspec.json.Decoder[Any], body: bytes, queue: Queue = PROMPTS) -> Any:
    """Decode a request body, a long one off the event loop; see `decode`."""
    return await at_length(lambda: decode(decoder, body), len(body) > INLINE_BYTES, queue)


def _known(decoder: msgspec.json.Decoder[Any], body: bytes) -> Any:
    """Return a body as plain JSON, with no field in it that its route refuses by name."""
    try:
        given = _JSON.decode(body)
    except msgspec.ValidationError:
        decoder.decode(body)  # which says where the number is that is out of range
        raise CallerError("a number in the body is out of range") from None
    if (route := getattr(decoder.type, "route", None)) is not None:
        check_fields(route, given)
    return given


def reply(status: int, body: Any, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return encoded_reply(status, encoded(body), headers)


def encoded(body: Any) -> bytes:
    """Return a body's JSON."""
    return _ENCODER.encode(body)


def encoded_reply(status: int, body: bytes, headers: dict[str, str] | None = None) -> Response:
    """Return an answer whose JSON is made."""
    return Response(body, status=status, headers=headers, content_type="application/json")


def problem(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
    details: dict[str, str] | None = None,
) -> Response:
    """Return an error, in OpenAI's shape as long as nobody asks for another."""
    response = reply(status, ErrorReply(error_body(status, message, param, code)), headers)
    response.problem = message, details  # type: ignore[attr-defined]  # for `in_words_of`
    return response


def speaks_anthropic(request: Request) -> bool:
    """Say whether a request's client reads Anthropic's shapes."""
    return is_for_anthropic(request.path, VERSION_HEADER in request.headers)


def is_for_anthropic(path: str, says_so: bool) -> bool:
    """Say whether what is answered on a path has Anthropic's shapes.

    Args:
        says_so: The request has the header that Anthropic's clients send.
    """
    return path.startswith(_ANTHROPIC_PATH) or (says_so and not path.startswith(_OPENAI_PATHS))


def in_words_of(request: Request, response: Response) -> Response:
    """Return a response as its request's client expects it: with its id, errors in its shape."""
    request_id = response.headers.setdefault("x-request-id", new_request_id())
    if speaks_anthropic(request):
        response.headers["request-id"] = request_id
        message, details = getattr(response, "problem", (None, None))
        if message is not None:
            error = wire_error(response.status_code, message, request_id, True, details)
            response.set_data(_ENCODER.encode(error))
    return response


def new_request_id() -> str:
    """Return an id for a request; it names its rows, its logs and its answer."""
    return f"req-{secrets.token_hex(12)}"


def wire_error(
    status: int,
    message: str,
    request_id: str,
    anthropic: bool,
    details: dict[str, str] | None = None,
) -> msgspec.Struct:
    """Return the body of an error in one dialect or the other."""
    if anthropic:
        return error_reply(status, shortened(message), request_id, details)
    return ErrorReply(error_body(status, message))


def said_of_http(status: int) -> str:
    """Return what one of HTTP's own errors says."""
    return _SAID.get(status, _SAID[400])


def shortened(text: str) -> str:
    """Return an error's text without the middle of what a caller sent at length."""
    if len(text) <= _LONGEST_ERROR:
        return text
    return f"{text[:_KEPT_ERROR]} ... {text[-_KEPT_ERROR // 3 :]}"


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> ErrorBody:
    """Return the inner object of an error."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorBody(shortened(message), kind, param and shortened(param), code)


def broken_body(broken: Broken) -> ErrorBody:
    """Return the error object for a request that ended badly."""
    return error_body(broken_status(broken), broken.message, None, broken.code)


def broken_status(broken: Broken) -> int:
    """Return the status for a request that ended badly before anything was sent."""
    return _BROKEN_STATUS.get(broken.code, 500)


def from_exception(error: Exception) -> Response:
    """Answer whatever a handler raised."""
    match error:
        case Refused():
            details = error.details
            return problem(400, error.message, param=error.param, code=None, details=details)
        case UnknownThing():
            return problem(404, error.message, param=error.param, code=error.code)
        case CallerError():
            return problem(400, error.message, param=error.param, code=error.code)
        case BusyError():
            headers = {"Retry-After": str(error.retry_after_s)}
            return problem(503, str(error), code="overloaded", headers=headers)
        case RecursionError():
            return problem(400, "the body is nested too deeply")
        case OwnerDied():
            return problem(503, str(error), code="model_failed")
        case HTTPException():
            status = error.code or 500
            codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
            allow = (
                {"Allow": ", ".join(m)} if (m := getattr(error, "valid_methods", None)) else None
            )
            text = _SAID.get(status) or error.description or error.name
            return problem(status, text, code=codes.get(status), headers=allow)
        case _:
            logger().error("http.crashed", error=repr(error), exc_info=error)
            return problem(500, "the server failed on this request", code="internal_error")


def explained(error: msgspec.ValidationError, where: str = "") -> CallerError:
    """Return a decoder's error as the caller's, naming the field that is wrong.

    Args:
        where: The path of what was decoded, when it is a part of a body.
    """
    match = _PATH.match(str(error))
    assert match is not None
    why, path = match["why"], match["path"] or ""
    if missing := _MISSING.search(why):
        path = f"{path}.{missing['field']}".lstrip(".")
    joint = "." if where and path and not path.startswith("[") else ""
    path = f"{where}{joint}{path}"
    return CallerError(f"{path}: {why}" if path else why, param=path or None)


def renamed(error: CallerError, names: Mapping[str, str]) -> CallerError:
    """Return an error about a field under the name it has in the caller's own body."""
    if error.param is None:
        return error
    own = error.param
    for name, theirs in names.items():
        # `tools[].function.parameters` stands for any place in the list.
        pattern = re.escape(name).replace(re.escape("[]"), r"\[(\d+)\]")
        if found := re.fullmatch(pattern, own):
            own = theirs.replace("[]", f"[{found[1]}]") if found.groups() else theirs
            break
    error.message = error.message.replace(error.param, own)
    error.param = own
    return error
