"""Grammars: what may come next, looking ahead over drafts, and who is told what is wrong."""

import json
import random
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.runtime import sources
from paceline.runtime.errors import CallerError, RowError
from paceline.runtime.grammar import Follower, Thinking
from paceline.runtime.sources import Source
from paceline.runtime.text import Text

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


def _follow(text: Text, source: Source, thinking: Thinking | None = None) -> Follower:
    return text.grammars.compile(source, thinking).follow()


def _may(follower: Follower, ahead: Sequence[int] = (), left: int | None = None) -> set[int]:
    allowed = follower.allowed(ahead, left)
    assert allowed is not None
    return set(map(int, allowed))


def _spell(text: Text, answer: str) -> list[int]:
    return text.encode(answer, add_special=False)


def test_only_what_the_schema_allows_may_come(text: Text) -> None:
    """Every token of a valid answer is allowed where it comes, and a wrong one is not."""
    follower = _follow(text, sources.json_schema(COLOUR, "schema"))
    for token in _spell(text, '{"colour": "red"}'):
        assert token in _may(follower)
        assert _spell(text, "x")[0] not in _may(follower)
        follower.take(token)
    assert _may(follower) == set(text.end_ids)


def test_looking_ahead_changes_nothing(text: Text) -> None:
    """What drafts would allow is what comes when they are committed, and is forgotten after."""
    follower = _follow(text, sources.json_schema(COLOUR, "schema"))
    before = _may(follower)
    drafts = _spell(text, '{"colour": "b')
    seen = _may(follower, drafts)
    assert _may(follower) == before
    for token in drafts:
        follower.take(token)
    assert _may(follower) == seen
    assert seen != before


def test_what_was_looked_at_leaves_no_trace(text: Text) -> None:
    """Two ways of one length behind the same tokens: the second has its own masks."""
    follower = _follow(text, sources.json_schema({"minProperties": 1}, "schema"))
    for token in _spell(text, '{\n "data'):
        follower.take(token)
    brace, bracket = ([*_spell(text, f'": {c}'), *_spell(text, "\n   ")] for c in "{[")
    assert len(brace) == len(bracket)
    closes = _spell(text, "}")[0], _spell(text, "]")[0]
    for _ in range(2):
        for left in (None, 57):
            assert [c in _may(follower, brace, left) for c in closes] == [True, False]
            assert [c in _may(follower, bracket, left) for c in closes] == [False, True]


def test_a_draft_against_the_grammar_allows_nothing_after_it(text: Text) -> None:
    """Behind a wrong draft or an end nothing may come, and the row itself is as it was."""
    follower = _follow(text, sources.json_schema(COLOUR, "schema"))
    before = _may(follower)
    assert not _may(follower, _spell(text, "no"))
    assert not _may(follower, [*_spell(text, '{"colour": "red"}'), min(text.end_ids)])
    may_end = _follow(text, sources.regex("[a-z]+", "guided_regex"))
    assert not _may(may_end, [*_spell(text, "ab"), min(text.end_ids)])
    assert _may(follower) == before


def test_a_token_against_the_grammar_ends_the_row(text: Text) -> None:
    """Committing what was not allowed is the row's own error."""
    follower = _follow(text, sources.json_schema(COLOUR, "schema"))
    with pytest.raises(RowError, match="grammar cannot go on"):
        follower.take(_spell(text, "wrong")[0])


def test_a_grammar_is_compiled_once(text: Text) -> None:
    """The same form asked for again is there already, and its rows do not know each other."""
    source = sources.json_schema(COLOUR, "schema")
    one, other = text.grammars.compile(source), text.grammars.compile(source)
    assert one is other
    first, second = one.follow(), other.follow()
    before = _may(second)
    first.take(_spell(text, '{"')[0])
    assert _may(second) == before


def test_twins_go_their_own_ways(text: Text) -> None:
    """A copy does not follow what its original commits."""
    follower = _follow(text, sources.json_schema(COLOUR, "schema"))
    twin = follower.copy()
    before = _may(twin)
    follower.take(_spell(text, '{"')[0])
    assert _may(twin) == before


def test_blanks_cannot_go_on_for_ever(text: Text) -> None:
    """Between two tokens of JSON sixteen blanks may stand, and not one more."""
    follower = _follow(text, sources.json_schema(COLOUR, "schema"))
    follower.take(_spell(text, "{")[0])
    blank = _spell(text, " ")[0]
    for _ in range(16):
        assert blank in _may(follower)
        follower.take(blank)
    assert blank not in _may(follower)


@pytest.mark.parametrize(
    ("source", "good", "bad"),
    [
        (sources.regex(r"[0-9]{3}-[a-z]+", "guided_regex"), "123-abc", "12-abc"),
        (sources.choice(["yes", "no", 'a "quoted" one'], "guided_choice"), "yes", "maybe"),
        (sources.written("start: /a+/ b\nb: /b+/", "guided_grammar"), "aab", "ba"),
        (sources.written('root ::= "x" y\ny ::= [0-9]+', "guided_grammar"), "x12", "12"),
        (sources.json_object("response_format"), '{"a": [1, null]}', "[1]"),
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
        (sources.json_schema({"not": {"type": "string"}}, "schema"), '"not"'),
        (sources.json_schema({"type": "array", "uniqueItems": True}, "schema"), '"uniqueItems"'),
        (sources.json_schema({"type": "colour"}, "schema"), "colour"),
        (sources.json_schema({"$ref": "#/$defs/none"}, "schema"), "none"),
        (sources.regex("(ab", "guided_regex"), "guided_regex"),
        (sources.written("start: missing", "guided_grammar"), "missing"),
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
        sources.json_schema(["string"], "schema")


def test_lenient_leaves_out_what_it_cannot_enforce(text: Text) -> None:
    """Tools that are not strict may carry keywords that nothing enforces."""
    odd = {
        "type": "array",
        "uniqueItems": True,
        "items": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
        "contains": {"type": "string", "format": "who-knows"},
    }
    with pytest.raises(CallerError):
        text.grammars.compile(sources.json_schema(odd, "tools"))
    follower = _follow(text, sources.json_schema(odd, "tools", lenient=True))
    assert _may(follower, _spell(text, "[1, 1]"))


def test_a_grammar_sleeps_while_the_model_thinks(text: Text) -> None:
    """Where the prompt began a thought, all may come until the thought is closed."""
    closes = tuple(_spell(text, "</think>"))
    follower = _follow(text, sources.json_object("f"), Thinking(None, closes))
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
    follower = _follow(text, sources.json_object("f"), Thinking(opens, closes))
    assert opens in _may(follower)
    assert follower.allowed([opens]) is None
    brace = _spell(text, "{")[0]
    assert opens not in _may(follower, [brace])
    follower.take(brace)
    assert opens not in _may(follower)


LOOPS = {
    "type": "object",
    "properties": {
        "a": {"type": "string", "minLength": 3},
        "b": {"type": "array", "items": {"type": "integer"}, "minItems": 2},
        "c": {"type": "object"},
        "d": {"type": "string", "format": "date"},
    },
    "required": ["a", "b", "c", "d"],
}


TREE = {
    "type": "object",
    "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["next"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("schema", [LOOPS, TREE, {"type": "object"}, {"type": "array"}])
@pytest.mark.parametrize("wanders", [0, 7, 60])
def test_an_answer_is_whole_within_its_budget(text: Text, schema: Any, wanders: int) -> None:
    """Whatever it does first, an answer ends as JSON before its budget cuts it."""
    follower = _follow(text, sources.json_schema(schema, "s"))
    rng, budget = random.Random(wanders), 120
    said: list[int] = []
    while len(said) < budget:
        may = sorted(follower.allowed((), budget - len(said)))  # type: ignore[arg-type]
        inside = [token for token in may if token not in text.end_ids]
        token = int(rng.choice(inside or may) if len(said) < wanders else may[-1])
        said.append(token)
        if token in text.end_ids:
            break
        follower.take(token)
    assert said[-1] in text.end_ids
    found = json.loads(text.decode(said[:-1]))
    if "required" in schema:
        assert set(schema["required"]) <= set(found)


def test_looking_ahead_knows_the_budget(text: Text) -> None:
    """What drafts would allow near the end is what comes when they are committed."""
    follower, twin = (_follow(text, sources.json_schema(LOOPS, "s")) for _ in range(2))
    for left in range(90, 0, -1):
        may = follower.allowed((), left)
        assert may is not None
        token = int(may[len(may) // 2])
        if token in text.end_ids:
            return
        twin.allowed((), left)
        ahead = twin.allowed([token], left - 1)
        follower.take(token)
        twin.take(token)
        assert list(ahead) == list(follower.allowed((), left - 1))  # type: ignore[arg-type]


def test_objects_keep_to_the_properties_they_list(text: Text) -> None:
    """A model cannot make up properties, unless the schema says that it may."""
    listed = {"type": "object", "properties": {"a": {"const": {"properties": {}}}}}
    assert sources.closed(listed) == {**listed, "additionalProperties": False}
    open_one = {**listed, "additionalProperties": True}
    assert sources.closed(open_one) == open_one
    nested = sources.closed({"type": "array", "items": listed})
    assert nested["items"]["additionalProperties"] is False
    named = {"type": "object", "properties": {"properties": {"type": "object"}}}
    assert sources.closed(named) == {**named, "additionalProperties": False}
    for whole in ({"allOf": [listed]}, {**listed, "anyOf": [{}]}, {**listed, "$ref": "#"}):
        assert sources.closed(whole) == whole
