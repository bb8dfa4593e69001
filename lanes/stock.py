"""A model run through mlx-lm's own layers on ragged rows: any family with plain key-value caches.

A row's bits may depend on the width of the pass, since a library picks its kernels by shape;
the difference from B1 is measured when the lane is installed.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import KVCache, make_prompt_cache

from .fork import Fork, ForkCache
from .halves import Halves, halves
from .ragged import Frame, Layout, Pass, RowSlots, SlotMaker, StepCache
from .tree import Reach

SPAN_GRAIN: Final = 64  # spans grow in steps, so kernels meet few shapes


class StockTrunk(SlotMaker):
    """An mlx-lm model as it is; its caches must all be plain keys and values.

    Args:
        most: The most prompt tokens of one pass, where that is less than `prefill_tile`.
    """

    arithmetic = "stock"
    prefill_tile = 512

    def __init__(self, net: nn.Module, vocab_size: int, most: int | None = None) -> None:
        self._net: Any = net
        self.prefill_tile = min(self.prefill_tile, most or self.prefill_tile)
        self.halves = halves(net)
        super().__init__(len(make_prompt_cache(net)))
        self.vocab_size = vocab_size

    def tile_for(self, rows: int) -> int:
        """Return 1: products have the shape the rows have."""
        return 1

    def prefill(self, slots: RowSlots, tokens: Sequence[int], *, want: str) -> Pass:
        """Read one tile of a single row; see `Trunk.prefill`."""
        layout = Layout([len(tokens)])
        passed = self._run(slots, layout, mx.array(list(tokens)), want)
        slots.lengths[0] += len(tokens)
        return passed

    def step(self, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        """Run a few tokens a slot; see `Trunk.step`."""
        return self._run(slots, layout, tokens, "all")

    def branch(self, fork: Fork, reach: Reach, tokens: mx.array) -> Pass:
        """Run the nodes of a tree, each as a row of one position; see `Trunk.branch`."""
        caches = fork_caches(fork, reach, range(self.layers))
        layout = Layout([len(reach.depths)])
        return run(self._net, self.halves, fork.slots, layout, tokens[:, None], caches, "all")

    def _run(self, slots: RowSlots, layout: Layout, tokens: mx.array, want: str) -> Pass:
        slots.reserve(max(slots.lengths) + layout.most)
        frame = Frame(slots.lengths, layout.most, SPAN_GRAIN)
        caches = [StepCache(slots, layer, frame) for layer in range(self.layers)]
        return run(self._net, self.halves, slots, layout, layout.spread(tokens), caches, want)


def fork_caches(fork: Fork, reach: Reach, layers: Sequence[int]) -> list[ForkCache]:
    """Make room behind a row for the longest of some branches and return caches for their pass.

    Raises:
        RowError: When there is no memory for it.
    """
    span = -(-(fork.start + reach.paths.shape[1]) // SPAN_GRAIN) * SPAN_GRAIN
    fork.slots.reserve(span)
    return [ForkCache(fork, layer, reach, span) for layer in layers]


def run(
    net: Any,
    parts: Halves | None,
    slots: RowSlots,
    layout: Layout,
    tokens: mx.array,
    caches: Sequence[Any],
    want: str,
) -> Pass:
    """Run a model on tokens [slots, positions], for the logits that are wanted and no others.

    Args:
        parts: The model's halves, None where it can only run as a whole.
    """
    if parts is None:
        logits = layout.pack(net(tokens, cache=caches))
        picked = {"none": None, "last": logits[-1:], "all": logits}[want]
        return Pass(slots, layout, None, picked)
    hidden = layout.pack(parts.body(tokens, list(caches)))
    if want == "none":
        return Pass(slots, layout, hidden, None)
    return Pass(slots, layout, hidden, parts.output(hidden if want == "all" else hidden[-1:]))


def foreign_caches(net: nn.Module) -> list[str]:
    """Name the kinds of state a model keeps besides plain keys and values."""
    kinds = {type(cache) for cache in make_prompt_cache(net)} - {KVCache}
    return sorted(kind.__name__ for kind in kinds)
