"""Choosing the depth: what commits most tokens a second by what was seen, 0 included."""

from paceline.actors.depth import Arm, Depths, Steps
from paceline.lanes.base import Branches, RowDelta


def _serve(
    depths: Depths, width: int, steps: int, accept: float, cost: tuple[float, ...]
) -> list[int]:
    """Run steps of a machine with these costs a depth and this share of drafts accepted."""
    chosen = []
    rows = [str(row) for row in range(width)]
    for step in range(steps):
        how = depths.choose(rows)
        depth = how.depths[0]
        kept = 0
        while kept < depth and ((step * 7 + kept * 3) % 10) / 10 < accept:
            kept += 1
        deltas = [RowDelta(row, drafted=depth, accepted=kept) for row in rows]
        depths.saw(rows, how, cost[depth], deltas)
        chosen.append(depth)
    return chosen


def _usual(chosen: list[int]) -> int:
    tail = chosen[len(chosen) // 2 :]
    return max(set(tail), key=tail.count)


def test_cheap_drafts_that_are_accepted_are_drafted_deep() -> None:
    """Where a verify costs what one token does, the deepest depth is found."""
    assert _usual(_serve(Depths("mtp", 4), 1, 200, 0.9, (1.0, 1.05, 1.1, 1.15, 1.2))) == 4


def test_depth_is_zero_where_drafting_does_not_pay() -> None:
    """Dear verifies or poor drafts end in plain decoding, and that is kept to."""
    dear = _serve(Depths("mtp", 4), 8, 200, 0.5, (1.0, 2.0, 3.0, 4.0, 5.0))
    poor = _serve(Depths("mtp", 4), 1, 200, 0.0, (1.0, 1.1, 1.2, 1.3, 1.4))
    for chosen in (dear, poor):
        assert _usual(chosen) == 0
        assert chosen[20:].count(0) >= 0.95 * len(chosen[20:])


def test_the_middle_is_found_too() -> None:
    """A cost that jumps behind depth 1 keeps the depth there."""
    assert _usual(_serve(Depths("mtp", 4), 8, 200, 0.7, (1.0, 1.2, 1.9, 2.2, 2.6))) == 1


def test_each_width_has_costs_of_its_own() -> None:
    """What is dear at eight rows may be cheap for one."""
    depths = Depths("mtp", 4)
    _serve(depths, 8, 100, 0.7, (1.0, 2.0, 3.0, 4.0, 5.0))
    assert _usual(_serve(depths, 1, 200, 0.9, (1.0, 1.05, 1.1, 1.15, 1.2))) == 4


def test_a_change_of_text_is_noticed() -> None:
    """Depth 0 is left again once drafts are worth it: neighbours are tried now and then."""
    depths = Depths("mtp", 4)
    cost = (1.0, 1.2, 1.4, 1.6, 1.8)
    assert _usual(_serve(depths, 1, 400, 0.0, cost)) == 0
    assert _usual(_serve(depths, 1, 30_000, 0.9, cost)) >= 3


def test_one_slow_step_does_not_rule_a_depth_out() -> None:
    """A stall is not the cost of its depth."""
    depths = Depths("mtp", 4)
    cost = (1.0, 1.05, 1.1, 1.15, 1.2)
    _serve(depths, 1, 100, 0.9, cost)
    slow = RowDelta("0", drafted=4, accepted=4)
    depths.saw(["0"], Steps("mtp-b1", 1, (4,)), 50.0, [slow])
    assert _usual(_serve(depths, 1, 400, 0.9, cost)) == 4


def test_a_fixed_depth_is_always_taken() -> None:
    """But never deeper than the lanes draft, and nothing is drafted without a head."""
    assert _serve(Depths("mtp", 4, 3), 8, 20, 0.0, (1.0, 9.0, 9.0, 9.0, 9.0)) == [3] * 20
    assert Depths("mtp", 4, 0).choose(["a"]) == Steps("mtp-b1", 1, (0,))
    assert Depths("mtp", 0, 3).choose(["a"]) == Steps("mtp-b1", 1, (0,))
    assert Depths("ar", 0).choose([str(i) for i in range(8)]) == Steps("ar-b8", 8, (0,) * 8)


def test_expected_tokens_follow_the_shares_that_were_seen() -> None:
    """A draft counts only when those before it were accepted."""
    depths = Depths("mtp", 2)
    for depth in (0, 2):
        for i in range(1000):
            delta = RowDelta("a", drafted=depth, accepted=min(depth, 2 if i % 2 else 1))
            depths.saw(["a"], Steps("mtp-b1", 1, (depth,)), 1.0, [delta])
    assert abs(depths.rate(["a"], Arm("mtp-b1", 0)) - 1.0) < 1e-9
    assert abs(depths.rate(["a"], Arm("mtp-b1", 2)) - (1 + 1.0 + 0.5)) < 0.1


def _branching(chain: float, tree: float, dear: float, steps: int = 600) -> list[Steps]:
    """Run steps of a lone row; a tree accepts more than a chain and takes `dear` times as long."""
    depths = Depths("mtp", 4, None, "hyper-b8")
    chosen = []
    for step in range(steps):
        how = depths.choose(["a"])
        depth, wide = how.depths[0], how.lane == "hyper-b8"
        draws = [((step * 7 + at * 3) % 10) / 10 for at in range(depth)]
        main = next((at for at, draw in enumerate(draws) if draw >= chain), depth)
        kept = next((at for at, draw in enumerate(draws) if draw >= tree), depth)
        branches = Branches(4, 7, 1, depth, main) if wide else None
        delta = RowDelta("a", drafted=depth, accepted=kept if wide else main, branches=branches)
        seconds = (1.0 + 0.05 * depth) * (dear if wide else 1.0)
        depths.saw(["a"], how, seconds, [delta])
        chosen.append(how)
    return chosen[steps // 2 :]


def test_branches_are_carried_where_they_pay() -> None:
    """A tree that accepts more for little more time is what most steps are, on its own lane."""
    chosen = _branching(0.5, 0.8, 1.1)
    assert sum(how.lane == "hyper-b8" for how in chosen) > 0.9 * len(chosen)
    assert {how.geometry for how in chosen if how.lane == "hyper-b8"} == {8}


def test_a_chain_is_taken_where_branches_do_not_pay() -> None:
    """Dear trees, and trees that accept no more, end in the plain lane, and that is kept to."""
    for chosen in (_branching(0.5, 0.6, 2.0), _branching(0.9, 0.9, 1.2)):
        assert sum(how.lane == "mtp-b1" for how in chosen) > 0.9 * len(chosen)


def test_only_a_lone_row_is_given_branches_and_a_fixed_depth_is_that_of_the_tree() -> None:
    """Depth 0 is the plain lane; two rows have none of it."""
    assert Depths("mtp", 4, 3, "hyper-b8").choose(["a"]) == Steps("hyper-b8", 8, (3,))
    assert Depths("mtp", 4, 0, "hyper-b8").choose(["a"]) == Steps("mtp-b1", 1, (0,))
    assert Depths("mtp", 4, 3, "hyper-b8").choose(["a", "b"]) == Steps("mtp-b3", 3, (3, 3))


def test_a_tree_that_ended_early_is_counted_as_deep_as_it_was_meant() -> None:
    """Where trees give up early their deep drafts are worth little, whatever came of the few."""
    depths = Depths("mtp", 4, None, "hyper-b8")
    for _ in range(200):
        branches = Branches(2, 2, 0, 1, 1)
        delta = RowDelta("a", drafted=1, accepted=1, branches=branches)
        depths.saw(["a"], Steps("hyper-b8", 8, (4,)), 1.0, [delta])
    assert depths.rate(["a"], Arm("hyper-b8", 4)) < 2.2
