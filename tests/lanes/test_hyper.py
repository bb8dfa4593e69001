"""Branches: the tokens of plain decoding, whatever the tree; one branch kept, the rest gone."""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lanes.test_mtp import (
    RECEIPT,
    SAMPLERS,
    Answer,
    at,
    context,
    lane_of,
    lockstep,
    plain,
    stock,
)
from tests.lanes.tiny import VOCAB

from paceline.lanes import hyper, sampler
from paceline.lanes.ar import ArLane, Seated
from paceline.lanes.base import Row, RowDelta, Trunk
from paceline.lanes.branchcheck import check_branches
from paceline.lanes.choosing import ON_HOST, known, on_host
from paceline.lanes.fork import Fork
from paceline.lanes.head import Head
from paceline.lanes.hyper import Grower, HyperLane
from paceline.lanes.install import Installed
from paceline.lanes.mtp import Drafter, listen
from paceline.lanes.ragged import Layout, Pass
from paceline.lanes.reading import gathered
from paceline.lanes.selfcheck import LaneChecker
from paceline.lanes.tree import Reach, Tree
from paceline.lanes.verify import Coupled, follow_tree
from paceline.runtime import noise
from paceline.runtime.context import RowContext, Sampling
from paceline.runtime.errors import LaneRefused
from paceline.runtime.text import Text

Made = tuple[Trunk, Head]


def hyper_of(made: Made) -> HyperLane:
    return HyperLane(made[0], "float32", RECEIPT, made[1])


def branching(
    made: Made, contexts: Sequence[RowContext], depth: Callable[[int], int]
) -> list[Answer]:
    """Run rows one after another on the branching lane."""
    lane = hyper_of(made)
    out = []
    for each in contexts:
        row = lane.open("row", each)
        first = lane.prefill(row, 10_000)
        assert first is not None
        gained: list[RowDelta] = [first]
        step = 0
        while row.left > 0 and row.generated[-1] not in each.end_ids:
            gained += lane.step([row], [depth(step)])
            step += 1
        assert all(delta.error is None for delta in gained)
        out.append(([t for d in gained for t in d.tokens], [p for d in gained for p in d.logprobs]))
    return out


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("make", [lockstep, stock])
def test_branches_give_the_tokens_of_plain_decoding(make: Callable[[], Made], depth: int) -> None:
    """Every sampler, prompts around a block of keys: same tokens and log probabilities."""
    made = make()
    contexts = [context(i, s, (9, 58, 62, 64, 130)[i % 5]) for i, s in enumerate(SAMPLERS)]
    expected, found = plain(made, contexts), branching(made, contexts, at(depth))
    assert [a[0] for a in found] == [a[0] for a in expected]
    if make is lockstep:
        assert found == expected


def test_depth_may_change_and_lanes_may_take_turns() -> None:
    """A row may step with branches, plainly and with a chain of drafts, in any order."""
    made = lockstep()
    contexts = [context(i, s, 60) for i, s in enumerate(SAMPLERS)]
    expected = plain(made, contexts)
    assert branching(made, contexts, lambda step: (3, 0, 1, 4, 2)[step % 5]) == expected
    lanes = hyper_of(made), lane_of(made, 1)
    row = lanes[0].open("row", contexts[3])
    lanes[0].prefill(row, 10_000)
    step = 0
    while row.left > 0:
        lanes[step % 2].step([row], [3])
        step += 1
    assert row.generated[:24] == expected[3][0]


def test_the_likeliest_branch_is_the_chain_that_would_be_drafted() -> None:
    """Depth by depth with the noise of its own position: a tree never drafts worse than a chain."""
    trunk, head = lockstep()
    compared = 0
    for number in range(12):
        row = ArLane(trunk, 1, "float32", RECEIPT, ON_HOST, head).open(
            "row", context(number, Sampling(temperature=0.8), 20)
        )
        lane = lane_of((trunk, head), 1)
        lane.prefill(row, 10_000)
        twin = row.copy()
        drafter = Drafter(head, ON_HOST, Seated(row.slots, [row], [0]), [4])
        drafter.run()
        chain = [draft.token for draft in known(drafter.drafts[0])]
        seated = Seated(twin.slots, [twin], [0])
        tree = Grower(head, seated, listen(head, seated, [0])).grow(4)
        main = tree.tokens_to(tree.main_line[-1])
        assert main == chain[: len(main)]
        compared += len(main) > 1
    assert compared > 3


def test_every_branch_is_drafted_from_its_own_parent() -> None:
    """The candidates behind any draft are those of a head that has read just its own way."""
    trunk, head = lockstep()
    compared = 0
    for number in range(20):
        lane = lane_of((trunk, head), 1)
        row = lane.open("row", context(number, Sampling(temperature=1.2), 20))
        lane.prefill(row, 10_000)
        seated = Seated(row.slots, [row], [0])
        hidden = listen(head, seated, [0])
        grower = Grower(head, seated, hidden)
        grower.grow(3)
        grown = grower._tree
        for node in range(1, len(grown)):
            children = [grown.tokens[at] for at, up in enumerate(grown.parents) if up == node]
            if not children:
                continue
            way, states = grown.tokens_to(node), hidden
            for behind, token in enumerate(way):
                lengths = [row.slots.drafted[0] + behind]
                states = head.step(row.slots, lengths, Layout([1]), states, mx.array([token]))
            logits = on_host(head.logits(states))[0]
            expected, _ = Coupled().candidates(logits, row, way, head.ids, 8)
            assert children == expected
            compared += grown.depths[node] == 2 and grown.parents[node] > 1
    assert compared > 0, "some lie behind another draft than the likeliest"


def test_a_head_goes_on_from_the_branch_that_was_kept() -> None:
    """What it has still to read are the hidden states along that branch, and no other's."""
    trunk, head = lockstep()
    lane, beside = hyper_of((trunk, head)), 0
    for number in range(24):
        row = lane.open("row", context(number, Sampling(temperature=0.5), 12, 40))
        lane.prefill(row, 10_000)
        while row.left > 4:
            twin = row.copy()
            (delta,) = lane.step([row], [4])
            tokens = mx.array([twin.last_token, *delta.tokens[:-1]])
            passed = trunk.step(twin.slots, Layout([len(delta.tokens)]), tokens)
            assert passed.hidden is not None
            assert mx.array_equal(gathered(row.unheard), passed.hidden)
            assert delta.branches is not None
            beside += delta.branches.taken > 0 and delta.accepted > 0
    assert beside > 3, "branches beside the likeliest came true"


def test_nothing_is_chosen_behind_an_end_token_of_a_branch() -> None:
    """A draft that ends the row is accepted and is the last token, whatever lies behind it."""
    tree = Tree(5)
    tree.add(tree.add(0, 7), 9)
    logits = np.full((3, VOCAB), -9.0, np.float32)
    logits[0, 7], logits[1, 9], logits[2, 11] = 1.0, 1.0, 1.0
    for ends, expected in ((frozenset[int](), [7, 9, 11]), (frozenset({7}), [7])):
        asked = context(0, Sampling(temperature=0), ends=ends)
        row = Row("row", asked, lockstep()[0].new_row())
        verdict, kept = follow_tree(row, logits, tree)
        assert verdict.tokens == row.generated == expected
        assert verdict.accepted == min(2, len(expected))
        assert kept == list(range(len(expected)))


def test_budget_and_end_token_inside_a_branch() -> None:
    """A step never goes past the budget, and nothing is chosen behind an end token."""
    made = lockstep()
    whole = plain(made, [context(0, SAMPLERS[0])])[0][0]
    ends = frozenset({whole[7]})
    found = branching(made, [context(0, SAMPLERS[0], ends=ends)], at(4))[0][0]
    assert found == whole[: whole.index(whole[7]) + 1]
    assert branching(made, [context(0, SAMPLERS[0], budget=3)], at(4))[0][0] == whole[:3]


@pytest.mark.slow
def test_the_starter_accepts_more_on_branches(drafting: Installed, text: Text) -> None:
    """On the real head a tree gains at least what its likeliest branch alone would."""
    narrow: Any = drafting.lanes[0]
    lane = hyper_of((narrow.trunk, narrow._drafting))
    gained = {"tree": 0, "chain": 0, "branches": 0}
    for seed, temperature in enumerate((0.0, 0.8)):
        prompt = tuple(text.encode_chat([{"role": "user", "content": "Write a list of birds."}]))
        asked = RowContext(prompt, Sampling(temperature=temperature), seed, 40, frozenset())
        row = lane.open("row", asked)
        lane.prefill(row, 10_000)
        while row.left > 0:
            (delta,) = lane.step([row], [3])
            if delta.branches is not None:
                assert 1 <= delta.branches.carried <= hyper.BRANCHES
                assert delta.branches.nodes <= hyper.NODES - 1
                assert delta.branches.taken < delta.branches.carried
                assert delta.branches.main_accepted <= delta.accepted <= delta.drafted
                gained["tree"] += delta.accepted
                gained["chain"] += delta.branches.main_accepted
                gained["branches"] += delta.branches.taken > 0
        alone = narrow.open("alone", asked)
        narrow.prefill(alone, 10_000)
        while alone.left > 0:
            narrow.step([alone], [0])
        assert row.generated == alone.generated
    assert gained["tree"] > gained["chain"]
    assert gained["branches"] > 0


class _Leaky:
    """A trunk in which a node sees a little of the one before it, whoever that is."""

    def __init__(self, inner: Trunk, leak: float) -> None:
        self._inner = inner
        self._leak = leak

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def branch(self, fork: Fork, reach: Reach, tokens: mx.array) -> Pass:
        passed = self._inner.branch(fork, reach, tokens)
        assert passed.logits is not None
        passed.logits = passed.logits + self._leak * mx.roll(passed.logits, 1, 0)
        return passed


@pytest.mark.parametrize(("leak", "check"), [(1e-4, "branch isolation"), (0.5, "against B1")])
def test_a_branch_that_sees_another_is_refused(leak: float, check: str) -> None:
    """What a node may not see must not move one bit of its logits."""
    trunk, head = lockstep()
    leaky: Any = _Leaky(trunk, leak)
    checker = LaneChecker(leaky, 2e-3, 1, head)
    with pytest.raises(LaneRefused, match=check):
        checker.check_branching("hyper-b8", RECEIPT)


def test_a_branch_that_is_kept_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The branch that lies first in the tree is not the one that came true."""
    trunk, head = lockstep()
    checker = LaneChecker(trunk, 2e-3, 1, head)
    keep = Fork.keep
    monkeypatch.setattr(Fork, "keep", lambda fork, path: keep(fork, range(len(path))))
    with pytest.raises(LaneRefused, match="kept branch"):
        checker.check_branching("hyper-b8", RECEIPT)


def test_the_checks_of_branches_are_in_the_receipt() -> None:
    """Constant-shape arithmetic shows no difference at all."""
    trunk, head = lockstep()
    receipt = LaneChecker(trunk, 2e-3, 1, head).check_branching("hyper-b8", RECEIPT)
    found = {check.name: check.found for check in receipt.checks}
    assert found["branch isolation"] == "largest difference 0"
    assert found["branches against B1"].startswith("0 of")
    assert found["kept branch against B1"].startswith("0 of")
    assert check_branches(trunk, [], [], 1.0)[0].passed


def test_a_fork_leaves_the_row_as_it_was() -> None:
    """The prefix is stored once: a pass over branches writes nothing to the row."""
    trunk, _ = lockstep()
    slots = trunk.new_row()
    trunk.prefill(slots, list(range(10, 40)), want="none").settle()
    before = [np.array(a) for a in (*slots.keys, *slots.values) if a is not None]
    tree = Tree(5)
    for token in (6, 7, 8):
        tree.add(tree.add(0, token), token + 10)
    fork = Fork(slots, slots.lengths[0])
    passed = trunk.branch(fork, tree.reach(range(len(tree))), mx.array(tree.tokens))
    passed.host()
    after = [np.array(a) for a in (*slots.keys, *slots.values) if a is not None]
    assert slots.lengths == [30]
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    fork.keep([0, 3, 4])
    slots.advance(0, 3)
    own = trunk.new_row()
    trunk.prefill(own, list(range(10, 40)), want="none").settle()
    trunk.step(own, Layout([3]), mx.array([5, 7, 17])).settle()
    for layer in range(2):
        kept, right = slots.keys[layer], own.keys[layer]
        assert kept is not None
        assert right is not None
        assert mx.array_equal(kept[:, :, :33], right[:, :, :33])


_values = st.lists(st.tuples(st.integers(0, 10**6), st.floats(0, 1)), min_size=1, max_size=40)


@given(_values, st.integers(1, 16), st.integers(1, 8))
def test_the_best_part_of_a_tree_is_a_tree(
    grown: list[tuple[int, float]], nodes: int, branches: int
) -> None:
    """It has the root, whole ways to its nodes, no more nodes or branches than asked for."""
    tree, values = Tree(1000), [1.0]
    for at_, (pick, share) in enumerate(grown):
        parent = pick % len(tree)
        tree.add(parent, at_)
        values.append(values[parent] * share)
    best = tree.best(values, 0.0, nodes, branches)
    assert 1 <= len(best) <= nodes
    assert len(best.leaves) <= branches
    for node in range(1, len(best)):
        assert best.parents[node] < node
        original = best.tokens[node] + 1
        assert best.tokens_to(node) == tree.tokens_to(original)
    if branches == 8 and len(tree) <= min(nodes, 9):
        assert len(best) == len(tree)
    assert best.path(best.main_line[-1]) == best.main_line == list(range(len(best.main_line)))


@given(
    st.integers(0, 99),
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([(0, 1.0), (5, 1.0), (0, 0.7)]),
    st.booleans(),
)
def test_candidates_are_the_best_of_all_tokens(
    seed: int, temperature: float, filters: tuple[int, float], trimmed: bool
) -> None:
    """In the order a look at every single score gives; the first is what `pick` chooses."""
    rng = np.random.default_rng(seed)
    ids = np.sort(rng.permutation(VOCAB)[:300]) if trimmed else None
    logits = (4 * rng.standard_normal(300 if trimmed else VOCAB)).astype(np.float32)
    sampling = Sampling(temperature=temperature, top_k=filters[0], top_p=filters[1])
    key = noise.stream_key(seed, 3)
    tokens, scores = sampler.best(logits, sampling, key, ids, 8)
    assert tokens[0] == sampler.pick(logits, sampling, key, ids)
    every = np.arange(VOCAB) if ids is None else ids
    perturbed = logits.astype(np.float64)
    if temperature:
        bits = noise.token_bits(key, every.astype(np.uint32))
        perturbed = perturbed + temperature * noise.gumbel(bits)
    if temperature and sampling.filtered:
        kept = sampler.filter_tokens(logits, sampling)
        perturbed = np.where(np.isin(np.arange(len(logits)), kept), perturbed, -np.inf)
    order = np.argsort(-perturbed, kind="stable")[: len(tokens)]
    assert tokens == every[order].tolist()
    assert np.allclose(scores, perturbed[order])
