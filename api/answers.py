"""What both completion routes share: collecting an answer, its usage, its log probabilities."""

import secrets
from typing import NoReturn

import msgspec
import trio
from quart import Response

from ..actors.house import House
from ..actors.request import Alive, Broken, Ended, Finished, Piece, RequestActor
from ..runtime.context import TokenLogprob
from ..runtime.log import logger
from ..runtime.text import Text
from .problems import broken_body, broken_status, reply
from .schemas import (
    ChatLogprob,
    ChatLogprobs,
    ErrorReply,
    Paceline,
    TextLogprobs,
    TopLogprob,
    Usage,
)
from .translate import Order


class BrokenAnswer(Exception):
    """A request that ended badly before anything was sent."""

    def __init__(self, broken: Broken) -> None:
        super().__init__(broken.message)
        self.broken = broken

    def response(self) -> Response:
        """Return the error answer."""
        status = broken_status(self.broken)
        headers = {"Retry-After": "5"} if status == 503 else None
        return reply(status, ErrorReply(broken_body(self.broken)), headers)


class Collected(msgspec.Struct):
    """One choice of an unstreamed answer."""

    text: str = ""
    finish: str = ""
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob] = []


def new_request_id() -> str:
    """Return an id for a request; it names its rows, its logs and its answer."""
    return f"req-{secrets.token_hex(12)}"


def open_request(house: House, order: Order, route: str) -> RequestActor:
    """Log a request and spawn its actor.

    Raises:
        BusyError: When there is no room for it.
    """
    prompt_tokens = sum(map(len, order.prompts))
    first = order.generation.rows[0]
    log = logger().bind(
        request_id=order.generation.request_id, mode=house.args.scheduler_mode.value
    )
    log.info(
        "request.received",
        route=route,
        rows=len(order.generation.rows),
        prompt_tokens=prompt_tokens,
        max_tokens=order.max_tokens,
        seed=order.seed,
        temperature=first.sampling.temperature,
        stream=order.stream,
    )
    if house.args.log_content:
        log.info("request.content", prompts=[house.text.decode(p) for p in order.prompts])
    return house.start(order.generation)


async def collect(actor: RequestActor, order: Order) -> tuple[list[Collected], Finished]:
    """Wait for a whole answer; a client that leaves takes its request with it.

    Raises:
        BrokenAnswer: When the request ended badly.
    """
    choices = [Collected() for _ in order.generation.rows]
    try:
        async for event in actor.events:
            match event:
                case Piece():
                    choice = choices[event.index]
                    choice.text += event.text
                    choice.logprobs += event.logprobs
                    choice.prompt_logprobs += event.prompt_logprobs
                case Ended():
                    choices[event.index].finish = event.finish
                case Alive():
                    pass
    except trio.Cancelled:
        actor.hang_up("client_disconnect")
        raise
    match actor.outcome:
        case Finished() as finished:
            return choices, finished
        case Broken() as broken:
            raise BrokenAnswer(broken)
        case None:
            _unsettled()


def usage_of(order: Order, finished: Finished) -> Usage:
    """Return what a request used; a prompt counts once however many choices it has."""
    prompt = sum(map(len, order.prompts))
    completion = 0 if order.drop_completion else finished.receipt.completion_tokens
    return Usage(prompt, completion, prompt + completion)


def paceline_of(order: Order, finished: Finished, mode: str) -> Paceline:
    """Return the extension object that says what ran."""
    receipt = finished.receipt
    return Paceline(
        mode=mode,
        lanes=receipt.lanes,
        widths=receipt.widths,
        seed=order.seed,
        queue_wait_s=receipt.queue_wait_s,
        time_to_first_token_s=receipt.time_to_first_token_s,
        max_tokens=order.max_tokens,
    )


def chat_logprobs(entries: tuple[TokenLogprob, ...], text: Text) -> ChatLogprobs:
    """Return log probabilities in the chat shape."""
    content = []
    for entry in entries:
        raw = text.token_bytes(entry.token)
        top = [
            TopLogprob(_shown(b := text.token_bytes(token)), logprob, list(b))
            for token, logprob in entry.top
        ]
        content.append(ChatLogprob(_shown(raw), entry.logprob or 0.0, list(raw), top))
    return ChatLogprobs(content)


def text_logprobs(
    entries: list[TokenLogprob], text: Text, alternatives: int, offset: int
) -> tuple[TextLogprobs, int]:
    """Return log probabilities in the legacy shape, and where the next token's text begins."""
    tokens, offsets = [], []
    for entry in entries:
        token = _shown(text.token_bytes(entry.token))
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
    top: list[dict[str, float] | None] | None = None
    if alternatives:
        top = [
            {_shown(text.token_bytes(t)): logprob for t, logprob in entry.top} or None
            for entry in entries
        ]
    return TextLogprobs(tokens, [entry.logprob for entry in entries], top, offsets), offset


def _shown(raw: bytes) -> str:
    return raw.decode("utf-8", "replace")


def _unsettled() -> NoReturn:
    raise AssertionError("an actor settles before it closes its channel")
