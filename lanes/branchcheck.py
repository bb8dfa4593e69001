"""What must hold before branches are carried: each node is blind to all branches but its own.

Branches against B1: nodes of the right branch have the logits that plain decoding has. Branch
isolation: they keep every bit when all other branches change, and when those are no numbers. Kept
branch: a row that went on by a branch computes what a row does that went the plain way.
"""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from .base import Check, Row, Trunk
from .fork import Fork
from .ragged import Layout
from .reference import apart
from .tree import Tree

_RIGHT = 2  # drafts of the right branch
Alone = Sequence[Sequence[NDArray[np.float32]]]  # of each row its plain steps' logits


def check_branches(
    trunk: Trunk, rows: Sequence[Row], alone: Alone, bound: float
) -> tuple[Check, ...]:
    """Run a tree behind a copy of each row, keep its right branch, and step on from there.

    Args:
        rows: Greedy rows whose prompts are read.
        alone: What each of them saw in plain steps.
        bound: The largest logit difference that is rounding.
    """
    worst, moved, after = 0.0, 0.0, 0.0
    for row, plain in zip(rows, alone, strict=True):
        answer = [int(logits.argmax()) for logits in plain]
        seen, went_on = _run(trunk, row, answer, 0)
        others, _ = _run(trunk, row, answer, 1)
        beside_none, _ = _run(trunk, row, answer, 0, _Spoilt)
        worst = max(worst, _most_apart(seen, plain))
        moved = max(moved, _most_apart(seen, others), _most_apart(seen, beside_none))
        after = max(after, _most_apart([went_on], plain[_RIGHT + 1 :]))
    return (
        Check("branches against B1", worst <= bound, f"{worst:.3g} of {bound:.3g} allowed"),
        Check("branch isolation", moved == 0.0, f"largest difference {moved:.3g}"),
        Check("kept branch against B1", after <= bound, f"{after:.3g} of {bound:.3g} allowed"),
    )


class _Spoilt(Fork):
    """A fork whose wrong branches are no numbers."""

    right: Sequence[int] = ()

    def add(self, layer: int, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Spoil all nodes but the right ones."""
        keys, values = super().add(layer, keys, values)
        wrong = np.ones((keys.shape[0], 1, 1), bool)
        wrong[list(self.right)] = False
        spoilt = [
            mx.where(mx.array(wrong), float("nan"), a).astype(a.dtype) for a in (keys, values)
        ]
        self._new[layer] = spoilt[0], spoilt[1]
        return self._new[layer]


def _run(
    trunk: Trunk, row: Row, answer: Sequence[int], others: int, kind: type[Fork] = Fork
) -> tuple[list[NDArray[np.float32]], NDArray[np.float32]]:
    """Return the logits along the right branch, and those of a plain step behind it.

    Args:
        others: Tells the wrong branches of two runs apart.
    """
    twin = row.copy()
    tree = Tree(row.last_token)
    tree.add(tree.add(0, _wrong(answer[0], others)), 3 + others)
    right = [0]
    for at in range(_RIGHT):
        node = tree.add(right[-1], answer[at])
        tree.add(right[-1], _wrong(answer[at], others + 2))
        right.append(node)
    fork = kind(twin.slots, twin.slots.lengths[0])
    if isinstance(fork, _Spoilt):
        fork.right = right
    passed = trunk.branch(fork, tree.reach(range(len(tree))), mx.array(tree.tokens))
    logits = passed.host()
    seen = [logits[node].copy() for node in right]
    fork.keep(right)
    twin.slots.advance(0, len(right))
    step = trunk.step(twin.slots, Layout([1]), mx.array([answer[_RIGHT]]))
    return seen, step.host()[0].copy()


def _wrong(token: int, which: int) -> int:
    """Return another token than the given one; each `which` has its own."""
    return 4 + which if token < 4 else which


def _most_apart(
    ours: Sequence[NDArray[np.float32]], theirs: Sequence[NDArray[np.float32]]
) -> float:
    return max(apart(a, b) for a, b in zip(ours, theirs, strict=False))
