"""Tokens read as the tokenizer itself reads them, whole and one at a time."""

from collections.abc import Callable

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from paceline.runtime.pieces import Pieces

_ADDED = [
    "    ",
    "\n\n",
    "\t",
    " x",
    "<\uff5cUser\uff5c>",
    "\u4f60",
    "\u00e9",
    "\u0120a",
    "a b\u00e9",
]


def _add(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens(["<|end|>", "<\uff5cstop\uff5c>"])
    kinds = [{}, {"normalized": False}, {"lstrip": True}, {"rstrip": True}]
    tokenizer.add_tokens([AddedToken(t, **kinds[i % 4]) for i, t in enumerate(_ADDED)])
    return tokenizer


def byte_level() -> Tokenizer:
    """Return a byte-level tokenizer as GPT-2's, with added tokens of all kinds."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab | {"\u0120a": 256}, [("\u0120", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return _add(tokenizer)


def llama() -> Tokenizer:
    """Return a SentencePiece-like tokenizer with byte fallback, as Llama 2's."""
    names = [
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "\u2581",
        "a",
        "b",
        "\u2581a",
        "\u4f60",
    ]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = Tokenizer(
        models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _add(tokenizer)


def metaspace() -> Tokenizer:
    """Return a Unigram tokenizer with SentencePiece's own stand-in for spaces."""
    names = ["<unk>", "\u2581", "a", "b", "\u2581a", "\u2581\u2581", "\u4f60"]
    tokenizer = Tokenizer(models.Unigram([(name, -1.0) for name in names], unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    return _add(tokenizer)


def word_pieces() -> Tokenizer:
    """Return a WordPiece tokenizer, whose tokens do not simply join."""
    vocab = {"[UNK]": 0, "a": 1, "##b": 2, "b": 3, ".": 4}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return _add(tokenizer)


MAKERS: list[Callable[[], Tokenizer]] = [byte_level, llama, metaspace, word_pieces]


@pytest.mark.parametrize("make", MAKERS)
@settings(max_examples=150)
@given(data=st.data())
def test_any_tokens_read_as_the_tokenizer_reads_them(
    make: Callable[[], Tokenizer], data: st.DataObject
) -> None:
    """Whole, and joined from pieces wherever each character is whole."""
    tokenizer = make()
    pieces = Pieces(tokenizer)
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() - 1), max_size=12))
    own = tokenizer.decode(ids, skip_special_tokens=False)
    assert pieces.decode(ids) == own
    stream = pieces.stream()
    joined = "".join(map(stream.push, ids))
    if "\ufffd" not in own:
        assert joined == own
    if pieces.joins and not (pieces.lead or pieces.bare_first) and "\ufffd" not in own:
        assert b"".join(map(pieces.bytes_of, ids)).decode() == own


def encoded(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return a text's tokens; an example that the library itself panics on is passed over."""
    try:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)
    except BaseException as error:
        assume(type(error).__name__ != "PanicException")
        raise


@settings(max_examples=150)
@given(
    st.lists(st.sampled_from([*_ADDED, "if x:", "\n", "    return 1", " ", "\u00e8"]), max_size=8)
)
def test_what_a_byte_level_tokenizer_reads_comes_back(texts: list[str]) -> None:
    """Indentation, line breaks and other scripts survive, whichever tokens were added for them."""
    tokenizer = byte_level()
    text = "".join(texts).replace("\u00e9", "").replace("\u0120", "")
    ids = encoded(tokenizer, text)
    own = tokenizer.decode(ids, skip_special_tokens=False)
    stream = Pieces(tokenizer).stream()
    assert "".join(map(stream.push, ids)) == own
    assert Pieces(tokenizer).decode(ids) == own


def test_a_text_behind_another_keeps_its_first_space() -> None:
    """What goes on with a prompt says the space between them."""
    pieces = Pieces(llama())
    token = llama().token_to_id("\u2581a") or 0
    alone, behind = pieces.stream(), pieces.stream()
    behind.go_on()
    assert (alone.push(token), behind.push(token)) == ("a", " a")
    assert pieces.bytes_of(token) == b" a"


def test_unknown_tokens_read_as_nothing() -> None:
    """A token beyond the vocabulary has no text and breaks none."""
    pieces = Pieces(byte_level())
    assert pieces.bytes_of(10**6) == b""
    assert pieces.decode([10**6, 0]) == pieces.decode([0])
