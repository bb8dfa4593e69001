"""The meter: how drafts fared, depth by depth."""

import pytest

from paceline.runtime.meter import Meter


def test_a_draft_counts_only_where_those_before_it_were_accepted() -> None:
    """Rows with 4 of 4, 1 of 4 and none of 2 accepted reach depths 4, 2 and 1."""
    meter = Meter()
    meter.saw_drafts(4, [(4, 4), (4, 1), (2, 0), (0, 0)])
    assert meter.acceptance_by_depth == pytest.approx({1: 2 / 3, 2: 1 / 2, 3: 1.0, 4: 1.0})
    assert meter.mean_accepted == pytest.approx(5 / 3)
    assert (meter.drafted_tokens, meter.accepted_tokens) == (10, 5)
    assert meter.steps_by_depth == {4: 1}


def test_nothing_drafted_is_nothing_accepted() -> None:
    """Plain steps are counted at depth 0 and say nothing of acceptance."""
    meter = Meter()
    meter.saw_drafts(0, [(0, 0)])
    assert (meter.acceptance_by_depth, meter.mean_accepted) == ({}, None)
    assert meter.steps_by_depth == {0: 1}
