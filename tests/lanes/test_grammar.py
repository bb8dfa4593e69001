"""Grammars in the lanes: always kept, whatever is drafted, and nobody else's business."""

import json
from collections.abc import Callable, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lanes.test_hyper import branching
from tests.lanes.test_mtp import (
    RECEIPT,
    SAMPLERS,
    Answer,
    at,
    context,
    lane_of,
    lockstep,
    plain,
    run,
    stock,
)
from tests.lanes.tiny import END, tiny_grammars, tiny_tokenizer

from paceline.lanes.ar import ArLane
from paceline.lanes.base import Trunk
from paceline.lanes.choosing import ON_HOST, HostChooser
from paceline.lanes.device import DeviceChooser
from paceline.lanes.head import Head
from paceline.lanes.verify import ACCEPTANCE
from paceline.runtime import sources
from paceline.runtime.context import RowContext, Sampling

Made = tuple[Trunk, Head]

SCHEMA = {
    "type": "object",
    "properties": {
        "colour": {"enum": ["red", "green", "blue"]},
        "size": {"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 2},
        "alive": {"type": "boolean"},
    },
    "required": ["colour", "size", "alive"],
    "additionalProperties": False,
}
FORMS = (
    sources.json_schema(SCHEMA, "f"),
    sources.regex("[a-f]{5,9}", "f"),
    sources.choice(["yes", "no", "perhaps"], "f"),
)


def formed(number: int, sampling: Sampling, length: int = 9, form: int = 0) -> RowContext:
    """Return a context whose answer must have a form, with room for it."""
    plain = context(number, sampling, length, 120, frozenset({END}))
    return msgspec.structs.replace(plain, grammar=tiny_grammars().compile(FORMS[form]))


def said(tokens: Sequence[int]) -> str:
    """Return an answer's text; it must have ended of its own accord."""
    assert tokens[-1] == END
    return str(tiny_tokenizer().decode(list(tokens[:-1])))


def check(tokens: Sequence[int]) -> None:
    """Assert that an answer is what SCHEMA describes."""
    found = json.loads(said(tokens))
    assert set(found) == {"colour", "size", "alive"}
    assert found["colour"] in ("red", "green", "blue")
    assert 1 <= len(found["size"]) <= 2
    assert isinstance(found["alive"], bool)


def mixed(count: int) -> list[RowContext]:
    """Return rows with and without a form, of every sampler."""
    return [
        formed(i, SAMPLERS[i % 8], 2 + 7 * i, i % 3)
        if i % 4 != 3
        else context(i, SAMPLERS[i % 8], 2 + 7 * i)
        for i in range(count)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("make", [lockstep, stock])
@pytest.mark.parametrize("geometry", [1, 3, 8])
def test_drafts_do_not_change_what_a_form_lets_through(
    make: Callable[[], Made], geometry: int
) -> None:
    """Rows with and without a form in one cohort, at every depth: the tokens of plain decoding."""
    made = make()
    contexts = mixed(geometry + 1)
    expected = [tokens for tokens, _ in plain(made, contexts)]
    lane = lane_of(made, geometry)
    for depth in range(5):
        found = run(lane, contexts, at(depth), [3 * (i % 4) for i in range(len(contexts))])
        assert [tokens for tokens, _ in found] == expected


@pytest.mark.parametrize("depth", [1, 4])
def test_branches_keep_the_form(depth: int) -> None:
    """A tree of drafts gives the tokens of plain decoding under a form."""
    made = lockstep()
    contexts = mixed(8)
    assert branching(made, contexts, at(depth)) == plain(made, contexts)


@pytest.mark.slow
@settings(max_examples=25)
@given(st.integers(0, 10**6), st.sampled_from(SAMPLERS), st.integers(0, 4), st.booleans())
def test_answers_always_have_the_form(
    number: int, sampling: Sampling, depth: int, rejecting: bool
) -> None:
    """Any sampler, seed, depth and way to accept: what comes is JSON of the schema."""
    chooser = HostChooser(ACCEPTANCE["rejection" if rejecting else "coupled"])
    lane = lane_of(_shared(), 3, chooser)
    asked = formed(number, sampling)
    for tokens, _ in run(lane, [asked, context(number, sampling), asked], at(depth))[::2]:
        check(tokens)


def _shared(made: list[Made] = []) -> Made:  # noqa: B006 # one for all examples
    if not made:
        made.append(lockstep())
    return made[0]


def test_neighbours_of_a_form_are_as_they_were() -> None:
    """A row beside others with forms has the bits it has alone."""
    made = _shared()
    mine = context(5, SAMPLERS[2], 30)
    lane = lane_of(made, 3)
    alone = run(lane, [mine], at(2))[0]
    others = [formed(1, SAMPLERS[1], 12), formed(2, SAMPLERS[4], 40, 1)]
    assert run(lane, [mine, *others], at(2))[0] == alone


def test_forced_tokens_are_drafted_and_accepted() -> None:
    """Where the form leaves one way, the head drafts it whatever it thinks, and it is accepted."""
    made = lockstep()
    lane = lane_of(made, 1)
    forced = tiny_grammars().compile(sources.choice(["one long and only way to say it"], "f"))
    asked = msgspec.structs.replace(context(3, Sampling(), 9, 60, frozenset({END})), grammar=forced)
    row = lane.open("row", asked)
    lane.prefill(row, 100)
    deltas = lane.step([row], [3])
    while row.generated[-1] != END:
        deltas += lane.step([row], [3])
    assert said(row.generated) == "one long and only way to say it"
    # Only behind the end are drafts in vain.
    assert sum(d.accepted for d in deltas) >= sum(d.drafted for d in deltas) - 3


def test_the_device_leaves_forms_to_the_host() -> None:
    """Choosing on the device, rows with a form keep it and rows without are chosen there."""
    made = lockstep()
    contexts = mixed(4)
    expected = [tokens for tokens, _ in plain(made, contexts)]
    found = run(lane_of(made, 8, DeviceChooser()), contexts, at(2))
    assert [tokens for tokens, _ in found] == expected


def test_a_form_that_breaks_ends_its_row_alone() -> None:
    """A grammar that cannot go on is its own row's error, also while drafting."""
    made = lockstep()
    lane = lane_of(made, 3)
    bad, good = formed(1, SAMPLERS[1]), context(2, SAMPLERS[0])
    alone = run(lane, [good], at(2))[0]
    rows = [lane.open("bad", bad), lane.open("good", good)]
    for row in rows:
        lane.prefill(row, 100)
    assert rows[0].form is not None
    rows[0].form._matcher.consume_token(END - 1)  # as when a limit is met: an error that stays
    gained = [*rows[1].generated]
    first, second = lane.step(rows, [2, 2])
    assert first.error is not None
    assert "form cannot be followed" in first.error
    assert first.code == "form_failed"
    assert second.error is None
    lane.close(rows[0])
    gained += second.tokens
    while rows[1].left > 0:
        gained += lane.step([rows[1]], [2])[0].tokens
    assert gained == alone[0]


def test_every_kind_of_form_is_answered_by_its_kind() -> None:
    """A regular expression and a choice give answers that fit, on the target-only lane."""
    lane = ArLane(_shared()[0], 3, "float32", RECEIPT, ON_HOST)
    answers: list[Answer] = run(lane, [formed(4, SAMPLERS[1], 9, form) for form in (1, 2)], at(0))
    assert set(said(answers[0][0])) <= set("abcdef")
    assert said(answers[1][0]) in ("yes", "no", "perhaps")
