"""The routes under /v1/responses."""

import re
from collections.abc import Mapping
from itertools import islice
from typing import Final

import msgspec
from quart import Response

from ...actors.house import House
from ...runtime.errors import CallerError, ContextOverflow
from ..answers import answer
from ..models import check_model
from ..offload import COUNTS, INLINE_BYTES, PROMPTS, Queue, at_length
from ..problems import decoded, new_request_id, problem, renamed, reply
from ..sse import event_bytes, event_stream
from ..translate import chat_order, chat_prompt
from .bodies import FIELDS, Asked, InputTokensRequest, ResponsesRequest, understood
from .replies import Deleted, InputTokens, ItemList, ResponseReply
from .shape import ResponseShape, suffix_of
from .store import ResponseStore
from .telling import retold

_DECODER: Final = msgspec.json.Decoder(ResponsesRequest)
_COUNT_DECODER: Final = msgspec.json.Decoder(InputTokensRequest)
_REPLY: Final = msgspec.json.Decoder(ResponseReply)
_TOOL: Final = re.compile(r"\btools\[(\d{1,9})\]")
_TRUE: Final = ("true", "1")
_MOST_ITEMS: Final = 100
_USUAL_ITEMS: Final = 20


async def create_response(
    house: House, store: ResponseStore, raw: bytes, priority: str | None
) -> Response:
    """Serve one response, streamed or whole; see `chat_completions`."""
    body: ResponsesRequest = await decoded(_DECODER, raw)
    size = len(raw)
    del raw  # not kept while the answer is made
    check_model(house, body.model)
    if len(body.input) > house.served.context and not isinstance(body.input, str):
        raise ContextOverflow(
            house.served.context, house.served.context, param="input", exact=False
        )
    request_id = new_request_id()
    suffix = "" if body.store is False else suffix_of(request_id)
    asked = await _asked(store, body, size, suffix)
    body.input = ""  # what it says is in the messages now
    try:
        order = await chat_order(
            asked.chat,
            request_id,
            house.text,
            house.served,
            house.args,
            priority,
            where="input",
        )
    except CallerError as error:
        raise _own(error, asked) from None
    shape = ResponseShape(house, order, body, asked, store)
    return await answer(house, order, "responses", shape)


async def count_input(house: House, store: ResponseStore, raw: bytes) -> Response:
    """Return the tokens of an input that is not answered."""
    body: InputTokensRequest = await decoded(_COUNT_DECODER, raw, COUNTS)
    size = len(raw)
    del raw
    check_model(house, body.model)
    asked = await _asked(store, body, size, queue=COUNTS)
    try:
        _, prompt = await chat_prompt(asked.chat, house.text, where="input")
    except CallerError as error:
        raise _own(error, asked) from None
    return reply(200, InputTokens(len(prompt.tokens)))


async def _asked(
    store: ResponseStore,
    body: ResponsesRequest,
    size: int,
    suffix: str = "",
    queue: Queue = PROMPTS,
) -> Asked:
    """Return what a body of some bytes means; see `understood`."""
    found = store.find(body.input, body.previous_response_id)

    def work() -> Asked:
        items, history = found.decoded()
        return understood(body, items, history, suffix)

    return await at_length(work, size + found.size > INLINE_BYTES, queue)


def _own(error: CallerError, asked: Asked) -> CallerError:
    """Return an error about the chat request as one about the body that means it."""
    error = renamed(error, FIELDS)
    if error.param is not None and (own := _TOOL.match(error.param)):
        error.param = asked.places[int(own[1])] + error.param[own.end() :]
        places = dict(enumerate(asked.places))  # a caller's own words may look like one
        error.message = _TOOL.sub(lambda tool: places.get(int(tool[1]), tool[0]), error.message)
    return error


async def show_response(
    store: ResponseStore, response_id: str, query: Mapping[str, str]
) -> Response:
    """Return a kept response, or with `stream` the events that told it.

    Raises:
        CallerError: For a `starting_after` that is no number.
    """
    kept = store.get(response_id)
    if query.get("stream", "").lower() not in _TRUE:
        return Response(kept.reply, content_type="application/json")
    after = _number(query, "starting_after", -1, -1, 2**31)

    def told() -> bytes:
        events = islice(retold(_REPLY.decode(kept.reply), kept.cuts), after + 1, None)
        return event_bytes(events, named=True)

    return event_stream(await at_length(told, len(kept.reply) > INLINE_BYTES), {})


def delete_response(store: ResponseStore, response_id: str) -> Response:
    """Forget a kept response."""
    store.drop(response_id)
    return reply(200, Deleted(response_id))


def cancel_response(store: ResponseStore, response_id: str) -> Response:
    """Say why a kept response cannot be cancelled."""
    store.get(response_id)
    message = "only a response made in the background can be cancelled; this one is over"
    return problem(400, message, param="response_id", code="response_not_cancellable")


def list_input(store: ResponseStore, response_id: str, query: Mapping[str, str]) -> Response:
    """Return a page of the items that a kept response was asked with, the newest first.

    Raises:
        CallerError: For a page that cannot be.
    """
    items = list(store.get(response_id).items)
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise CallerError("order: asc or desc", param="order")
    limit = _number(query, "limit", _USUAL_ITEMS, 1, _MOST_ITEMS)
    if order == "desc":
        items.reverse()
    if (after := query.get("after")) is not None:
        ids = [item.id for item in items]
        if after not in ids:
            raise CallerError(f"after: no item {after[:80]!r} is in the list", param="after")
        items = items[ids.index(after) + 1 :]
    page = items[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    raw = [msgspec.Raw(item.raw) for item in page]
    return reply(200, ItemList(raw, first, last, len(items) > limit))


def _number(query: Mapping[str, str], name: str, usual: int, least: int, most: int) -> int:
    try:
        number = int(query.get(name, usual))
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise CallerError(f"{name}: a number from {least} to {most}", param=name)
    return number
