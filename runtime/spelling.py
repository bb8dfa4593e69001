"""What a grammar engine is told of a tokenizer: how tokens are spelled, and how texts are.

A control token is never a spelling of its name: literals of a grammar are said in ordinary
tokens, however much they look like a control token.
"""

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from llguidance import LLTokenizer, TokenizerWrapper
from tokenizers import Tokenizer

_FORCED_AT_ONCE: Final = 256  # characters of a forced text that are encoded in one go


class Spelling(TokenizerWrapper):
    """A tokenizer in the form that llguidance takes.

    Args:
        tokenizer: The tokenizer's own JSON.
        tokens: The bytes of every token.
        control: Tokens that stand for no text.
        end_ids: Tokens that end an answer.
    """

    is_tokenizer_wrapper = True

    def __init__(
        self,
        tokenizer: str,
        tokens: Sequence[bytes],
        control: Iterable[int],
        end_ids: Iterable[int],
    ) -> None:
        self.end_ids = sorted(end_ids)
        self.eos_token_id, self.bos_token_id = self.end_ids[0], None
        self.tokens = list(tokens)
        self.special_token_ids = sorted({*control, *self.end_ids})
        self._literal = _without_prefix(tokenizer)
        self._literal.encode_special_tokens = True
        self._barred = frozenset(self.special_token_ids)
        self.engine = LLTokenizer(self, eos_token=self.end_ids)

    def __call__(self, text: str) -> list[int]:
        """Return ordinary tokens that spell a text byte by byte, as the model would write it."""
        out: list[int] = []
        for at in range(0, len(text), _FORCED_AT_ONCE):
            piece = text[at : at + _FORCED_AT_ONCE]
            ids = self._literal.encode(piece, add_special_tokens=False).ids
            spelled = b"".join(self.tokens[token] for token in ids)
            if spelled != piece.encode() or not self._barred.isdisjoint(ids):
                ids = self.engine.greedy_tokenize(piece)
            out += ids
        return out


def _without_prefix(tokenizer: str) -> Tokenizer:
    """Return a tokenizer that puts no blank before a text: a literal begins where it begins."""
    parts = json.loads(tokenizer)
    parts["normalizer"] = _pruned(parts.get("normalizer"), "normalizers")
    parts["pre_tokenizer"] = _pruned(parts.get("pre_tokenizer"), "pretokenizers")
    parts["truncation"] = parts["padding"] = None
    return Tokenizer.from_str(json.dumps(parts))


def _pruned(part: Any, inner: str) -> Any:
    if part is None or part["type"] == "Prepend":
        return None
    if part["type"] == "Metaspace":
        return {**part, "prepend_scheme": "never"}
    if part["type"] == "Sequence":
        kept = [found for each in part[inner] if (found := _pruned(each, inner)) is not None]
        return {**part, inner: kept} if kept else None
    return part
