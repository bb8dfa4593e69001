"""Grammars: what may come next, looking ahead over drafts, and who is told what is wrong."""

from collections.abc import Sequence

import pytest

from paceline.runtime import grammar
from paceline.runtime.errors import CallerError, RowError
from paceline.runtime.grammar import Follower, Source, Thinking
from paceline.runtime.text import Text

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def _follow(text: Text, source: Source, thinking: Thinking | None = None) -> Follower:
    return text.grammars.compile(source, thinking).follow()


def _may(follower: Follower, ahead: Sequence[int] = ()) -> set[int]:
    allowed = follower.allowed(ahead)
    assert allowed is not None
    return set(map(int, allowed))


def _spell(text: Text, answer: str) -> list[int]:
    return text.encode(answer, add_special=False)


def test_only_what_the_schema_allows_may_come(text: Text) -> None:
    """Every token of a valid answer is allowed where it comes, and a wrong one is not."""
    follower = _follow(text, grammar.json_schema(COLOUR, "schema"))
    for token in _spell(text, '{"colour": "red"}'):
        assert token in _may(follower)
        assert _spell(text, "x")[0] not in _may(follower)
        follower.take(token)
    assert _may(follower) == set(text.end_ids)


def test_looking_ahead_changes_nothing(text: Text) -> None:
    """What drafts would allow is what comes when they are committed, and is forgotten after."""
    follower = _follow(text, grammar.json_schema(COLOUR, "schema"))
    before = _may(follower)
    drafts = _spell(text, '{"colour": "b')
    seen = _may(follower, drafts)
    assert _may(follower) == before
    for token in drafts:
        follower.take(token)
    assert _may(follower) == seen
    assert seen != before


def test_a_draft_against_the_grammar_allows_nothing_after_it(text: Text) -> None:
    """Behind a wrong draft or an end nothing may come, and the row itself is as it was."""
    follower = _follow(text, grammar.json_schema(COLOUR, "schema"))
    before = _may(follower)
    assert not _may(follower, _spell(text, "no"))
    assert not _may(follower, [*_spell(text, '{"colour": "red"}'), min(text.end_ids)])
    assert _may(follower) == before


def test_a_token_against_the_grammar_ends_the_row(text: Text) -> None:
    """Committing what was not allowed is the row's own error."""
    follower = _follow(text, grammar.json_schema(COLOUR, "schema"))
    with pytest.raises(RowError, match="grammar cannot go on"):
        follower.take(_spell(text, "wrong")[0])


def test_twins_go_their_own_ways(text: Text) -> None:
    """A copy does not follow what its original commits."""
    follower = _follow(text, grammar.json_schema(COLOUR, "schema"))
    twin = follower.copy()
    before = _may(twin)
    follower.take(_spell(text, '{"')[0])
    assert _may(twin) == before


def test_blanks_cannot_go_on_for_ever(text: Text) -> None:
    """Between two tokens of JSON sixteen blanks may stand, and not one more."""
    follower = _follow(text, grammar.json_schema(COLOUR, "schema"))
    follower.take(_spell(text, "{")[0])
    blank = _spell(text, " ")[0]
    for _ in range(16):
        assert blank in _may(follower)
        follower.take(blank)
    assert blank not in _may(follower)


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (grammar.regex(r"[0-9]{3}-[a-z]+", "guided_regex"), "123-abc", "12-abc"),
        (grammar.choice(["yes", "no", 'a "quoted" one'], "guided_choice"), "yes", "maybe"),
        (grammar.written("start: /a+/ b\nb: /b+/", "guided_grammar"), "aab", "ba"),
        (grammar.written('root ::= "x" y\ny ::= [0-9]+', "guided_grammar"), "x12", "12"),
        (grammar.json_object("response_format"), '{"a": [1, null]}', "[1]"),
    ],
)
def test_every_way_to_ask_for_a_form(text: Text, source: Source, good: str, bad: str) -> None:
    """Regular expressions, choices, Lark, GBNF and plain JSON objects let through what fits."""
    follower = _follow(text, source)
    tokens = _spell(text, good)
    assert _may(follower, tokens)
    assert not text.end_ids.isdisjoint(_may(follower, tokens))
    wrong = _spell(text, bad)
    assert text.end_ids.isdisjoint(_may(follower, wrong))


@pytest.mark.parametrize(
    ("source", "named"),
    [
        (grammar.json_schema({"not": {"type": "string"}}, "schema"), '"not"'),
        (grammar.json_schema({"type": "array", "uniqueItems": True}, "schema"), '"uniqueItems"'),
        (grammar.json_schema({"type": "colour"}, "schema"), "colour"),
        (grammar.json_schema({"$ref": "#/$defs/none"}, "schema"), "none"),
        (grammar.regex("(ab", "guided_regex"), "guided_regex"),
        (grammar.written("start: missing", "guided_grammar"), "missing"),
    ],
)
def test_what_cannot_be_enforced_is_named(text: Text, source: Source, named: str) -> None:
    """A grammar that is none, or asks too much, is refused with its field and its keyword."""
    with pytest.raises(CallerError) as caught:
        text.grammars.compile(source)
    assert named in caught.value.message
    assert caught.value.param == source.param
    assert "\n" not in caught.value.message


def test_a_schema_that_is_no_object_is_refused() -> None:
    """A schema must be an object, and what is wrong with it is said of its field."""
    with pytest.raises(CallerError, match="schema: a JSON schema must be an object"):
        grammar.json_schema(["string"], "schema")


def test_lenient_leaves_out_what_it_cannot_enforce(text: Text) -> None:
    """Tools that are not strict may carry keywords that nothing enforces."""
    source = grammar.json_schema({"type": "array", "uniqueItems": True}, "tools", lenient=True)
    follower = _follow(text, source)
    assert _may(follower, _spell(text, "[1, 1]"))


def test_a_grammar_sleeps_while_the_model_thinks(text: Text) -> None:
    """Where the prompt began a thought, all may come until the thought is closed."""
    closes = tuple(_spell(text, "</think>"))
    follower = _follow(text, grammar.json_object("f"), Thinking(None, closes))
    for token in _spell(text, "what a colour"):
        assert follower.allowed() is None
        follower.take(token)
    assert follower.allowed(closes[:-1]) is None
    assert follower.allowed(closes) is not None
    assert follower.copy().allowed() is None
    for token in closes:
        follower.take(token)
    assert _spell(text, "x")[0] not in _may(follower)


def test_a_model_that_may_think_may_begin_a_thought_or_answer(text: Text) -> None:
    """At the very front the opening mark is allowed beside the answer, and nowhere later."""
    opens, closes = _spell(text, "#")[0], tuple(_spell(text, "%%"))
    follower = _follow(text, grammar.json_object("f"), Thinking(opens, closes))
    assert opens in _may(follower)
    assert follower.allowed([opens]) is None
    brace = _spell(text, "{")[0]
    assert opens not in _may(follower, [brace])
    follower.take(brace)
    assert opens not in _may(follower)
