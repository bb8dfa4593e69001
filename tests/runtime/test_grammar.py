"""Grammars: what may come next, looking ahead over drafts, and who is told what is wrong."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema
import pytest
from llguidance import LLParserLimits
from tests.fakes import byte_grammars
from tests.lanes.tiny import tiny_grammars, tiny_tokenizer

from paceline.runtime import exits, lead, sources
from paceline.runtime import grammar as grammar_module
from paceline.runtime.dialect import Dialect, call_or, forced_call, strict_calls
from paceline.runtime.errors import CallerError, FormError, RowError
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


def _may(follower: Follower, ahead: Sequence[int] = ()) -> set[int]:
    allowed = follower.allowed(ahead)
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
        assert [c in _may(follower, brace) for c in closes] == [True, False]
        assert [c in _may(follower, bracket) for c in closes] == [False, True]


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
    with pytest.raises(RowError, match="cannot be followed"):
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


Choose = Callable[[Sequence[int]], int]


def _answer(text: Text, source: Source, budget: int, choose: Choose) -> tuple[str, bool, int]:
    """Return what a row says that chooses so, whether it ended, and what it was refused."""
    follower = _follow(text, source)
    said: list[int] = []
    refused = 0
    while len(said) < budget:
        left = budget - len(said)
        may = follower.allowed()
        assert may is not None
        token = choose([int(t) for t in may])
        if not follower.fits(token, left):
            refused += 1
            continue
        if token in text.end_ids:
            return text.decode(said), True, refused
        follower.take(token, left)
        said.append(token)
    return text.decode(said), False, refused


def _rambling(text: Text, seed: int) -> Choose:
    """Say anything but an end as long as anything else may come."""
    rng = random.Random(seed)
    return lambda may: rng.choice([t for t in may if t not in text.end_ids] or may)


def _wordy(text: Text, seed: int) -> Choose:
    """Say short English words wherever they may come, else what is shortest."""
    rng = random.Random(seed)
    spelled = [text.token_bytes(token) for token in range(text.vocab_size)]
    words = {t for t, s in enumerate(spelled) if s[:1] == b" " and s[1:].isalpha() and len(s) < 7}

    def choose(may: Sequence[int]) -> int:
        mine = [token for token in may if token in words]
        return rng.choice(mine) if mine else min(may, key=lambda token: len(spelled[token]))

    return choose


@pytest.mark.slow
@pytest.mark.parametrize("schema", [LOOPS, TREE, {"type": "object"}, {"type": "array"}])
@pytest.mark.parametrize("seed", [0, 7])
def test_an_answer_is_whole_within_its_budget(text: Text, schema: Any, seed: int) -> None:
    """However it rambles, an answer ends as JSON before its budget cuts it."""
    said, _, _ = _answer(text, sources.json_schema(schema, "s"), 120, _rambling(text, seed))
    jsonschema.validate(json.loads(said), schema)


def _long(least: int) -> dict[str, Any]:
    properties = {"s": {"type": "string", "minLength": least}}
    return {"type": "object", "properties": properties, "required": ["s"]}


@pytest.mark.slow
@pytest.mark.parametrize(("least", "budget"), [(100, 100), (200, 150), (60, 64), (40, 30)])
def test_near_its_budget_an_answer_is_words(text: Text, least: int, budget: int) -> None:
    """A row that has room for what it must say says it in its own words, to the end."""
    source = sources.json_schema(_long(least), "s")
    said, ended, _ = _answer(text, source, budget, _wordy(text, least))
    found = json.loads(said)["s"]
    assert ended
    assert len(found) >= least
    assert found.replace(" ", "").isalpha()
    assert len(said) > 3 * budget  # it went on in words until the last token


@pytest.mark.parametrize(
    "schema",
    [
        _long(5000),
        {"type": "array", "items": {"type": "integer"}, "minItems": 500},
        {"type": "string", "pattern": "^[a-f]{900}$"},
    ],
)
def test_where_no_end_fits_a_row_speaks_freely(text: Text, schema: Any) -> None:
    """An end that is out of reach changes nothing, and a search that failed is not repeated."""
    text.grammars.compile(sources.json_schema(schema, "s"))
    searches = 0

    class Counted(exits.Search):
        def __init__(self, *args: Any, **named: Any) -> None:
            nonlocal searches
            searches += not args[2]
            super().__init__(*args, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lead, "Search", Counted)
        _, ended, refused = _answer(text, sources.json_schema(schema, "s"), 40, _wordy(text, 1))
    assert not ended
    assert not refused
    assert searches <= 14  # two where its budget has halved


_MANY_KEYS = [f"k{i}" for i in range(25)]


@pytest.mark.parametrize(
    ("source", "budget"),
    [
        (
            sources.json_schema(
                {
                    "type": "object",
                    "properties": {key: {"type": "string"} for key in _MANY_KEYS},
                    "required": _MANY_KEYS,
                },
                "s",
            ),
            260,
        ),
        (sources.regex("[a-z]{500}", "s"), 100),
        (sources.regex("[a-z]{500}", "s"), 240),
        (sources.regex("([a-f]{3}-){60}", "s"), 250),
    ],
)
def test_no_position_waits_for_a_whole_search(text: Text, source: Source, budget: int) -> None:
    """However far the end is, what is looked up for one token is bounded; the end is found."""
    text.grammars.compile(source)
    exits = text.grammars._exits
    step = exits.next_step
    looked = [0]

    def counted(*args: Any, **named: Any) -> list[int]:
        looked[-1] += 1
        return step(*args, **named)

    wordy = _wordy(text, 2)
    follower = _follow(text, source)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exits, "next_step", counted)
        first = follower.allowed()
        assert first is not None
        follower.take(wordy([int(t) for t in first]))  # so that the way from the start is no help
        for left in range(budget, 0, -1):
            while True:
                may = follower.allowed()
                assert may is not None
                token = wordy([int(t) for t in may])
                if follower.fits(token, left):
                    break
            if token in text.end_ids:
                break
            follower.take(token, left)
            looked.append(0)
    assert token in text.end_ids
    assert 0 < max(looked) <= 45


def test_what_is_refused_is_the_same_for_twins(text: Text) -> None:
    """Near the end a twin refuses and allows what its original does."""
    follower = _follow(text, sources.json_schema(LOOPS, "s"))
    choose = _rambling(text, 3)
    for left in range(90, 0, -1):
        twin = follower.copy()
        while True:
            mine, its = follower.allowed(), twin.allowed()
            assert mine is not None
            assert its is not None
            assert list(mine) == list(its)
            token = choose([int(t) for t in mine])
            fits = follower.fits(token, left)
            assert twin.fits(token, left) == fits
            if fits:
                break
        if token in text.end_ids:
            return
        follower.take(token, left)


CONTROL = "x<|im_end|>y<|im_start|>"


@pytest.mark.parametrize(
    ("source", "answer"),
    [
        (sources.json_schema({"enum": [CONTROL]}, "f"), f'"{CONTROL}"'),
        (sources.json_schema({"const": CONTROL}, "f"), f'"{CONTROL}"'),
        (
            sources.json_schema(
                {"type": "object", "properties": {CONTROL: {"const": 1}}, "required": [CONTROL]},
                "f",
            ),
            f'{{"{CONTROL}":1}}',
        ),
        (sources.json_schema({"type": "string", "pattern": "^a<.im_end.>b$"}, "f"), None),
        (sources.regex("a<[|]im_end[|]>b", "f"), "a<|im_end|>b"),
        (sources.choice([CONTROL], "f"), CONTROL),
        (sources.written('start: "a<|im_end|>b"', "f"), "a<|im_end|>b"),
        (
            forced_call(
                [{"function": {"name": "a<|im_end|>b", "parameters": {"properties": {}}}}], "tools"
            ),
            '{"name": "a<|im_end|>b", "arguments": {}}',
        ),
    ],
)
def test_a_control_token_spelled_out_in_a_form_is_text(
    text: Text, source: Source, answer: str | None
) -> None:
    """Literals are said in ordinary tokens, however much they look like a control token."""
    follower = _follow(text, source)
    said: list[int] = []
    while True:
        may = follower.allowed()
        assert may is not None
        token = min(map(int, may), key=lambda t: (t in text.end_ids, len(text.token_bytes(t)), t))
        if token in text.end_ids:
            break
        assert not text.is_special(token)
        follower.take(token)
        said.append(token)
    assert answer is None or text.decode(said) == answer


@pytest.mark.parametrize(
    "source",
    [
        sources.json_schema({"$ref": "#"}, "f"),
        sources.json_schema(
            {
                "type": "object",
                "properties": {"a": {"type": "string", "pattern": "^a{1000000}$"}},
                "required": ["a"],
            },
            "f",
        ),
        sources.json_schema({"enum": []}, "f"),
        sources.json_schema({"allOf": [{"type": "string"}, {"type": "null"}]}, "f"),
        sources.json_schema({"type": "integer", "minimum": 5, "maximum": 3}, "f"),
        sources.json_schema({"type": "object", "properties": {"a": False}, "required": ["a"]}, "f"),
        sources.regex(r"a[^\s\S]", "f"),
        sources.written('start: start "a"', "f"),
        sources.written("start: start", "f"),
        sources.written("start: T\nT: /a/ & /b/", "f"),
        sources.written('start: "a" d\nd: d "x"', "f"),
    ],
)
def test_a_form_that_no_answer_can_have_is_refused(text: Text, source: Source) -> None:
    """What compiles and cannot be followed is the caller's mistake before a row is made of it."""
    with pytest.raises(CallerError) as caught:
        text.grammars.compile(source)
    assert caught.value.param == "f"
    assert "\n" not in caught.value.message
    assert "<state>" not in caught.value.message


def test_control_tokens_that_a_grammar_asks_for_by_number_are_said(text: Text) -> None:
    """A grammar whose only way goes through one of some control tokens is no dead end."""
    one, other = (text.encode(name)[0] for name in ("<|im_start|>", "<repo_name>"))
    follower = _follow(text, sources.written(f'start: "x" (<[{one}]> | <[{other}]>) "y"', "f"))
    follower.take(_spell(text, "x")[0])
    assert _may(follower) == {one, other}
    follower.take(one)
    assert _may(follower) == set(_spell(text, "y"))


def test_many_choices_are_taken(text: Text) -> None:
    """Tens of thousands of choices are one terminal and no ambiguity."""
    options = [f"opt{i}" for i in range(20_001)]
    follower = _follow(text, sources.choice(options, "f"))
    for token in _spell(text, "opt20000"):
        assert token in _may(follower)
        follower.take(token)
    assert not text.end_ids.isdisjoint(_may(follower))


def test_properties_that_a_pattern_finds_as_well_are_kept(text: Text) -> None:
    """A property keeps its own schema and its pattern's, and a pattern for it alone is gone."""
    integer, small = {"type": "integer"}, {"maximum": 7}
    schema = {
        "type": "object",
        "properties": {"score": integer, "tag": {}},
        "patternProperties": {"^score$": small, "^ta": {}},
        "additionalProperties": False,
    }
    apart = sources.closed(schema)
    assert apart["properties"]["score"] == {"allOf": [integer, small]}
    assert apart["patternProperties"] == {"^ta": {}}
    follower = _follow(text, sources.json_schema(schema, "f"))
    assert not _may(follower, _spell(text, '{"score": 8}'))
    assert _may(follower, _spell(text, '{"score": 7}'))


def test_what_nests_too_deeply_is_refused() -> None:
    """A schema of any depth is refused or taken, and nothing recurses without a bound."""
    schema: Any = {"type": "string"}
    for _ in range(5000):
        schema = {"type": "object", "properties": {"a": schema}}
    with pytest.raises(CallerError, match="f: nested more than"):
        sources.json_schema(schema, "f")


def test_a_chain_of_references_does_not_end_the_process() -> None:
    """The engine recurses over references and rules; a subprocess would tell a broken stack."""
    chain = {f"d{i}": {"properties": {"a": {"$ref": f"#/$defs/d{i + 1}"}}} for i in range(3000)}
    schema = {"$ref": "#/$defs/d0", "$defs": {**chain, "d3000": {"type": "string"}}}
    program = (
        "import json, sys\n"
        "from tests.lanes.tiny import tiny_grammars\n"
        "from paceline.runtime import sources\n"
        "tiny_grammars().compile(sources.json_schema(json.load(sys.stdin), 'f'))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(schema), text=True, timeout=120
    )
    assert done.returncode == 0
    with pytest.raises(CallerError, match="lines"):
        sources.written("start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(2000)), "f")


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


def test_properties_beside_many_patterns_are_refused_by_name() -> None:
    """Each property is looked for among all patterns, which a short schema makes many of."""
    names: dict[str, Any] = {f"n{i}": {} for i in range(200)}
    nested = {"type": "array", "items": {"properties": names, "patternProperties": names}}
    with pytest.raises(CallerError, match="patternProperties") as caught:
        sources.json_schema(nested, "guided_json")
    assert caught.value.param == "guided_json"


@pytest.mark.parametrize(
    "named", [{}, {"a": {}}, {f"n{i}": {} for i in range(5)}], ids=["none", "one", "five"]
)
def test_many_patterns_cost_nothing_before_they_are_refused(
    monkeypatch: pytest.MonkeyPatch, named: dict[str, Any]
) -> None:
    """Each pattern beside a property takes a matcher of its own, so there are few of them."""
    found: list[str] = []
    finder = sources._finder

    def watched(pattern: str) -> Any:
        found.append(pattern)
        return finder(pattern)

    monkeypatch.setattr(sources, "_finder", watched)
    patterns: dict[str, Any] = {f"^x{i}": {} for i in range(5_000)}
    schema = {"type": "object", "properties": named, "patternProperties": patterns}
    if named:
        with pytest.raises(CallerError, match="patternProperties"):
            sources.json_schema(schema, "f")
    else:
        sources.json_schema(schema, "f")
    assert found == []


def test_a_schema_of_any_kind_has_a_largest_size() -> None:
    """Before anything is made of it, in a tool's parameters too."""
    large = {"type": "object", "description": "x" * 1_100_000, "properties": {"a": {}}}
    with pytest.raises(CallerError, match="larger than 1,048,576"):
        sources.json_schema(large, "f")
    tool = {"type": "function", "function": {"name": "f", "parameters": large, "strict": True}}
    with pytest.raises(CallerError, match="tools: larger than"):
        forced_call([tool], "tools")
    with pytest.raises(CallerError, match="tools: larger than"):
        strict_calls(Dialect(), [tool], "tools")
    with pytest.raises(CallerError, match="tools: larger than"):
        call_or(sources.regex("a", "f"), Dialect(), [tool])


_COSTLY = "(a|b)*a(a|b){12}c"  # thousands of states behind a long text of both letters


def _walk(row: Follower, seed: int, length: int) -> str:
    """Follow a row through random letters; return what it said, and how it failed if it did."""
    dice = random.Random(seed)
    said = ""
    try:
        for _ in range(length):
            allowed = [t for t in _may(row) if t in b"ab"]
            token = dice.choice(sorted(allowed))
            row.take(token)
            said += chr(token)
    except FormError:
        return said + "!"
    return said


def test_what_one_row_uses_up_fails_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has the bound on states for itself: beside others and after them it is as alone."""
    limits = LLParserLimits(max_lexer_states=2_000, verbose_errors=False)
    monkeypatch.setattr(grammar_module, "_LIMITS", limits)
    grammars = byte_grammars.__wrapped__()
    source = sources.regex(_COSTLY, "f")

    def row() -> Follower:
        (grammar,) = grammars.for_rows(grammars.compile(source), 1)
        return grammar.follow()

    alone = []
    for seed in range(3):
        grammars._kept.clear()
        alone.append(_walk(row(), seed, 1_500))
    grammars._kept.clear()
    waiting, *beside = (g.follow() for g in grammars.for_rows(grammars.compile(source), 4))
    assert [_walk(one, seed, 1_500) for seed, one in enumerate(beside)] == alone
    assert [_walk(row(), seed, 1_500) for seed in range(3)] == alone
    assert _walk(waiting, 0, 1_500) == alone[0]
    assert alone[0].endswith("!"), "the bound was not met"


def test_rows_of_a_large_grammar_are_bounded_together() -> None:
    """Each has all of it compiled for itself."""
    grammars = byte_grammars()
    grammar = grammars.compile(sources.choice([f"x{i}" * 20 for i in range(1_000)], "f"))
    assert len(grammars.for_rows(grammar, 3)) == 3
    with pytest.raises(CallerError, match="too large for 128 choices") as caught:
        grammars.for_rows(grammar, 128)
    assert caught.value.param == "f"


def test_an_answer_that_is_whole_may_end_when_its_budget_does() -> None:
    """What would begin another word that does not fit is refused, and the end is not."""
    tokenizer, grammars = tiny_tokenizer(), tiny_grammars()
    row = grammars.compile(sources.choice(["red", "redvioletyellowviolet"], "f")).follow()
    red, violet = (tokenizer.encode(word).ids[0] for word in ("red", "violet"))
    assert row.fits(red, 2)
    row.take(red, 2)
    assert not row.fits(violet, 1)
    left = row.allowed()
    assert left is not None
    assert tokenizer.token_to_id("<end>") in left
    assert violet not in left


@pytest.mark.parametrize("budget", [2, 6, 20])
@pytest.mark.parametrize("pattern", ["([a-z]{3}!)*", "([a-z]{9} )*"])
def test_a_form_that_holds_from_the_start_is_kept_to_the_end(pattern: str, budget: int) -> None:
    """Its way out is empty, not unknown, so a row that would rather not end is not cut midway."""
    tokenizer, grammars = tiny_tokenizer(), tiny_grammars()
    end = tokenizer.token_to_id("<end>")
    for seed in range(4):
        rng, said = random.Random(seed), list[int]()
        row = grammars.compile(sources.regex(pattern, "f")).follow()
        while len(said) < budget and (not said or said[-1] != end):
            left = budget - len(said)
            while True:
                allowed = row.allowed()
                assert allowed is not None
                token = rng.choice([t for t in allowed.tolist() if t != end] or [end])
                if row.fits(token, left):
                    break
            row.take(token, left)
            said.append(token)
        text = tokenizer.decode([token for token in said if token != end])
        assert re.fullmatch(pattern, text), (seed, text)
