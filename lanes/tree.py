"""A tree of drafts: which tokens may follow a row's last one, and which branch comes true.

Nodes are in an order in which parents come first; node 0 is the row's last token, whose keys and
values are not written yet. A branch is the way from the root to a leaf.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Reach(NamedTuple):
    """What some nodes of a tree see of it.

    Args:
        paths: Of each node the nodes on the way to it, itself last, [nodes, deepest + 1]; what
            lies behind it is filled up and never looked at.
        depths: How many nodes lie before each on its way, [nodes].
    """

    paths: NDArray[np.int64]
    depths: NDArray[np.int64]


class Tree:
    """A growing tree.

    Args:
        root: The token at the root.
    """

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.depths = [0]
        self._children: list[dict[int, int]] = [{}]

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int) -> int:
        """Add a child and return its node; the first child of a node is its likeliest."""
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self._children.append({})
        self._children[parent][token] = node
        return node

    def child(self, node: int, token: int) -> int | None:
        """Return the child of a node that stands for a token."""
        return self._children[node].get(token)

    def path(self, node: int) -> list[int]:
        """Return the nodes from the root to a node."""
        way = []
        while node >= 0:
            way.append(node)
            node = self.parents[node]
        return way[::-1]

    def tokens_to(self, node: int) -> list[int]:
        """Return the drafted tokens on the way to a node, the root's not among them."""
        return [self.tokens[at] for at in self.path(node)[1:]]

    @property
    def deepest(self) -> int:
        """Drafts on the longest branch."""
        return max(self.depths)

    @property
    def leaves(self) -> list[int]:
        """The last node of every branch."""
        return [node for node, children in enumerate(self._children) if not children]

    @property
    def main_line(self) -> list[int]:
        """The likeliest child of the likeliest child ... of the root, root included."""
        line = [0]
        while self._children[line[-1]]:
            line.append(next(iter(self._children[line[-1]].values())))
        return line

    def reach(self, nodes: Sequence[int], numbers: Mapping[int, int] | None = None) -> Reach:
        """Return what some nodes see.

        Args:
            numbers: What nodes are called where they lie, when that differs; nodes that are not
                in it are left out of the paths.
        """
        ways = [self.path(node) for node in nodes]
        if numbers is not None:
            ways = [[numbers[at] for at in way if at in numbers] for way in ways]
        most = max(map(len, ways))
        paths = [[*way, *[way[-1]] * (most - len(way))] for way in ways]
        return Reach(np.array(paths), np.array([len(way) - 1 for way in ways]))

    def best(self, values: Sequence[float], least: float, nodes: int, branches: int) -> "Tree":
        """Return the part of this tree that is worth most, likeliest children first.

        Args:
            values: Of each node the chance that the row goes through it; no more than its
                parent's.
            least: What a node must be worth; the likeliest child of the root is kept in any case.
            nodes: The most nodes to keep, the root included.
            branches: The most branches to keep.
        """
        kept = self.worth_most(values, least, nodes, branches)
        out = Tree(self.tokens[0])
        self._copy_into(out, 0, 0, kept, values)
        return out

    def worth_most(
        self, values: Sequence[float], least: float, nodes: int, branches: int
    ) -> set[int]:
        """Return the nodes of which `best` makes its tree."""
        kept, leaves = {0}, {0}
        for node in sorted(range(1, len(self)), key=lambda node: (-values[node], node)):
            if len(kept) == nodes or (len(kept) > 1 and values[node] < least):
                break
            parent = self.parents[node]
            if parent in kept and (parent in leaves or len(leaves) < branches):
                kept.add(node)
                leaves = leaves - {parent} | {node}
        return kept

    def _copy_into(
        self, out: "Tree", node: int, copied: int, kept: set[int], values: Sequence[float]
    ) -> None:
        children = [child for child in self._children[node].values() if child in kept]
        for child in sorted(children, key=lambda child: -values[child]):
            self._copy_into(out, child, out.add(copied, self.tokens[child]), kept, values)
