"""A text is refused by its length only where no tokenizer's luck could make it fit."""

import json
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.runtime.test_pieces import MAKERS, byte_level, encoded
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from paceline.runtime.lengths import Lengths

_TEXT = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from("ab \n\t.\u00e9\u0301\u4f60")
    ),
    max_size=80,
)


def _normal() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _stripped() -> Tokenizer:
    tokenizer = byte_level()
    steps = [normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()]
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _dropping() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


def _gathering() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<|pad|>", lstrip=True, rstrip=True)])
    return tokenizer


def _lengths(tokenizer: Tokenizer) -> Lengths:
    return Lengths(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("make", [*MAKERS, _normal, _stripped, _dropping, _gathering])
@settings(max_examples=150)
@given(text=_TEXT)
def test_no_text_has_fewer_tokens_than_the_bound(make: Callable[[], Tokenizer], text: str) -> None:
    """The bound holds for every text, with whatever a tokenizer drops, joins or adds."""
    tokenizer = make()
    found = len(encoded(tokenizer, text))
    assert _lengths(tokenizer).least(text) <= found


def test_long_texts_are_seen_to_be_long() -> None:
    """A byte-level tokenizer of single letters cannot make a text shorter than the letters."""
    lengths = _lengths(byte_level())
    assert lengths.least("q" * 1_000_000) > 900_000
    assert lengths.least("q" * 1_000_000, enough=100) >= 100
    assert _lengths(_dropping()).least(" " * 1_000_000) == 0
    assert _lengths(byte_level()).least(" " * 1_000_000) == 0  # an added token takes all of them
