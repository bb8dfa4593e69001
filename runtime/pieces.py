"""From tokens to text: the bytes of each token, and the tokenizer's own decoding of many.

A byte-level decoder reads a token as bytes only where each of its characters stands for one;
tokens that were added (runs of spaces, line breaks, names in any script) are stored as they are.
"""

import codecs
import json
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Pieces:
    """What the tokens of one tokenizer read as.

    `joins` says whether a text is its tokens' bytes one after the other, but for what is dropped
    at its very beginning: `lead` spaces of the text, or all of them in its first token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        spec: dict[str, Any] = json.loads(tokenizer.to_str())
        steps = _steps(spec.get("decoder"))
        kinds = [step["type"] for step in steps]
        self._vocab = {i: t for t, i in tokenizer.get_vocab(with_added_tokens=True).items()}
        for added in spec["added_tokens"]:  # some are kept as the normalizer writes them
            self._vocab[added["id"]] = tokenizer.id_to_token(added["id"]) or added["content"]
        self._byte_level = kinds == ["ByteLevel"]
        self._byte_tokens = "ByteFallback" in kinds
        self._replaced = [
            (step["pattern"]["String"], step["content"])
            for step in steps
            if step["type"] == "Replace" and "String" in step["pattern"]
        ]
        self.lead = sum(step["start"] for step in steps if step["type"] == "Strip")
        self.bare_first = False
        if kinds == ["Metaspace"]:
            self._replaced = [(steps[0]["replacement"], " ")]
            self.bare_first = steps[0].get("prepend_scheme", "always") != "never"
        self.joins = (
            self._byte_level or kinds == ["Metaspace"] or (bool(kinds) and _each_alone(steps))
        )

    def __len__(self) -> int:
        return max(self._vocab) + 1

    def bytes_of(self, token: int, *, bare: bool = False) -> bytes:
        """Return the bytes that a token stands for behind others; none for an unknown token.

        Args:
            bare: Leave stand-ins for spaces out, as `bare_first` asks of a text's first token.
        """
        piece = self._vocab.get(token)
        if piece is None:
            return b""
        if self._byte_level:
            table = byte_level_table()
            if all(c in table for c in piece):
                return bytes(table[c] for c in piece)
            return piece.encode()
        if not self.joins:
            return str(self._tokenizer.decode([token], skip_special_tokens=False)).encode()
        if self._byte_tokens and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match.group(1), 16)])
        for old, new in self._replaced:
            piece = piece.replace(old, "" if bare else new)
        return piece.encode()

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the tokenizer's own reading, control tokens by their names.

        Other threads run meanwhile: the tokenizer lets the interpreter go for batches only.
        """
        known = [token for token in tokens if token in self._vocab]
        (text,) = self._tokenizer.decode_batch([known], skip_special_tokens=False)
        return str(text)

    def stream(self) -> "PieceStream":
        """Return what reads a text a token at a time, from its first one."""
        return PieceStream(self, self._tokenizer)


class PieceStream:
    """A text that grows a token at a time and never holds half a character."""

    def __init__(self, pieces: Pieces, tokenizer: Tokenizer) -> None:
        self._pieces = pieces
        self._tokenizer = tokenizer
        self._lead = pieces.lead
        self._bare = pieces.bare_first
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._whole = None if pieces.joins else DecodeStream(skip_special_tokens=False)

    def go_on(self) -> None:
        """Say that other text stands before this one: no space at its beginning is dropped."""
        self._lead, self._bare = 0, False

    def push(self, token: int) -> str:
        """Return the text that this token completes."""
        if self._whole is not None:
            return str(self._whole.step(self._tokenizer, token) or "")
        text = self._decoder.decode(self._pieces.bytes_of(token, bare=self._bare))
        self._bare = False
        while self._lead and text:
            if text[0] != " ":
                self._lead = 0
                break
            text, self._lead = text[1:], self._lead - 1
        return text


@lru_cache(maxsize=1)
def byte_level_table() -> dict[str, int]:
    """Map GPT-2's printable stand-ins back to bytes (Radford et al. 2019)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    hidden = (byte for byte in range(256) if byte not in set(printable))
    table.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return table


def _steps(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _steps(inner)]
    return [decoder]


def _each_alone(steps: Sequence[dict[str, Any]]) -> bool:
    """Say whether the steps read each token by itself, and drop at most leading spaces of all."""
    fused = False
    for step in steps:
        match step["type"]:
            case "ByteFallback":
                pass
            case "Fuse":
                fused = True
            case "Replace" if "String" in step["pattern"] and not fused:
                pass
            case "Strip" if fused and step["content"] == " " and not step["stop"]:
                pass
            case _:
                return False
    return True
