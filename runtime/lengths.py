"""How few tokens a text can become, told from its bytes alone and before any work on it.

A token covers as many bytes as it is long, so each byte of a text costs at least one part in the
length of the longest token that holds such a byte. Where a tokenizer may drop, change or gather
text without end, the bytes concerned cost nothing: what fits is never refused.
"""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from .pieces import byte_level_table

_STEP: Final = 1 << 16  # characters looked at between two looks at the limit
_SPACE: Final = "\u2581"
_KEEPING: Final = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "Punctuation"})
_FORMS: Final = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_BLANK: Final = b" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f"


class Lengths:
    """The lower bound for one tokenizer.

    Args:
        spec: The tokenizer's own JSON, decoded.
    """

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._plain = np.zeros(256)
        self._composed = np.zeros(256)  # for text that a normal form may compose
        if not (_keeps(spec.get("pre_tokenizer")) and _has_pieces(spec["model"])):
            return
        forms = _forms(spec.get("normalizer"))
        if forms is None:
            return
        self._plain = _weights(spec)
        self._composed = self._plain
        if forms:
            ascii = (np.arange(256) < 128) & (self._plain > 0)
            self._composed = np.where(ascii, 1 / _longest(spec), 0.0)

    def least(self, text: str, enough: float = float("inf")) -> int:
        """Return a number of tokens that the text cannot be less than.

        Args:
            enough: Stop counting above this many.
        """
        weights = self._plain if text.isascii() else self._composed
        total = 0.0
        for start in range(0, len(text), _STEP):
            raw = text[start : start + _STEP].encode("utf-8", "replace")
            counts = np.bincount(np.frombuffer(raw, np.uint8), minlength=256)
            total += float(counts @ weights)
            if total > enough + 1:
                break
        return int(total * (1 - 1e-9))


def _weights(spec: Mapping[str, Any]) -> NDArray[np.float64]:
    model = spec["model"]
    byte_level = "ByteLevel" in _kinds(spec.get("pre_tokenizer"))
    vocab = model["vocab"]
    names = list(vocab) if isinstance(vocab, dict) else [piece[0] for piece in vocab]
    pieces = [raw for name in names if (raw := _raw(name, byte_level)) is not None]
    whole = bool(model.get("byte_fallback")) and all(f"<0x{b:02X}>" in vocab for b in range(256))
    alone = {raw[0] for raw in pieces if len(raw) == 1}
    if _SPACE in vocab and not byte_level:
        alone.add(0x20)
    added = [token["content"].encode() for token in spec["added_tokens"]]
    weights = np.zeros(256)
    left = set(range(256))
    for raw in sorted([*pieces, *added], key=len, reverse=True):
        for byte in left.intersection(raw):
            weights[byte] = 1 / len(raw)
            left.discard(byte)
        if 0x20 in left and not byte_level and _SPACE.encode() in raw:
            weights[0x20] = 1 / len(raw)
            left.discard(0x20)
    if whole:
        weights[list(left)] = 1.0
    else:
        # What has no piece of its own is dropped or gathered into one unknown token.
        for byte in range(256):
            if byte not in alone or (byte >= 128 and not byte_level):
                weights[byte] = 0
    if any(token["lstrip"] or token["rstrip"] for token in spec["added_tokens"]):
        weights[list(_BLANK)] = 0
        weights[128:] = 0
    return weights


def _longest(spec: Mapping[str, Any]) -> int:
    vocab = spec["model"]["vocab"]
    names = list(vocab) if isinstance(vocab, dict) else [piece[0] for piece in vocab]
    names += [token["content"] for token in spec["added_tokens"]]
    return max((len(name.encode()) for name in names), default=1)


def _raw(name: str, byte_level: bool) -> bytes | None:
    if not byte_level:
        return name.encode()
    table = byte_level_table()
    try:
        return bytes([table[c] for c in name])
    except KeyError:
        return name.encode()


def _kinds(step: Mapping[str, Any] | None) -> list[str]:
    if step is None:
        return []
    inner = step.get("pretokenizers") or step.get("normalizers") or []
    return [step["type"], *(kind for part in inner for kind in _kinds(part))]


def _keeps(step: Mapping[str, Any] | None) -> bool:
    """Say whether a pre-tokenizer keeps every character."""
    if step is None:
        return True
    if step["type"] == "Sequence":
        return all(map(_keeps, step["pretokenizers"]))
    if step.get("behavior") == "Removed":
        return False
    return step["type"] in _KEEPING or step["type"] == "Split"


def _forms(step: Mapping[str, Any] | None) -> bool | None:
    """Say whether a normalizer composes characters; None where it may drop some."""
    if step is None:
        return False
    match step["type"]:
        case "Sequence":
            parts = [_forms(part) for part in step["normalizers"]]
            return None if None in parts else any(parts)
        case "Prepend":
            return False
        case "Replace" if step["pattern"] == {"String": " "} and step["content"] == _SPACE:
            return False
        case kind:
            return True if kind in _FORMS else None


def _has_pieces(model: Mapping[str, Any]) -> bool:
    """Say whether a model spells every text with pieces of its vocabulary."""
    odd = model.get("continuing_subword_prefix") or model.get("end_of_word_suffix")
    return model.get("type", "BPE") in ("BPE", "Unigram") and not odd
