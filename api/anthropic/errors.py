"""Errors in Anthropic's words."""

from typing import Final

from .replies import AnthropicError, AnthropicErrorReply

_KINDS: Final = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_reply(
    status: int,
    message: str,
    request_id: str | None = None,
    details: dict[str, str] | None = None,
) -> AnthropicErrorReply:
    """Return the body of an error with a status."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    error = AnthropicError(kind, message)
    if details is not None:
        error.details = details
    return AnthropicErrorReply(error, request_id)
