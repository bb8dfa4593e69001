"""Errors to status and body; the only file that knows HTTP codes."""

import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec
from quart import Response
from werkzeug.exceptions import HTTPException

from ..actors.request import Broken
from ..runtime.errors import BusyError, CallerError, OwnerDied, UnknownThing
from ..runtime.log import logger
from .anthropic.errors import error_reply
from .replies import ErrorBody, ErrorReply

_ANTHROPIC_PATH: Final = "/v1/messages"
_ENCODER: Final = msgspec.json.Encoder()
_PATH: Final = re.compile(r"^(?P<why>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)
_MISSING: Final = re.compile(r"required field `(?P<field>[^`]+)`")

_BROKEN_STATUS: Final = {
    "overloaded": 503,
    "model_failed": 503,
    "server_shutdown": 503,
    "deadline": 504,
    "row_failed": 500,
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
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise explained(error) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CallerError(f"the body is not valid JSON: {error}") from None
    except RecursionError:
        raise CallerError("the body is nested too deeply") from None


def reply(status: int, body: Any, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON answer."""
    return Response(
        _ENCODER.encode(body), status=status, headers=headers, content_type="application/json"
    )


def problem(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: dict[str, str] | None = None,
) -> Response:
    """Return an error, in OpenAI's shape as long as nobody asks for another."""
    response = reply(status, ErrorReply(error_body(status, message, param, code)), headers)
    response.problem = message  # type: ignore[attr-defined]  # for `in_words_of`
    return response


def in_words_of(path: str, response: Response) -> Response:
    """Return a response to a request for a path; errors are said as that route's clients expect."""
    message = getattr(response, "problem", None)
    if message is not None and path.startswith(_ANTHROPIC_PATH):
        response.set_data(_ENCODER.encode(error_reply(response.status_code, message)))
    return response


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> ErrorBody:
    """Return the inner object of an error."""
    kinds = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
    kind = kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
    return ErrorBody(message, kind, param, code)


def broken_body(broken: Broken) -> ErrorBody:
    """Return the error object for a request that ended badly."""
    return error_body(broken_status(broken), broken.message, None, broken.code)


def broken_status(broken: Broken) -> int:
    """Return the status for a request that ended badly before anything was sent."""
    return _BROKEN_STATUS.get(broken.code, 500)


def from_exception(error: Exception) -> Response:
    """Answer whatever a handler raised."""
    match error:
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
            text = error.description or error.name
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
    own = names.get(error.param or "")
    if own is not None and error.param is not None:
        error.message = error.message.replace(error.param, own)
        error.param = own
    return error
