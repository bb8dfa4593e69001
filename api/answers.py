"""What both completion routes share: running a request, its chunks, usage and log probabilities."""

import time
from abc import abstractmethod
from collections.abc import Iterable
from typing import Generic, TypeVar

import msgspec
import trio
from quart import Response

from ..actors.house import House
from ..actors.request import Alive, Broken, Finished, RequestActor
from ..actors.speech import Ended, Piece
from ..runtime.context import TokenLogprob
from ..runtime.log import logger
from ..runtime.text import Text
from .intake import prepared
from .offload import ANSWERS, at_length
from .problems import broken_status, encoded, encoded_reply, reply
from .replies import (
    ChatChunk,
    ChatLogprob,
    ChatLogprobs,
    CompletionDetails,
    Paceline,
    PromptDetails,
    TextLogprobs,
    TextReply,
    TopLogprob,
    Usage,
)
from .shape import Collected, Shape
from .sse import stream
from .translate import Order

Choice = TypeVar("Choice")


async def answer(house: House, order: Order, route: str, shape: Shape) -> Response:
    """Run one request and answer it, streamed or whole.

    Raises:
        BusyError: When there is no room for it.
        CallerError: When its rows never will fit.
        OwnerDied: When there is no model any more.
    """
    prepared()
    _log_request(house, order, route)
    actor = house.start(order.generation)
    headers = {"x-request-id": order.generation.request_id}
    if order.stream:
        return stream(actor, shape, headers)
    choices = await _collect(actor, order)
    match actor.outcome:
        case Finished() as finished:
            kept = _likeliest(choices, order)
            told = sum(len(one.logprobs) + len(one.prompt_logprobs) for one in kept)
            echoed = sum(map(len, order.prompts)) if order.echo else 0
            long = shape.ends_long(max(told, echoed, finished.receipt.completion_tokens))
            body = await at_length(lambda: encoded(shape.whole(kept, finished)), long, ANSWERS)
            return encoded_reply(200, body, headers)
        case Broken() as broken:
            status = broken_status(broken)
            if status == 503:
                headers["Retry-After"] = "5"
            return reply(status, shape.failure(broken), headers)
        case None:
            raise AssertionError("an actor settles before it closes its channel")


class ChoiceShape(Shape, Generic[Choice]):
    """What OpenAI's two completion routes share: the very last choice's end says what ran."""

    def __init__(self, house: House, order: Order) -> None:
        super().__init__(house, order)
        self._created = int(time.time())
        self._open = len(order.generation.rows)
        self._last: Choice | None = None

    @abstractmethod
    def _end(self, ended: Ended) -> Choice:
        """Return a choice that says how it ended."""

    @abstractmethod
    def _chunk(self, choice: Choice | None) -> ChatChunk | TextReply:
        """Return an event with one choice, or none for the usage."""

    def ended(self, ended: Ended) -> Iterable[msgspec.Struct]:
        """Return a choice's end; the very last one waits for `closing`."""
        choice = self._end(ended)
        self._open -= 1
        if self._open == 0:
            self._last = choice
            return []
        return [self._chunk(choice)]

    def closing(self, finished: Finished) -> Iterable[msgspec.Struct]:
        """Return the last choice's end and, when asked for, the usage."""
        chunks = [self._chunk(self._last)]
        if self._order.include_usage:
            chunks.append(self._chunk(None))
            chunks[-1].usage = usage_of(self._order, finished)
        chunks[-1].paceline = paceline_of(self._house, self._order, finished)
        return chunks


def usage_of(order: Order, finished: Finished) -> Usage:
    """Return what a request used; a prompt counts once however many choices it has."""
    prompt = sum(map(len, order.prompts))
    completion = 0 if order.drop_completion else finished.receipt.completion_tokens
    cached = sum(finished.receipt.cached_tokens[:: order.n])
    thought = CompletionDetails(finished.receipt.reasoning_tokens)
    return Usage(prompt, completion, prompt + completion, PromptDetails(cached), thought)


def paceline_of(house: House, order: Order, finished: Finished) -> Paceline:
    """Return the extension object that says what ran."""
    receipt = finished.receipt
    return Paceline(
        mode=house.args.scheduler_mode.value,
        lanes=receipt.lanes,
        widths=receipt.widths,
        seed=order.seed,
        queue_wait_s=receipt.queue_wait_s,
        time_to_first_token_s=receipt.time_to_first_token_s,
        max_tokens=order.max_tokens,
        drafted_tokens=receipt.drafted_tokens,
        accepted_tokens=receipt.accepted_tokens,
    )


def chat_logprobs(entries: tuple[TokenLogprob, ...], text: Text) -> ChatLogprobs:
    """Return log probabilities in the chat shape."""
    spelled = _Spelled(text)
    content = []
    for entry in entries:
        top = [
            TopLogprob(shown, logprob, raw)
            for (shown, raw), logprob in ((spelled[token], p) for token, p in entry.top)
        ]
        shown, raw = spelled[entry.token]
        content.append(ChatLogprob(shown, entry.logprob or 0.0, raw, top))
    return ChatLogprobs(content)


def text_logprobs(
    entries: list[TokenLogprob], text: Text, alternatives: int, offset: int
) -> tuple[TextLogprobs, int]:
    """Return log probabilities in the legacy shape, and where the next token's text begins."""
    spelled = _Spelled(text)
    tokens, offsets = [], []
    for entry in entries:
        token, _ = spelled[entry.token]
        tokens.append(token)
        offsets.append(offset)
        offset += len(token)
    top: list[dict[str, float] | None] | None = None
    if alternatives:
        top = [{spelled[t][0]: logprob for t, logprob in entry.top} or None for entry in entries]
    return TextLogprobs(tokens, [entry.logprob for entry in entries], top, offsets), offset


def _likeliest(choices: list[Collected], order: Order) -> list[Collected]:
    """Return the likeliest `kept` of each prompt's choices, the best first."""
    if order.kept == order.n:
        return choices
    out = []
    for start in range(0, len(choices), order.n):
        mine = sorted(choices[start : start + order.n], key=lambda choice: -choice.likelihood)
        out += mine[: order.kept]
    return out


class _Spelled(dict[int, tuple[str, list[int]]]):
    """Tokens' texts and bytes; each is looked up once, since most stand at many positions."""

    def __init__(self, text: Text) -> None:
        super().__init__()
        self._text = text

    def __missing__(self, token: int) -> tuple[str, list[int]]:
        raw = self._text.token_bytes(token)
        self[token] = found = raw.decode("utf-8", "replace"), list(raw)
        return found


def _log_request(house: House, order: Order, route: str) -> None:
    first = order.generation.rows[0]
    log = logger().bind(
        request_id=order.generation.request_id, mode=house.args.scheduler_mode.value
    )
    log.info(
        "request.received",
        route=route,
        rows=len(order.generation.rows),
        prompt_tokens=sum(map(len, order.prompts)),
        max_tokens=order.max_tokens,
        seed=order.seed,
        temperature=first.sampling.temperature,
        stream=order.stream,
    )
    if house.args.log_content:
        log.info("request.content", prompts=[house.text.decode(p) for p in order.prompts])


async def _collect(actor: RequestActor, order: Order) -> list[Collected]:
    """Wait for a whole answer; a client that leaves, or a fault here, ends its request."""
    choices = [Collected() for _ in order.generation.rows]
    try:
        async for event in actor.events:
            match event:
                case Piece():
                    choices[event.index].take(event)
                case Ended():
                    choices[event.index].finish = event.finish
                    choices[event.index].stop = event.stop
                case Alive():
                    pass
    except BaseException as error:
        left = isinstance(error, trio.Cancelled)
        actor.hang_up("client_disconnect" if left else "internal_error")
        raise
    return choices
