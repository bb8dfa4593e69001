"""The starter model's tokenizer: injection, half characters, and the template."""

import sys
import threading
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.runtime import text as text_module
from paceline.runtime.errors import CallerError, ContextOverflow
from paceline.runtime.model import find_model
from paceline.runtime.text import Detokenizer, Text

# The vocabulary lacks a few control characters and the bytes F1 and up of rare planes.
_COVERED = st.characters(min_codepoint=0x20, max_codepoint=0x3FFFF, exclude_categories=["Cs"])


def test_the_tokenizer_is_the_published_one(text: Text) -> None:
    """Digits stand alone, contractions and spaces split as SmolLM2's own tokenizer splits them."""
    assert [text.decode([t]) for t in text.encode("It's 2024, ok?")] == [
        "It", "'s", " ", "2", "0", "2", "4", ",", " ok", "?",
    ]  # fmt: skip
    assert (text.vocab_size, text.end_ids) == (49_152, frozenset({2}))


def test_the_template_opens_an_answer(text: Text) -> None:
    """A conversation ends with the assistant's turn opened, and has the default system turn."""
    shown = text.decode(text.encode_chat([{"role": "user", "content": "hello"}]))
    assert shown.startswith("<|im_start|>system\n")
    assert shown.endswith("<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("marker", ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<file_sep>"])
def test_a_control_token_typed_by_a_user_stays_text(text: Text, marker: str) -> None:
    """No user can close a turn: the marker is encoded as characters, and reads the same."""
    plain = text.encode_chat([{"role": "user", "content": "ab"}])
    typed = text.encode_chat([{"role": "user", "content": f"a{marker}b"}])
    control = text.encode(marker)
    assert len(control) == 1
    assert typed.count(control[0]) == plain.count(control[0])
    assert text.decode(typed) == text.decode(plain).replace("ab", f"a{marker}b")


def test_conversations_without_markers_are_tokenized_the_plain_way(text: Text) -> None:
    """The shield against markers changes nothing where there are none."""
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "caf\u00e9 \U0001f680 \ue000"},
    ]
    rendered = (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\ncaf\u00e9 \U0001f680 \ue000<|im_end|>\n<|im_start|>assistant\n"
    )
    assert text.encode_chat(messages) == text.encode(rendered, add_special=False)


@settings(max_examples=200)
@given(st.text(_COVERED, max_size=60))
def test_text_survives_token_by_token(text: Text, original: str) -> None:
    """Joined deltas give the text back, and no delta ever holds half a character."""
    detokenizer = Detokenizer(text)
    pieces = [detokenizer.push(token) for token in text.encode(original)]
    assert "".join(pieces) == original
    if "\ufffd" not in original:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_cut_short_is_left_out(text: Text) -> None:
    """The text of a shorter answer begins that of a longer one, wherever it is cut."""
    tokens = text.encode("go \U0001f680\U0001f642 \u4f60\u597d")
    shown = []
    for size in range(len(tokens) + 1):
        detokenizer = Detokenizer(text)
        shown.append("".join(map(detokenizer.push, tokens[:size])))
    for shorter, longer in pairwise(shown):
        assert longer.startswith(shorter)
        assert "\ufffd" not in longer


def test_a_template_that_refuses_is_the_callers_error(text: Text) -> None:
    """What the template cannot render is a 400, not a crash."""
    with pytest.raises(CallerError) as error:
        text.encode_chat([{"role": "user", "content": {"not": "text"}}])
    assert error.value.param == "messages"


_ASK = [{"role": "user", "content": "q" * 400_000}]
_LONGER = [{"role": "user", "content": "q" * 30_000_000}]


@pytest.mark.parametrize(
    ("work", "said", "unsaid"),
    [
        (lambda text: text.chat(_LONGER), "messages: texts of more than 262144", "context length"),
        (lambda text: text.encode("# \n" * 800_000), "prompt: texts of more than 262144", "model"),
        (lambda text: text.chat(_ASK, most=64), "context length is 64", "not counted"),
    ],
)
def test_a_bound_of_counting_is_not_called_the_models(
    text: Text, work: Callable[[Text], object], said: str, unsaid: str
) -> None:
    """What is only counted is bounded as well, which says nothing of the model's window."""
    with pytest.raises(ContextOverflow) as error:
        work(text)
    assert said in error.value.message
    assert unsaid not in error.value.message


def test_a_long_text_builds_no_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The table of lengths is there when the model is; the first long request waits for nothing."""
    loaded = Text(find_model("starter"))

    def never(*_: object) -> None:
        raise AssertionError("built at a request")

    monkeypatch.setattr(text_module, "Lengths", never)
    with pytest.raises(ContextOverflow):
        loaded.encode("q" * 400_000, most=64)


@pytest.mark.parametrize(
    "work",
    [
        lambda text: text.encode("q" * 400_000, most=64),
        lambda text: text.chat(_ASK, most=64, where="input"),
        lambda text: text.encode("q" * 30_000_000),
        lambda text: text.chat(_LONGER),
    ],
)
def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    text: Text, monkeypatch: pytest.MonkeyPatch, work: Callable[[Text], object]
) -> None:
    """Its bytes alone say so; what is only counted has a bound as well."""

    def never(*_: object) -> list[int]:
        raise AssertionError("tokenized")

    monkeypatch.setattr(text_module, "_ids", never)
    with pytest.raises(ContextOverflow, match="more than"):
        work(text)


def test_a_text_that_looks_short_is_measured_piece_by_piece(
    text: Text, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where bytes alone do not tell, no more is tokenized than it takes to know."""
    sizes: list[int] = []
    whole = text_module._ids

    def seen(tokenizer: object, piece: str, *rest: object) -> list[int]:
        sizes.append(len(piece))
        return whole(tokenizer, piece, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(text_module, "_ids", seen)
    with pytest.raises(ContextOverflow):
        text.encode("# \n" * 200_000, most=12_000)
    assert max(sizes) <= 65_536
    assert sum(sizes) < 600_000


@pytest.mark.parametrize("kind", ["encode", "chat", "decode"])
def test_other_threads_run_while_text_is_worked_on(text: Text, kind: str) -> None:
    """A thread that wakes meanwhile gets its turn, although the interpreter never takes turns."""
    long = "The quick brown fox jumps over the lazy dog. " * 10_000
    tokens = [1000] * 1_000_000
    start, ran = threading.Lock(), threading.Event()
    start.acquire()

    def wake() -> None:
        with start:
            ran.set()

    thread = threading.Thread(target=wake)
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000)
    try:
        start.release()
        if kind == "encode":
            text.encode(long)
        elif kind == "chat":
            text.chat([{"role": "user", "content": long}])
        else:
            text.decode(tokens)
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()
