"""Models whose state is more than keys and values, such as sliding windows or recurrences.

Each row keeps mlx-lm's own cache objects, so any family mlx-lm can run is served at B1; the
wider lanes need rows side by side, which these caches cannot hold.
"""

from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_map
from mlx_lm.models.cache import ArraysCache, KVCache, make_prompt_cache

from ..runtime.errors import ModelError
from .fork import Fork
from .halves import halves
from .ragged import Layout, Pass, RowSlots, SlotMaker
from .stock import run
from .tree import Reach

_CHECKPOINTED: Final = (KVCache, ArraysCache)


class CachedRow(RowSlots):
    """One row's state in the model's own caches; it has no slots to move between.

    A recurrent state cannot be cut back, so a pass of several positions leaves a checkpoint:
    what is kept in part goes back to it, and the kept tokens run again before the next pass.
    """

    def __init__(self, caches: list[Any], head_layers: int) -> None:
        super().__init__(1, head_layers)
        self.caches = caches
        self.again: list[int] = []  # kept tokens the caches have not read
        self._fresh: list[int] = []  # tokens of the last pass
        self._checkpoint: list[Any] = []

    def copy(self) -> "CachedRow":
        """Return a copy of the row, caches included."""
        twin = CachedRow(deepcopy(self.caches), 0)
        twin.again = list(self.again)
        own = super().copy()
        twin.lengths, twin.drafted, twin.capacity = own.lengths, own.drafted, own.capacity
        twin.keys, twin.values = own.keys, own.values
        return twin

    def begin(self, tokens: list[int]) -> None:
        """Note a pass of `tokens`, those that run again included."""
        self._fresh = tokens
        if len(tokens) > 1:
            self._checkpoint = [_state(cache) for cache in self.caches]

    def advance(self, slot: int, kept: int) -> None:
        """Keep the first `kept` of the last pass's new positions; see `RowSlots.advance`."""
        self.lengths[slot] += kept
        keeping = len(self.again) + kept
        self.again = []
        if keeping < len(self._fresh):
            for cache, state in zip(self.caches, self._checkpoint, strict=True):
                _restore(cache, state)
            self.again = self._fresh[:keeping]

    def spoil(self) -> None:
        """See `RowSlots.spoil`; a cache whose state cannot be set stays as it is."""
        super().spoil()
        for cache in self.caches:
            with suppress(Exception):
                cache.state = tree_map(_no_numbers, cache.state)

    def retract(self, slot: int) -> bool:
        """Forget the last pass; see `RowSlots.retract`. Single tokens would give the same again."""
        super().retract(slot)
        if len(self._fresh) == 1:
            return False
        self.advance(slot, 0)
        return True


class SoloTrunk(SlotMaker):
    """An mlx-lm model as it is, one row a pass.

    Args:
        most: The most prompt tokens of one pass, where that is less than `prefill_tile`.
    """

    arithmetic = "stock"
    prefill_tile = 512

    def __init__(self, net: nn.Module, vocab_size: int, most: int | None = None) -> None:
        super().__init__(0)
        self.prefill_tile = min(self.prefill_tile, most or self.prefill_tile)
        self._net: Any = net
        self.halves = halves(net)
        self.vocab_size = vocab_size

    def tile_for(self, rows: int) -> int:
        """Return 1: products have the shape the row has."""
        return 1

    def new_slots(self, count: int) -> RowSlots:
        """Return a row with fresh caches; there are no wider slots.

        Raises:
            ModelError: When more than one is asked for.
        """
        if count != 1:
            raise ModelError(f"this model's caches cannot hold {count} rows side by side")
        return CachedRow(make_prompt_cache(self._net), self.head_layers)

    def prefill(self, slots: RowSlots, tokens: Sequence[int], *, want: str) -> Pass:
        """Read one tile; see `Trunk.prefill`."""
        passed = self._run(slots, list(tokens), want)
        slots.lengths[0] += len(tokens)
        return passed

    def step(self, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        """Run a few tokens; see `Trunk.step`."""
        assert isinstance(slots, CachedRow)
        again = len(slots.again)
        fresh: list[int] = tokens.tolist()  # type: ignore[assignment]
        every = slots.again + fresh
        slots.begin(every)
        passed = self._run(slots, every, "all")
        assert passed.logits is not None
        hidden = None if passed.hidden is None else passed.hidden[again:]
        return Pass(slots, layout, hidden, passed.logits[again:])

    def branch(self, fork: Fork, reach: Reach, tokens: mx.array) -> Pass:
        """Refuse: a state that runs on cannot be in several branches.

        Raises:
            ModelError: Always; `install` sees to it that nobody asks.
        """
        raise ModelError("this model's caches cannot hold branches side by side")

    def _run(self, slots: RowSlots, tokens: list[int], want: str) -> Pass:
        assert isinstance(slots, CachedRow)
        inputs = mx.array([tokens])
        layout = Layout([len(tokens)])
        passed = run(self._net, self.halves, slots, layout, inputs, slots.caches, want)
        mx.eval(passed.hidden, passed.logits, [cache.state for cache in slots.caches])
        return passed


def without_checkpoint(net: nn.Module) -> list[str]:
    """Name the kinds of state of a model that a partly accepted draft could not be undone in."""
    kinds = {type(cache) for cache in make_prompt_cache(net)} - set(_CHECKPOINTED)
    return sorted(kind.__name__ for kind in kinds)


def _no_numbers(array: Any) -> Any:
    if not isinstance(array, mx.array) or not mx.issubdtype(array.dtype, mx.floating):
        return array
    return mx.full(array.shape, float("nan"), array.dtype)


def _state(cache: Any) -> Any:
    """Remember a cache; arrays are never written in place by a recurrence, so a list will do."""
    return cache.offset if isinstance(cache, KVCache) else list(cache.cache)


def _restore(cache: Any, state: Any) -> None:
    if isinstance(cache, KVCache):
        cache.offset = state
    else:
        cache.cache = list(state)
