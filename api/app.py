"""The routes on one Quart-Trio app."""

from collections.abc import Callable
from typing import Any

import trio
from hypercorn.typing import ASGIReceiveCallable, ASGISendCallable
from quart import Request, Response, request
from quart_trio import QuartTrio
from quart_trio.asgi import TrioASGIHTTPConnection
from werkzeug.exceptions import NotFound

from .. import __version__
from ..actors.house import House
from .anthropic.route import count_tokens, create_message
from .chat import chat_completions
from .completions import completions
from .guard import Guard
from .intake import Intake, prepared
from .models import list_for_anthropic, list_models, show_model
from .openapi import openapi
from .problems import from_exception, in_words_of, reply, speaks_anthropic
from .responses.route import (
    cancel_response,
    count_input,
    create_response,
    delete_response,
    list_input,
    show_response,
)
from .responses.store import ResponseStore
from .status import StatusPage
from .tokens import detokenize, tokenize
from .translate import PRIORITY_HEADER


class Connection(TrioASGIHTTPConnection):
    """One request on a connection, kept from undoing hypercorn's keep-alive timer.

    quart-trio cancels the request's tasks on the disconnect event that hypercorn queues at the
    end of every answer, and with them the re-arming of the idle timer. So once the final body
    event is on its way, a disconnect cancels nothing.
    """

    _answered = False

    async def handle_messages(  # type: ignore[override]  # as quart-trio overrides it
        self, nursery: trio.Nursery, request: Request, receive: ASGIReceiveCallable
    ) -> None:
        await super(TrioASGIHTTPConnection, self).handle_messages(request, receive)
        if not self._answered:
            nursery.cancel_scope.cancel(reason="client disconnected")

    async def _send_response(self, send: ASGISendCallable, response: Any) -> None:
        async def watched(message: Any) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                self._answered = True
            await send(message)

        await super()._send_response(watched, response)


def make_app(house: House, clock: Callable[[], float] = trio.current_time) -> QuartTrio:
    """Return the app over a running house."""
    app = QuartTrio("paceline")
    app.asgi_http_class = Connection
    app.url_map.strict_slashes = False
    app.config.update(
        RESPONSE_TIMEOUT=None,  # streams last as long as they last; actors have deadlines
        BODY_TIMEOUT=None,  # the intake has limits of its own
        MAX_CONTENT_LENGTH=house.args.body_limit_mb << 20,
    )
    guard = Guard(house.args)
    page = StatusPage(house, clock)
    store = ResponseStore()
    intake = Intake(house.args.body_limit_mb << 20, house.args.client_stall_s)

    async def body() -> bytes:
        return await intake.read(request)

    @app.before_request
    async def check() -> Response | None:
        return guard.check(request)

    @app.after_request
    async def dress(response: Response) -> Response:
        return guard.dress(request, in_words_of(request, response))

    @app.teardown_request
    async def give_back(_: BaseException | None) -> None:
        prepared()

    @app.errorhandler(Exception)
    async def explain(error: Exception) -> Response:
        return from_exception(error)

    @app.post("/v1/chat/completions")
    async def chat() -> Response:
        return await chat_completions(house, await body(), request.headers.get(PRIORITY_HEADER))

    @app.post("/v1/completions")
    async def legacy() -> Response:
        return await completions(house, await body(), request.headers.get(PRIORITY_HEADER))

    @app.post("/v1/responses")
    async def response() -> Response:
        priority = request.headers.get(PRIORITY_HEADER)
        return await create_response(house, store, await body(), priority)

    @app.post("/v1/responses/input_tokens")
    async def input_tokens() -> Response:
        return await count_input(house, store, await body())

    @app.post("/v1/responses/compact")
    async def compacted() -> Response:
        raise NotFound  # it is no response's id either

    @app.get("/v1/responses/<response_id>")
    async def kept_response(response_id: str) -> Response:
        return await show_response(store, response_id, request.args)

    @app.get("/v1/responses/<response_id>/input_items")
    async def input_items(response_id: str) -> Response:
        return list_input(store, response_id, request.args)

    @app.post("/v1/responses/<response_id>/cancel")
    async def cancelled_response(response_id: str) -> Response:
        return cancel_response(store, response_id)

    @app.delete("/v1/responses/<response_id>")
    async def dropped_response(response_id: str) -> Response:
        return delete_response(store, response_id)

    @app.post("/v1/messages")
    async def message() -> Response:
        return await create_message(house, await body(), request.headers.get(PRIORITY_HEADER))

    @app.post("/v1/messages/count_tokens")
    async def counted() -> Response:
        return await count_tokens(house, await body())

    @app.get("/v1/models")
    async def models() -> Response:
        if speaks_anthropic(request):
            return list_for_anthropic(house, request.args)
        return list_models(house)

    @app.get("/v1/models/<path:name>")
    async def model(name: str) -> Response:
        return show_model(house, name, for_anthropic=speaks_anthropic(request))

    @app.post("/v1/tokenize")
    async def tokens() -> Response:
        return await tokenize(house, await body())

    @app.post("/v1/detokenize")
    async def text() -> Response:
        return await detokenize(house, await body())

    @app.get("/openapi.json")
    async def described() -> Response:
        return reply(200, openapi(house, __version__))

    @app.get("/health")
    async def health() -> Response:
        return page.health()

    @app.get("/metrics")
    async def metrics() -> Response:
        return page.metrics()

    @app.get("/")
    async def root() -> Response:
        return reply(200, {"name": "paceline", "model": house.served.name, "api": "/v1"})

    return app
