"""POST /v1/completions, the legacy route: prompts of four forms, echo, flat log probabilities."""

from collections.abc import Iterable
from typing import Final

import msgspec
from quart import Response

from ..actors.house import House
from ..actors.request import Finished
from ..actors.speech import Ended, Piece
from ..runtime.context import TokenLogprob
from .answers import (
    ChoiceShape,
    answer,
    paceline_of,
    text_logprobs,
    usage_of,
)
from .models import check_model
from .problems import decoded, new_request_id
from .replies import TextChoice, TextReply
from .schemas import CompletionRequest
from .shape import Collected
from .translate import Order, completion_order

_DECODER: Final = msgspec.json.Decoder(CompletionRequest)


async def completions(house: House, raw: bytes, priority: str | None) -> Response:
    """Serve one legacy completion, streamed or whole; see `chat_completions`."""
    body: CompletionRequest = await decoded(_DECODER, raw)
    del raw  # not kept while the answer is made
    check_model(house, body.model)
    order = await completion_order(
        body, new_request_id(), house.text, house.served, house.args, priority
    )
    del body  # nor this
    return await answer(house, order, "completions", TextShape(house, order))


def _choice(house: House, order: Order, index: int, prompt: str, choice: Collected) -> TextChoice:
    text = "" if order.drop_completion else choice.text
    logprobs = None
    if order.alternatives is not None:
        entries = [*choice.prompt_logprobs, *([] if order.drop_completion else choice.logprobs)]
        logprobs, _ = text_logprobs(entries, house.text, order.alternatives, 0)
    return TextChoice(index, prompt + text, logprobs, choice.finish)


class TextShape(ChoiceShape[TextChoice]):
    """A legacy completion."""

    def __init__(self, house: House, order: Order) -> None:
        super().__init__(house, order)
        self._offsets = [0] * self._open

    def whole(self, choices: list[Collected], finished: Finished) -> TextReply:
        """Return all choices with their texts."""
        prompts = self._echoed(self._order.kept)
        return TextReply(
            id=_answer_id(self._order),
            created=self._created,
            model=self._house.served.name,
            choices=[
                _choice(self._house, self._order, index, prompt, choice)
                for index, (prompt, choice) in enumerate(zip(prompts, choices, strict=True))
            ],
            usage=usage_of(self._order, finished),
            paceline=paceline_of(self._house, self._order, finished),
        )

    def opening(self) -> Iterable[TextReply]:
        """Repeat the prompts when the caller asked for an echo without log probabilities."""
        if not self._order.echo or self._order.alternatives is not None:
            return []
        return [
            self._chunk(TextChoice(index, prompt))
            for index, prompt in enumerate(self._echoed(self._order.n))
        ]

    def piece(self, piece: Piece) -> Iterable[TextReply]:
        """Return new text, after the echoed prompt tokens that carry log probabilities."""
        chunks = []
        if piece.prompt_logprobs:
            shown = self._house.text.decode(e.token for e in piece.prompt_logprobs)
            chunks.append(self._text(piece.index, shown, list(piece.prompt_logprobs)))
        if (piece.text or piece.logprobs) and not self._order.drop_completion:
            chunks.append(self._text(piece.index, piece.text, list(piece.logprobs)))
        return chunks

    def _end(self, ended: Ended) -> TextChoice:
        return TextChoice(ended.index, "", None, ended.finish)

    def _text(self, index: int, text: str, entries: list[TokenLogprob]) -> TextReply:
        logprobs = None
        if self._order.alternatives is not None:
            logprobs, self._offsets[index] = text_logprobs(
                entries, self._house.text, self._order.alternatives, self._offsets[index]
            )
        return self._chunk(TextChoice(index, text, logprobs))

    def _chunk(self, choice: TextChoice | None) -> TextReply:
        choices = [choice] if choice is not None else []
        chunk = TextReply(_answer_id(self._order), self._created, self._house.served.name, choices)
        if self._order.include_usage:
            chunk.usage = None
        return chunk

    def _echoed(self, each: int) -> list[str]:
        """Return what stands before each choice: its prompt where an echo is asked for.

        Args:
            each: Choices of a prompt.
        """
        prompts = self._order.prompts
        echoed = map(self._house.text.decode, prompts) if self._order.echo else [""] * len(prompts)
        return [prompt for prompt in echoed for _ in range(each)]


def _answer_id(order: Order) -> str:
    return "cmpl-" + order.generation.request_id.removeprefix("req-")
