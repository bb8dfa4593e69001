"""Between text and tokens: chat template, tokenizer, and text that grows a token at a time.

Knows nothing of requests. What a user typed stays text: a control token spelled out in a
message is encoded as the characters it is made of, never as the token.
"""

import codecs
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from .dialect import Dialect, Thought, dialect_of, in_words, simplified
from .errors import CallerError, ModelError
from .grammar import Grammars

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
_PRIVATE_USE: Final = range(0xE000, 0xF900)


class ChatPrompt(NamedTuple):
    """A conversation ready for an answer.

    Args:
        thought: Where it leaves the model's thinking.
    """

    tokens: list[int]
    thought: Thought


class Text:
    """The tokenizer of one model.

    Args:
        model_dir: A directory with the tokenizer's files.
        end_ids: Tokens that end an answer, from the model's own configuration.

    Raises:
        ModelError: When the directory has no tokenizer that can be read.
    """

    def __init__(self, model_dir: Path, end_ids: Iterable[int] = ()) -> None:
        try:
            loaded = AutoTokenizer.from_pretrained(str(model_dir), local_files_only=True)
            marked: Tokenizer = loaded.backend_tokenizer
        except (OSError, ValueError, AttributeError) as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"no usable tokenizer in {model_dir}: {line}") from None
        self._template = loaded
        self._marked = marked
        self._literal = Tokenizer.from_str(marked.to_str())
        self._literal.encode_special_tokens = True
        added = loaded.added_tokens_decoder
        self._special = {i: t.content for i, t in added.items() if t.special}
        self._special_pattern = re.compile(
            "|".join(re.escape(t) for t in sorted(self._special.values(), key=len, reverse=True))
            or r"(?!)"
        )
        self._special_ids = {content: i for i, content in self._special.items()}
        self._vocab: dict[int, str] = {i: t for t, i in marked.get_vocab().items()}
        self._byte_level = _uses_byte_level(marked)
        self.vocab_size = max(self._vocab) + 1
        ends = {*end_ids, *([loaded.eos_token_id] if loaded.eos_token_id is not None else [])}
        self.end_ids = frozenset(ends)
        self.has_chat_template = loaded.chat_template is not None
        self.dialect = dialect_of(model_dir, self._render) if self.has_chat_template else Dialect()

    @cached_property
    def grammars(self) -> Grammars:
        """What compiles grammars for this tokenizer."""
        return Grammars(self._marked.to_str(), self.vocab_size, self.end_ids)

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Encode a raw prompt, in which spelled-out control tokens mean the tokens.

        Args:
            add_special: Let the tokenizer add what it puts around every prompt (such as BOS).
        """
        return list(self._marked.encode(text, add_special_tokens=add_special).ids)

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
    ) -> ChatPrompt:
        """Encode a conversation through the model's chat template.

        Args:
            messages: `role` and text `content` at least; other fields reach the template.
            tools: OpenAI's descriptions of functions; said in words where the template has none.
            options: Further variables of the template.
            lead: What the answer is made to begin with, unless the template has begun a thought;
                marks in it are the model's own.
            go_on: Let the answer go on with the last message, which is the assistant's.

        Raises:
            CallerError: When the template refuses the conversation.
        """
        if tools or any(m["role"] == "tool" or m.get("tool_calls") for m in messages):
            messages = in_words(self.dialect, list(messages), tools)
        shield = _unused_character([*messages, *tools])
        shielded, shown = (
            _shield(list(texts), self._special_pattern, shield) for texts in (messages, tools)
        )
        rendered = self._render_somehow(shielded, shown, go_on, options or {})
        if shield not in rendered:
            tokens = self.encode(rendered, add_special=False)
        else:
            tokens = self._encode_shielded(rendered, shield)
        thought: Thought = "over" if go_on else self.dialect.thought_at(rendered)
        if lead and thought != "begun":
            tokens += self.encode(lead, add_special=False)
            thought = "over"
        return ChatPrompt(tokens, thought)

    def _encode_shielded(self, rendered: str, shield: str) -> list[int]:
        ids: list[int] = []
        at = 0
        for match in self._special_pattern.finditer(rendered):
            ids += self._encode_literal(rendered[at : match.start()].replace(shield, ""))
            ids.append(self._special_ids[match.group()])
            at = match.end()
        return ids + self._encode_literal(rendered[at:].replace(shield, ""))

    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of some tokens; bytes that form no character become U+FFFD."""
        return b"".join(map(self.token_bytes, tokens)).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes one token stands for; a control token is its spelled-out name."""
        if token in self._special:
            return self._special[token].encode()
        piece = self._vocab.get(token)
        if piece is None:
            return b""
        if self._byte_level:
            table = _byte_level_table()
            return bytes(table[c] for c in piece if c in table)
        if match := _BYTE_TOKEN.fullmatch(piece):
            return bytes([int(match.group(1), 16)])
        return piece.replace("\u2581", " ").encode()

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
        found = (self._special_pattern.findall(mark) for mark in marks if mark)
        return frozenset(self._special_ids[name] for names in found for name in names)

    def is_special(self, token: int) -> bool:
        """Say whether a token is a control token, which an answer's text does not show."""
        return token in self._special

    def _render_somehow(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]],
        go_on: bool,
        options: Mapping[str, Any],
    ) -> str:
        """Render a conversation, in simpler roles where the template refuses it as it is."""
        try:
            return self._render(messages, tools, go_on, options)
        except CallerError:
            simple = simplified(messages)
            if simple == messages:
                raise
            with suppress(CallerError):
                return self._render(simple, tools, go_on, options)
            raise

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: Sequence[dict[str, Any]] = (),
        go_on: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> str:
        if not self.has_chat_template:
            raise CallerError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            text = self._template.apply_chat_template(
                messages,
                tools=list(tools) or None,
                tokenize=False,
                add_generation_prompt=not go_on,
                continue_final_message=go_on,
                **(options or {}),
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise CallerError(
                f"the model's chat template refused the messages: {error}", param="messages"
            ) from None
        return str(text)

    def _encode_literal(self, text: str) -> list[int]:
        return list(self._literal.encode(text, add_special_tokens=False).ids) if text else []


class Detokenizer:
    """Text that grows a token at a time and never holds half a character.

    An incomplete character at the end waits for its missing bytes and is left out if they
    never come, so the text of a shorter answer begins that of a longer one.

    Args:
        marks: Control tokens that are shown all the same, since something is to be found by them.
    """

    def __init__(self, text: Text, marks: frozenset[int] = frozenset()) -> None:
        self._text = text
        self._marks = marks
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes; a control token adds none, but for marks."""
        if self._text.is_special(token) and token not in self._marks:
            return ""
        return self._decoder.decode(self._text.token_bytes(token))


def _shield(value: Any, pattern: re.Pattern[str], shield: str) -> Any:
    """Break every control token spelled out in user text with a character nothing else uses."""
    if isinstance(value, str):
        return pattern.sub(lambda m: m.group()[0] + shield + m.group()[1:], value)
    if isinstance(value, list):
        return [_shield(item, pattern, shield) for item in value]
    if isinstance(value, dict):
        return {key: _shield(item, pattern, shield) for key, item in value.items()}
    return value


def _unused_character(messages: Sequence[dict[str, Any]]) -> str:
    used = set(json.dumps(messages, ensure_ascii=False, default=str))
    return next(c for c in map(chr, _PRIVATE_USE) if c not in used)


def _uses_byte_level(tokenizer: Tokenizer) -> bool:
    return "ByteLevel" in str(tokenizer.decoder) or "ByteLevel" in str(tokenizer.pre_tokenizer)


@lru_cache(maxsize=1)
def _byte_level_table() -> dict[str, int]:
    """Map GPT-2's printable stand-ins back to bytes (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return table
