"""Between text and tokens: chat template, tokenizer, and text that grows a token at a time.

Knows nothing of requests. What a user typed stays text: a control token spelled out in a
message is encoded as the characters it is made of, never as the token.
"""

import codecs
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Final

import jinja2
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from .errors import CallerError, ModelError
from .grammar import Grammars

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
_PRIVATE_USE: Final = range(0xE000, 0xF900)


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
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None = None
    ) -> list[int]:
        """Encode a conversation through the model's chat template, ready for an answer.

        Args:
            messages: `role` and text `content` at least; other fields reach the template.

        Raises:
            CallerError: When the template refuses the conversation.
        """
        shield = _unused_character(messages)
        shielded = _shield(list(messages), self._special_pattern, shield)
        rendered = self._render(shielded, tools)
        if shield not in rendered:
            return self.encode(rendered, add_special=False)
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

    def is_special(self, token: int) -> bool:
        """Say whether a token is a control token, which an answer's text does not show."""
        return token in self._special

    def _render(
        self, messages: list[dict[str, Any]], tools: Sequence[dict[str, Any]] | None
    ) -> str:
        if not self.has_chat_template:
            raise CallerError(
                "this model has no chat template; use /v1/completions", param="messages"
            )
        try:
            text = self._template.apply_chat_template(
                messages,
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=True,
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
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """Return the text that this token completes; a control token adds none."""
        if self._text.is_special(token):
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
