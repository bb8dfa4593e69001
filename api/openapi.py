"""The OpenAPI document of this server, made from the structs that its routes decode and encode.

Source: OpenAPI specification 3.1.
"""

from typing import Any, Final

import msgspec

from ..actors.house import House
from .anthropic.bodies import CountRequest, MessagesRequest
from .anthropic.replies import AnthropicErrorReply, Counted, MessageReply
from .fields import FIELDS
from .known import Route
from .replies import (
    ChatReply,
    DetokenizeReply,
    ErrorReply,
    ModelEntry,
    ModelList,
    TextReply,
    TokenizeReply,
)
from .responses.bodies import InputTokensRequest, ResponsesRequest
from .responses.replies import Deleted, InputTokens, ItemList, ResponseReply
from .schemas import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

_STREAMED: Final = ("chat/completions", "completions", "responses", "messages")
_REFS: Final = "#/components/schemas/{name}"
_ERRORS: Final = (400, 401, 403, 404, 405, 413, 415, 421, 500, 503, 504)

# Method, path behind /v1, what it does, body, answer.
_ROUTES: Final[tuple[tuple[str, str, str, type | None, type], ...]] = (
    ("post", "chat/completions", "Chat, streamed or whole.", ChatRequest, ChatReply),
    ("post", "completions", "Legacy completions.", CompletionRequest, TextReply),
    ("post", "responses", "OpenAI's Responses.", ResponsesRequest, ResponseReply),
    ("get", "responses/{response_id}", "A kept response.", None, ResponseReply),
    ("delete", "responses/{response_id}", "Forget a kept response.", None, Deleted),
    ("get", "responses/{response_id}/input_items", "What it was asked with.", None, ItemList),
    ("post", "responses/input_tokens", "Tokens of an input.", InputTokensRequest, InputTokens),
    ("post", "messages", "Anthropic's Messages.", MessagesRequest, MessageReply),
    ("post", "messages/count_tokens", "Tokens of a prompt.", CountRequest, Counted),
    ("get", "models", "The loaded model.", None, ModelList),
    ("get", "models/{model}", "The loaded model, by its name.", None, ModelEntry),
    ("post", "tokenize", "A prompt to tokens.", TokenizeRequest, TokenizeReply),
    ("post", "detokenize", "Tokens to text.", DetokenizeRequest, DetokenizeReply),
)


def openapi(house: House, version: str) -> dict[str, Any]:
    """Return the document."""
    kinds = {kind for *_, body, answer in _ROUTES for kind in (body, answer) if kind is not None}
    kinds |= {ErrorReply, AnthropicErrorReply}
    ordered = sorted(kinds, key=lambda kind: kind.__name__)
    refs, schemas = msgspec.json.schema_components(ordered, ref_template=_REFS)
    ref = dict(zip(ordered, refs, strict=True))
    for *_, body, _ in _ROUTES:
        route: Route | None = getattr(body, "route", None)
        if body is not None and route is not None:
            schemas[body.__name__]["properties"] |= _refused(route)
    paths: dict[str, Any] = {}
    for method, path, summary, body, answer in _ROUTES:
        paths.setdefault(f"/v1/{path}", {})[method] = _operation(path, summary, body, answer, ref)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "paceline",
            "version": version,
            "description": f"Serves {house.served.name}.",
        },
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": _KEYS},
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def _refused(route: Route) -> dict[str, Any]:
    """Return what a route refuses by name, with the values that ask for nothing."""
    return {
        path: {"enum": [None, *field.neutral], "description": f"Not served: {field.why}."}
        for path, field in FIELDS[route].items()
        if field.verdict == "refused" and path.isidentifier() and path != "context_management"
    }


_KEYS: Final = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "key": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
}


def _operation(
    path: str, summary: str, body: type | None, answer: type, ref: dict[type, dict[str, Any]]
) -> dict[str, Any]:
    told: dict[str, Any] = {"application/json": {"schema": ref[answer]}}
    if path in _STREAMED and body is not None:
        told["text/event-stream"] = {"schema": {"type": "string"}}
    error = AnthropicErrorReply if path.startswith("messages") else ErrorReply
    wrong = {"application/json": {"schema": ref[error]}}
    responses = {"200": {"description": "The answer.", "content": told}}
    responses |= {str(n): {"description": "An error.", "content": wrong} for n in _ERRORS}
    operation: dict[str, Any] = {"summary": summary, "responses": responses}
    if body is not None:
        content = {"application/json": {"schema": ref[body]}}
        operation["requestBody"] = {"required": True, "content": content}
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    if names:
        operation["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    return operation
