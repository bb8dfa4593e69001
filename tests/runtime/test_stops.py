"""Stop strings against a plain search over the whole text."""

from hypothesis import given
from hypothesis import strategies as st

from paceline.runtime.stops import StopMatcher

_TEXT = st.text("abc", max_size=30)
_STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@given(st.lists(_TEXT, max_size=8), _STOPS)
def test_any_split_gives_what_a_search_gives(pieces: list[str], stops: list[str]) -> None:
    """However text is cut into tokens, what is shown ends just before the first stop."""
    matcher = StopMatcher(stops)
    shown = "".join(matcher.push(piece) for piece in pieces) + matcher.flush()
    whole = "".join(pieces)
    if not any(stop in whole for stop in stops):
        assert shown == whole
        assert matcher.matched is None
    else:
        assert matcher.matched in stops
        assert not any(s in shown for s in stops)
        assert whole.startswith(shown)
        assert whole[len(shown) :].startswith(matcher.matched or "?")


def test_nothing_of_a_possible_stop_is_shown_early() -> None:
    """A suffix that may become a stop is held back until it cannot."""
    matcher = StopMatcher(["END"])
    assert matcher.push("aE") == "a"
    assert matcher.push("N") == ""
    assert matcher.push("X") == "ENX"
    assert matcher.push("EN") == ""
    assert matcher.flush() == "EN"


@given(st.lists(st.one_of(_TEXT, st.none()), max_size=8), _STOPS)
def test_no_more_is_held_back_than_may_become_a_stop(
    pieces: list[str | None], stops: list[str]
) -> None:
    """After each piece the longest end that begins a stop is held; None shows all that is held."""
    matcher = StopMatcher(stops)
    held = ""
    for piece in pieces:
        shown = matcher.flush() if piece is None else matcher.push(piece)
        held += piece or ""
        if matcher.matched is not None:
            return
        ends = [held[at:] for at in range(len(held))]
        left = next((e for e in ends if any(stop.startswith(e) for stop in stops)), "")
        left = "" if piece is None else left
        assert shown == held[: len(held) - len(left)]
        held = left


def test_no_stops_hold_nothing_back() -> None:
    """Without stop strings text passes straight through."""
    matcher = StopMatcher([])
    assert matcher.push("abc") == "abc"


def test_what_was_shown_begins_no_stop() -> None:
    """Text behind a call is another text: a stop string does not span both."""
    matcher = StopMatcher(["ab", "aba"])
    assert matcher.push("ca") == "c"
    assert matcher.flush() == "a"
    assert matcher.push("b") == "b"
    assert matcher.push("ab") == ""
    assert matcher.matched == "ab"
