"""Choosing the depth: what commits most tokens a second by what was seen, 0 included."""

from paceline.actors.depth import Depths


def _serve(
    depths: Depths, width: int, steps: int, accept: float, cost: tuple[float, ...]
) -> list[int]:
    """Run steps of a machine with these costs a depth and this share of drafts accepted."""
    chosen = []
    for step in range(steps):
        depth = depths.choose(width)
        kept = 0
        while kept < depth and ((step * 7 + kept * 3) % 10) / 10 < accept:
            kept += 1
        depths.saw(width, depth, cost[depth], [(depth, kept)] * width)
        chosen.append(depth)
    return chosen


def _usual(chosen: list[int]) -> int:
    tail = chosen[len(chosen) // 2 :]
    return max(set(tail), key=tail.count)


def test_cheap_drafts_that_are_accepted_are_drafted_deep() -> None:
    """Where a verify costs what one token does, the deepest depth is found."""
    assert _usual(_serve(Depths(4), 1, 200, 0.9, (1.0, 1.05, 1.1, 1.15, 1.2))) == 4


def test_depth_is_zero_where_drafting_does_not_pay() -> None:
    """Dear verifies or poor drafts end in plain decoding, and that is kept to."""
    dear = _serve(Depths(4), 8, 200, 0.5, (1.0, 2.0, 3.0, 4.0, 5.0))
    poor = _serve(Depths(4), 1, 200, 0.0, (1.0, 1.1, 1.2, 1.3, 1.4))
    for chosen in (dear, poor):
        assert _usual(chosen) == 0
        assert chosen[20:].count(0) >= 0.95 * len(chosen[20:])


def test_the_middle_is_found_too() -> None:
    """A cost that jumps behind depth 1 keeps the depth there."""
    assert _usual(_serve(Depths(4), 8, 200, 0.7, (1.0, 1.2, 1.9, 2.2, 2.6))) == 1


def test_each_width_has_costs_of_its_own() -> None:
    """What is dear at eight rows may be cheap for one."""
    depths = Depths(4)
    _serve(depths, 8, 100, 0.7, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert _usual(_serve(depths, 1, 200, 0.9, (1.0, 1.05, 1.1, 1.15, 1.2))) == 4


def test_a_change_of_text_is_noticed() -> None:
    """Depth 0 is left again once drafts are worth it: neighbours are tried now and then."""
    depths = Depths(4)
    cost = (1.0, 1.2, 1.4, 1.6, 1.8)
    assert _usual(_serve(depths, 1, 400, 0.0, cost)) == 0
    assert _usual(_serve(depths, 1, 30_000, 0.9, cost)) >= 3


def test_one_slow_step_does_not_rule_a_depth_out() -> None:
    """A stall is not the cost of its depth."""
    depths = Depths(4)
    cost = (1.0, 1.05, 1.1, 1.15, 1.2)
    _serve(depths, 1, 100, 0.9, cost)
    depths.saw(1, 4, 50.0, [(4, 4)])
    assert _usual(_serve(depths, 1, 400, 0.9, cost)) == 4


def test_a_fixed_depth_is_always_taken() -> None:
    """But never deeper than the lanes draft, and nothing is drafted without a head."""
    assert _serve(Depths(4, 3), 8, 20, 0.0, (1.0, 9.0, 9.0, 9.0, 9.0)) == [3] * 20
    assert Depths(4, 0).choose(1) == 0
    assert Depths(0, 3).choose(1) == 0
    assert Depths(0).choose(8) == 0


def test_expected_tokens_follow_the_shares_that_were_seen() -> None:
    """A draft counts only when those before it were accepted."""
    depths = Depths(2)
    for i in range(1000):
        depths.saw(1, 2, 1.0, [(2, 2 if i % 2 else 1)])
    assert abs(depths.expected(0) - 1.0) < 1e-9
    assert abs(depths.expected(2) - (1 + 1.0 + 0.5)) < 0.1
