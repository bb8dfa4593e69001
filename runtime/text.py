"""Between text and tokens: chat template, tokenizer, and text that grows a token at a time.

Knows nothing of requests. What a user typed stays text: a control token spelled out in a
message is encoded as the characters it is made of, never as the token.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
from tokenizers import Tokenizer, decoders
from transformers import AutoTokenizer

from .control import ControlTokens, Said
from .dialect import Dialect, Thought, dialect_of, in_words, simplified
from .errors import CallerError, ContextOverflow, ModelError
from .grammar import Grammars
from .lengths import Lengths
from .pieces import Pieces, PieceStream

# The tokenizer's own threads would take the cores that the model computes on.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

MOST_COUNTED: Final = 1 << 18  # tokens that are counted at least, whatever the model's window
_PIECE: Final = 1 << 16  # characters encoded at a time when a text is only measured
_WIDE: Final = 8  # characters a token of a text that is worth measuring first
_TAIL: Final = 256  # characters at a prompt's end that say where it leaves the thinking
_REASON: Final = 400  # characters of a template's own words in an error


class ChatPrompt(NamedTuple):
    """A conversation ready for an answer.

    Args:
        thought: Where it leaves the model's thinking.
    """

    tokens: list[int]
    thought: Thought


class _Room(NamedTuple):
    """How many tokens a text may have, and whether that is only how far texts are counted."""

    most: int
    only_counted: bool

    def overflow(self, found: int, where: str) -> ContextOverflow:
        """Return the error for a text that has more than so many tokens."""
        only = self.only_counted
        return ContextOverflow(found, self.most, param=where, exact=False, only_counted=only)


class Text:
    """The tokenizer of one model.

    Args:
        model_dir: A directory with the tokenizer's files.
        end_ids: Tokens that end an answer, from the model's own configuration.
        context: The model's window in tokens.

    Raises:
        ModelError: When the directory has no tokenizer that can be read.
    """

    def __init__(self, model_dir: Path, end_ids: Iterable[int] = (), context: int = 0) -> None:
        try:
            loaded = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
            marked: Tokenizer = loaded.backend_tokenizer
        except (OSError, ValueError, AttributeError) as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"no usable tokenizer in {model_dir}: {line}") from None
        if marked.decoder is None and "ByteLevel" in str(marked.pre_tokenizer):
            marked.decoder = decoders.ByteLevel()
        # A prompt is what was asked, and its length is bounded where that is said.
        marked.no_truncation()
        marked.no_padding()
        self._template = loaded
        self._marked = marked
        added = loaded.added_tokens_decoder
        self._special = {i: t.content for i, t in added.items() if t.special}
        self._special_ids = {content: i for i, content in self._special.items()}
        self._control = ControlTokens(marked, self._special)
        self._templates: dict[str, str] = {}
        self._pieces = Pieces(marked)
        self._lengths = Lengths(json.loads(marked.to_str()))
        self._most_counted = max(context, MOST_COUNTED)
        self.vocab_size = len(self._pieces)
        ends = {*end_ids, *([loaded.eos_token_id] if loaded.eos_token_id is not None else [])}
        self.end_ids = frozenset(ends)
        self.has_chat_template = loaded.chat_template is not None
        self.dialect = Dialect()
        if self.has_chat_template:
            self.dialect = dialect_of(model_dir, self._render, self._special_ids)

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles grammars for this tokenizer."""
        tokens = [self.token_bytes(token) for token in range(self.vocab_size)]
        return Grammars(self._marked.to_str(), tokens, self._special, self.end_ids)

    def encode(
        self, text: str, *, add_special: bool = True, most: int | None = None, where: str = "prompt"
    ) -> list[int]:
        """Encode a raw prompt, in which spelled-out control tokens mean the tokens.

        Args:
            add_special: Let the tokenizer add what it puts around every prompt (such as BOS).
            most: The tokens there is room for; None to count as far as anything is counted.
            where: The field that holds the text, for errors.

        Raises:
            ContextOverflow: When the text is longer, found before most of the work on it.
        """
        room = self._room(most)
        self._measure(text, 0, room, where)
        return self._encoded(self._marked, text, room, where, add_special)

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        """Encode a conversation, ready for an answer; see `chat`."""
        return self.chat(messages, tools).tokens

    def chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        *,
        options: Mapping[str, Any] | None = None,
        lead: str = "",
        go_on: bool = False,
        most: int | None = None,
        where: str = "messages",
    ) -> ChatPrompt:
        """Encode a conversation through the model's chat template.

        Args:
            messages: `role` and text `content` at least; other fields reach the template.
            tools: OpenAI's descriptions of functions; said in words where the template has none.
            options: Further variables of the template.
            lead: What the answer is made to begin with, unless the template has begun a thought;
                marks in it are the model's own.
            go_on: Let the answer go on with the last message, which is the assistant's.
            most: The tokens there is room for; None to count as far as anything is counted.
            where: The field that holds the messages, for errors.

        Raises:
            CallerError: When the template refuses the conversation.
            ContextOverflow: When the prompt is longer, found before most of the work on it.
        """
        if tools or any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            messages = in_words(self.dialect, list(messages), tools)
        said = Said(list(messages), tools, options or {})
        room = self._room(most)

        def render(said: Said) -> str:
            rendered = self._render_somehow(said, go_on)
            self._measure(rendered, rendered.count(self._control.opening), room, where)
            return rendered

        try:
            rendered = self._control.settled(render(said), said, render)
        except RecursionError:
            raise CallerError(f"{where} or tools are nested too deeply", param=where) from None
        tokens = self._encoded(self._control.tokenizer, rendered, room, where)
        end = self._control.named(rendered[-_TAIL:])
        thought: Thought = "over" if go_on else self.dialect.thought_at(end)
        if lead and thought != "begun":
            tokens += self.encode(lead, add_special=False)
            thought = "over"
        return ChatPrompt(tokens, thought)

    def _room(self, most: int | None) -> _Room:
        return _Room(self._most_counted, True) if most is None else _Room(most, False)

    def _measure(self, text: str, marks: int, room: _Room, where: str) -> None:
        """Refuse a text that cannot fit, by its bytes alone.

        Args:
            marks: How many marks of control tokens are in it, each a token.
        """
        if len(text) <= room.most:
            return
        spare = marks * self._control.size
        least = self._lengths.least(text, room.most + spare) - spare + marks
        if least > room.most:
            raise room.overflow(least, where)

    def _encoded(
        self, tokenizer: Tokenizer, text: str, room: _Room, where: str, add_special: bool = False
    ) -> list[int]:
        """Encode a text while other threads run; only batches let the interpreter go.

        What looks too long is measured piece by piece first, so that memory stays bounded.
        Cutting changes a few tokens at each border, hence the factor.
        """
        if len(text) > _PIECE and len(text) > _WIDE * room.most:
            count = 0
            for at in range(0, len(text), _PIECE):
                count += len(_ids(tokenizer, text[at : at + _PIECE], where))
                if count > 2 * room.most:
                    raise room.overflow(count // 2, where)
        return _ids(tokenizer, text, where, add_special)

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the tokenizer's own text of some tokens; control tokens by their names.

        Bytes that form no character become U+FFFD.
        """
        return self._pieces.decode(list(tokens))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes one token stands for; a control token is its spelled-out name."""
        return self._pieces.bytes_of(token)

    def stream(self) -> PieceStream:
        """Return what reads a text a token at a time."""
        return self._pieces.stream()

    @property
    def document_start(self) -> int:
        """The token an empty prompt stands for: what opens a new document."""
        for candidate in ("<|endoftext|>", self._template.bos_token):
            if candidate in self._special_ids:
                return self._special_ids[candidate]
        return min(self.end_ids, default=0)

    def marks_of(self, dialect: Dialect) -> frozenset[int]:
        """Return the control tokens that a dialect's marks are made of."""
        opening, closing = dialect.call_open, dialect.call_close
        marks = (dialect.think_open, dialect.think_close, opening, closing)
        found = (self.encode(mark, add_special=False) for mark in marks if mark)
        return frozenset(token for tokens in found for token in tokens if token in self._special)

    def is_special(self, token: int) -> bool:
        """Say whether a token is a control token, which an answer's text does not show."""
        return token in self._special

    def _render_somehow(self, said: Said, go_on: bool) -> str:
        """Render a conversation, in simpler roles where the template refuses it as it is."""
        try:
            return self._render(said.messages, said.tools, go_on, said.options)
        except CallerError:
            simple = simplified(said.messages)
            if simple == said.messages:
                raise
            with suppress(CallerError):
                return self._render(simple, said.tools, go_on, said.options)
            raise

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        go_on: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        """Return a rendered conversation with marks for control tokens."""
        if not self.has_chat_template:
            raise CallerError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        loaded = self._template
        shown: Any = list(tools) or None
        try:
            names = {k: self._control.mark_of(v) for k, v in loaded.special_tokens_map.items()}
            text = loaded.apply_chat_template(
                messages,
                chat_template=self._marked_template(shown),
                tools=shown,
                tokenize=False,
                add_generation_prompt=not go_on,
                continue_final_message=go_on,
                **{**names, **(options or {})},
            )
        except jinja2.TemplateSyntaxError as error:
            plain = str(loaded.get_chat_template(None, shown))
            if self._templates[plain] != plain:
                # A control token was a word of its code; those it writes are told as built ones.
                self._templates[plain] = plain
                return self._render(messages, tools, go_on, options)
            raise CallerError(
                f"the model's chat template is broken: {error}", param="messages"
            ) from None
        except (
            jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, IndexError,
            ArithmeticError,
        ) as error:  # fmt: skip  # what a template's own code raises on data it was not made for
            reason = self._control.named(str(error))[:_REASON]
            raise CallerError(
                f"the model's chat template refused the messages: {reason}", param="messages"
            ) from None
        return str(text)

    def _marked_template(self, tools: Any) -> str:
        plain: str = self._template.get_chat_template(None, tools)
        if plain not in self._templates:
            self._templates[plain] = self._control.marked(plain)
        return self._templates[plain]


class Detokenizer:
    """Text that grows a token at a time and never holds half a character.

    An incomplete character at the end waits for its missing bytes and is left out if they
    never come, so the text of a shorter answer begins that of a longer one.

    Args:
        marks: Control tokens that are shown all the same, since something is to be found by them.
        behind: Other text stands before this one, so a space at its beginning is said.
    """

    def __init__(
        self, text: Text, marks: frozenset[int] = frozenset(), *, behind: bool = False
    ) -> None:
        self._text = text
        self._marks = marks
        self._stream = text.stream()
        if behind:
            self._stream.go_on()

    def push(self, token: int) -> str:
        """Return the text that this token completes; a control token adds none, but for marks."""
        if self._text.is_special(token) and token not in self._marks:
            return ""
        return self._stream.push(token)


def _ids(tokenizer: Tokenizer, text: str, where: str, add_special: bool = False) -> list[int]:
    try:
        (found,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special)
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        # The tokenizer's own bug on some text; no exception of Python's, and none may pass it on.
        raise CallerError(
            f"{where}: the model's tokenizer fails on this text", param=where
        ) from None
    return list(found.ids)
