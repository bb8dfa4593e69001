"""Answers split into thought, content and calls, however the text is cut."""

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tool_parsers import mistral, qwen3_coder

from paceline.runtime.dialect import Dialect
from paceline.runtime.parts import Call, Calling, Content, Manner, Part, Splitter, Thought

THINKS = Dialect(think_open="<think>", think_close="</think>", opens=1, closes=(2,))
HERMES = Dialect()
CALL = (
    '<tool_call>\n{"name": "look", "arguments": {"at": "a \\"b\\" }{", "n": [1, {}]}}\n</tool_call>'
)
ARGUMENTS = '{"at": "a \\"b\\" }{", "n": [1, {}]}'
CALL = f'<tool_call>\n{{"name": "look", "arguments": {ARGUMENTS}}}\n</tool_call>'
BROKEN = "<tool_call>\n no json\n</tool_call>!"
FORCED = '{"name": "x", "arguments": {"a": "}"}}'
XML = "<function=look>\n<parameter=n>\n3\n</parameter>\n</function>"


def split(manner: Manner, pieces: Sequence[str]) -> tuple[list[Part], Splitter]:
    splitter = Splitter(manner)
    parts = [part for piece in pieces for part in splitter.push(piece)]
    return [*parts, *splitter.finish()], splitter


def said(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Content))


def thought(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Thought))


def calls(parts: Sequence[Part]) -> list[tuple[str, str]]:
    """Join the pieces of calls as clients do."""
    found: dict[int, list[str]] = {}
    for part in parts:
        if isinstance(part, Call):
            assert (part.id is None) == (part.name is None)
            if part.name is not None:
                assert part.index not in found
                found[part.index] = [part.name, ""]
            found[part.index][1] += part.arguments
    assert list(found) == list(range(len(found)))
    return [(name, arguments) for name, arguments in found.values()]


def cuts(text: str) -> st.SearchStrategy[list[str]]:
    """Return ways to cut a text."""
    places = st.lists(st.integers(0, len(text)), max_size=12).map(sorted)
    return places.map(
        lambda at: [text[a:b] for a, b in zip([0, *at], [*at, len(text)], strict=True)]
    )


TEXTS: list[tuple[Dialect, bool, Calling, str, str, str, list[tuple[str, str]]]] = [
    (Dialect(), False, "never", " as it is <tool_call>\n", " as it is <tool_call>\n", "", []),
    (THINKS, False, "never", "<think>\nhm, so\n</think>\n\nYes.\n", "Yes.\n", "hm, so", []),
    (THINKS, True, "never", "hm\n\nso</think>Yes", "Yes", "hm\n\nso", []),
    (THINKS, False, "never", "\n\n<think>a</think>b", "b", "a", []),
    (HERMES, False, "maybe", "\n " + CALL, "", "", [("look", ARGUMENTS)]),
    (THINKS, False, "never", "\n\nno <think>here</think>", "\n\nno <think>here</think>", "", []),
    (THINKS, True, "never", "never ends ", "", "never ends", []),
    (HERMES, False, "maybe", "Look:\n" + CALL + "\n", "Look:\n", "", [("look", ARGUMENTS)]),
    (HERMES, False, "maybe", CALL + "\n" + CALL, "", "", [("look", ARGUMENTS)] * 2),
    (HERMES, False, "maybe", "a < b <tool", "a < b <tool", "", []),
    (HERMES, False, "maybe", BROKEN, BROKEN, "", []),
    (HERMES, False, "maybe", BROKEN[:-1] + "\n\n so", BROKEN[:-1] + "\n\n so", "", []),
    (HERMES, False, "maybe", '<tool_call>{"name": "x"}</tool_call>', "", "", [("x", "{}")]),
    (HERMES, False, "maybe", '<tool_call>{"arguments": {}, "name": "x"}', "", "", [("x", "{}")]),
    (HERMES, False, "always", FORCED, "", "", [("x", '{"a": "}"}')]),
    (
        THINKS,
        True,
        "always",
        'let me</think>\n{"name": "x", "arguments": {}}\n',
        "",
        "let me",
        [("x", "{}")],
    ),
    (THINKS, False, "maybe", "<think>a</think>b" + CALL, "b", "a", [("look", ARGUMENTS)]),
]


@pytest.mark.parametrize("case", range(len(TEXTS)))
@given(st.data())
def test_the_same_parts_however_the_text_is_cut(case: int, data: st.DataObject) -> None:
    """What was said, thought and called does not depend on where tokens begin."""
    dialect, thinking, calling, text, content, reasoning, called = TEXTS[case]
    parts, splitter = split(Manner(dialect, thinking, calling), data.draw(cuts(text)))
    assert said(parts) == content
    assert thought(parts) == reasoning
    assert calls(parts) == called
    assert splitter.calls == len(called)
    for part in parts:
        if isinstance(part, Content):
            assert text[part.start :].startswith(part.text)


def test_arguments_come_while_they_are_written() -> None:
    """A call's name is told once it is known, and its arguments piece by piece."""
    splitter = Splitter(Manner(calling="maybe"))
    assert splitter.push('<tool_call>\n{"name": "loo') == []
    head = splitter.push('k", "arguments": {')
    assert [(p.name, p.arguments) for p in head if isinstance(p, Call)] == [
        ("look", ""),
        (None, "{"),
    ]
    more = splitter.push('"a": 1')
    assert [p.arguments for p in more if isinstance(p, Call)] == ['"a": 1']
    assert splitter.calls == 0


def test_a_call_that_is_cut_is_not_complete() -> None:
    """What was written of a call is passed on, and it does not count."""
    parts, splitter = split(Manner(calling="maybe"), [CALL[:50]])
    assert splitter.calls == 0
    ((name, arguments),) = calls(parts)
    assert name == "look"
    assert ARGUMENTS.startswith(arguments)


@pytest.mark.parametrize("calling", ["maybe", "always"])
@pytest.mark.parametrize(
    "call",
    [
        r'{"name": "f\q", "arguments": {}}',
        '{"name": "f\ng", "arguments": {}}',
        r'{"name": "\ud800", "arguments": {}}',
        r'{"arguments": {}, "name": "\ud800"}',
        r'{"name": "f", "arguments": "\udfff"}',
        '{"arguments": {"a": NaN}, "name": "f"}',
        '{"arguments": {"a": -Infinity}, "name": "f"}',
        '{"arguments": {"a": ' + "9" * 5_000 + '}, "name": "f"}',
        '{"arguments": {"a": ' + "[" * 50_000 + "]" * 50_000 + '}, "name": "f"}',
    ],
)
@given(st.data())
def test_a_call_that_cannot_be_told_stays_text(
    call: str, calling: Calling, data: st.DataObject
) -> None:
    """A name or arguments that are no JSON or no Unicode are what the model said, and no fault."""
    text = f"<tool_call>\n{call}\n</tool_call>" if calling == "maybe" else call
    parts, splitter = split(Manner(calling=calling), data.draw(cuts(text)))
    assert said(parts) == text
    assert calls(parts) == []
    assert splitter.calls == 0
    said(parts).encode()


def test_arguments_that_are_null_are_none() -> None:
    """A call without arguments is one with an empty object, as families write it."""
    text = '<tool_call>{"name": "f", "arguments": null}</tool_call>'
    parts, _ = split(Manner(calling="maybe"), [text])
    assert calls(parts) == [("f", "{}")]


@pytest.mark.parametrize(("name", "blank"), [("x" * 30_000, ""), ("x", " " * 100)])
def test_a_call_whose_head_is_too_long_is_read_at_its_end(name: str, blank: str) -> None:
    """What is looked through again at each token is bounded; all of the call is told at once."""
    text = f'<tool_call>{blank}{{"name": "{name}", "arguments": {{"a": 1}}}}</tool_call>'
    parts, _ = split(Manner(calling="maybe"), [text[i : i + 9] for i in range(0, len(text), 9)])
    assert [(p.name, p.arguments) for p in parts if isinstance(p, Call)] == [(name, '{"a": 1}')]


def test_a_familys_parser_is_given_no_endless_text() -> None:
    """Some take the square of a text's length, so a very long call stays text."""
    given: list[int] = []

    def parse(text: str, tools: Any) -> Any:
        given.append(len(text))
        return {"name": "f", "arguments": {}}

    dialect = Dialect(call_open="<c>", call_close="</c>", json_calls=False, parse=parse)
    for size, found in ((100_000, [("f", "{}")]), (200_000, [])):
        splitter = Splitter(Manner(dialect, calling="maybe"))
        parts = splitter.push("<c>")
        assert not splitter.reads_long
        parts += splitter.push("x" * size)
        assert splitter.reads_long
        parts += splitter.push("</c>")
        assert not splitter.reads_long
        assert calls(parts) == found
        assert len(said(parts)) == (0 if found else size + 7)
    assert given == [100_000]


TOOLS: tuple[Any, ...] = (
    {
        "type": "function",
        "function": {
            "name": "look",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}},
        },
    },
)


@pytest.mark.parametrize(
    ("parser", "text", "expected"),
    [
        (
            qwen3_coder,
            f"ok <tool_call>\n{XML}\n</tool_call>",
            [("look", {"n": 3})],
        ),
        (mistral, '[TOOL_CALLS]look[ARGS]{"n": 3}see[ARGS]{}', [("look", {"n": 3}), ("see", {})]),
    ],
)
@given(st.data())
def test_families_are_read_by_their_own_parsers(
    parser: Any, text: str, expected: list[tuple[str, Any]], data: st.DataObject
) -> None:
    """Calls that are not JSON between marks come whole when they are over."""
    dialect = Dialect(
        call_open=parser.tool_call_start,
        call_close=parser.tool_call_end,
        json_calls=False,
        parse=parser.parse_tool_call,
    )
    parts, splitter = split(Manner(dialect, calling="maybe", tools=TOOLS), data.draw(cuts(text)))
    assert [(name, json.loads(found)) for name, found in calls(parts)] == expected
    assert splitter.calls == len(expected)
