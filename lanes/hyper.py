"""The whole width for one row: a tree of its own drafts, verified in one pass.

A step drafts a tree: from the row's last token, depth by depth, the tokens with the highest
perturbed scores under the row's own noise, for as many nodes as the lane carries. One pass
gives every node its logits, the row follows the model's own choices from node to node, and the
keys and values of that branch are kept. The tokens are those of plain decoding, since the choice
at a position knows the logits and the noise of that position and nothing of the tree. Trees of
drafts are from SpecInfer (Miao et al. 2024); growing them by the draft's own confidence is from
EAGLE-2 (Li et al. 2024).
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Final

import mlx.core as mx
import msgspec
import numpy as np
from numpy.typing import NDArray

from .ar import Seated
from .base import Branches, Hidden, Receipt, Row, RowDelta, Trunk
from .choosing import ON_HOST, choosing_failed, on_host
from .fork import Fork
from .geometry import BRANCHING, GEOMETRIES, lane_name
from .head import Head
from .mtp import MtpLane, catch_up, listen
from .ragged import Pass
from .tree import Tree
from .verify import Coupled, follow_tree

BRANCHES: Final = GEOMETRIES[-1]  # what a step carries at the most
HYPER_LANE: Final = lane_name(BRANCHING, BRANCHES)
NODES: Final = 8  # of a tree, the root included
_CHILDREN: Final = 8  # candidates a node is given
_SHARPNESS: Final = 1.0  # logits by which the head's scores are off, roughly

# What is worth its time, in tokens expected: a position of the pass, and a pass of the head.
_NODE_WORTH: Final = 0.04
_LEVEL_WORTH: Final = 0.15
_COUPLED: Final = Coupled()


class HyperLane(MtpLane):
    """Speculative decoding of one row with branches of its own, chosen on the host."""

    def __init__(self, trunk: Trunk, dtype: str, receipt: Receipt, head: Head) -> None:
        super().__init__(trunk, 1, dtype, receipt, ON_HOST, head)
        self.spec = msgspec.structs.replace(
            self.spec,
            name=HYPER_LANE,
            kind=BRANCHING,
            geometry=BRANCHES,
            acceptance=Coupled.name,
        )

    def _step(self, seated: Seated, depths: Sequence[int]) -> list[RowDelta]:
        (row,) = seated.rows
        depth = min(depths[0], row.left - 1)
        if depth == 0 or not row.drafts or not row.unheard:
            return super()._step(seated, [0])
        tree = self._grow(seated, depth)
        if tree is None:
            row.draft_failed()
            seated.slots.wipe(0, seated.slots.lengths[0])
            (delta,) = super()._step(seated, [0])
            return [msgspec.structs.replace(delta, draft_failed=True)]
        passed, fork = self._verify(seated, tree)
        assert passed.hidden is not None
        logits = passed.host()
        try:
            verdict, kept = follow_tree(row, logits, tree)
        except Exception as error:
            if not passed.finite(0) and seated.slots.retract(seated.places[0]):
                with suppress(Exception):  # the first pass's error stands
                    return super()._step(seated, [0])  # what is no number may be a wrong draft's
            row.failed = True
            return [choosing_failed(row, error)]
        if fork is not None:
            fork.keep(kept)
        seated.slots.advance(0, len(kept))
        row.unheard.append(Hidden(passed.hidden[mx.array(kept)], 0, len(kept)))
        row.draft_worked()
        return [
            RowDelta(
                row.key,
                tuple(verdict.tokens),
                tuple(verdict.logprobs),
                drafted=tree.deepest,
                accepted=verdict.accepted,
                branches=_branches(tree, verdict.tokens[: verdict.accepted]),
            )
        ]

    def _grow(self, seated: Seated, depth: int) -> Tree | None:
        """Return the tree of drafts for the step; None when no draft could be had."""
        if catch_up(self._drafting, seated):
            return None
        hidden = listen(self._drafting, seated, [0])
        tree = Grower(self._drafting, seated, hidden).grow(depth)
        return tree if len(tree) > 1 else None

    def _verify(self, seated: Seated, tree: Tree) -> tuple[Pass, Fork | None]:
        """Run every node of a tree; without branches that is a plain verify, and quicker."""
        slots, tokens = seated.slots, mx.array(tree.tokens)
        if len(tree.leaves) == 1:
            return self.trunk.step(slots, seated.layout([len(tree)]), tokens), None
        fork = Fork(slots, slots.lengths[0])
        return self.trunk.branch(fork, tree.reach(range(len(tree))), tokens), fork


class Grower:
    """Grows the tree of one step.

    Args:
        hidden: The head's hidden state at the row's last position, [1, hidden size].
    """

    def __init__(self, head: Head, seated: Seated, hidden: mx.array) -> None:
        self._head = head
        self._row: Row = seated.rows[0]
        self._fork = Fork(seated.slots, seated.slots.drafted[seated.places[0]])
        self._hidden = hidden  # of the nodes that were last given children
        self._tree = Tree(self._row.last_token)
        self._values = [1.0]
        self._numbers: dict[int, int] = {}  # nodes the head has read, as its fork counts them

    def grow(self, depth: int) -> Tree:
        """Return the tree whose nodes are the likeliest to be gone through.

        Nodes behind which drafting fails have no children.
        """
        level = [0]
        self._give_children(level)
        for below in range(1, depth):
            parents = {node: at for at, node in enumerate(level)}
            level = self._promising(below)
            if sum(self._values[node] for node in level) < _LEVEL_WORTH:
                break
            self._numbers |= {node: len(self._numbers) + at for at, node in enumerate(level)}
            self._hidden = self._head.branch(
                self._fork,
                self._tree.reach(level, self._numbers),
                self._hidden[mx.array([parents[self._tree.parents[node]] for node in level])],
                mx.array([self._tree.tokens[node] for node in level]),
            )
            self._give_children(level)
        return self._tree.best(self._values, _NODE_WORTH, NODES, BRANCHES)

    def _give_children(self, level: list[int]) -> None:
        """Add the likeliest tokens behind each node of a level."""
        logits = on_host(self._head.logits(self._hidden))
        for node, mine in zip(level, logits, strict=True):
            before = self._tree.tokens_to(node)
            try:
                tokens, scores = _COUPLED.candidates(
                    mine, self._row, before, self._head.ids, _CHILDREN
                )
            except Exception:
                continue
            for token, share in zip(tokens, _shares(scores), strict=True):
                self._tree.add(node, token)
                self._values.append(self._values[node] * share)

    def _promising(self, depth: int) -> list[int]:
        """Return the nodes of a depth that are in the tree as it would be if it ended here."""
        kept = self._tree.worth_most(self._values, _NODE_WORTH, NODES, BRANCHES)
        return sorted(node for node in kept if self._tree.depths[node] == depth)


def _shares(scores: NDArray[np.float64]) -> list[float]:
    """Return each candidate's chance to be what the model chooses, from perturbed scores."""
    weights = np.exp((scores - scores[0]) / _SHARPNESS)
    shares: list[float] = (weights / weights.sum()).tolist()
    return shares


def _branches(tree: Tree, accepted: list[int]) -> Branches:
    """Return what a tree carried and which of its branches came true."""
    node, main = 0, tree.main_line[1:]
    for token in accepted:
        node = tree.child(node, token) or node
    # Nodes lie branch after branch, so the first leaf from a node on is one that it leads to.
    leaves = tree.leaves
    taken = next(at for at, leaf in enumerate(leaves) if leaf >= node)
    in_common = [tree.tokens[at] == token for at, token in zip(main, accepted, strict=False)]
    main_accepted = next((at for at, same in enumerate(in_common) if not same), len(in_common))
    return Branches(len(leaves), len(tree) - 1, taken, len(main), main_accepted)
