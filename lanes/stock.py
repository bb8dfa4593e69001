"""A model run through mlx-lm's own layers on ragged rows: any family with plain key-value caches.

A row's bits may depend on the width of the pass, since a library picks its kernels by shape;
the difference from B1 is measured when the lane is installed.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from numpy.typing import NDArray

from .ragged import Frame, RowSlots, SlotMaker, StepCache

_SPAN_GRAIN: Final = 64  # spans grow in steps, so kernels meet few shapes


class StockTrunk(SlotMaker):
    """An mlx-lm model as it is; its caches must all be plain keys and values."""

    arithmetic = "stock"
    prefill_tile = 512

    def __init__(self, net: nn.Module, vocab_size: int) -> None:
        self._net: Any = net
        super().__init__(len(make_prompt_cache(net)))
        self.vocab_size = vocab_size

    def tile_for(self, rows: int) -> int:
        """Return 1: products have the shape the rows have."""
        return 1

    def prefill(
        self, slots: RowSlots, tokens: Sequence[int], *, want: str
    ) -> NDArray[np.float32] | None:
        """Read one tile of a single row; see `Trunk.prefill`."""
        logits = self._run(slots, mx.array([list(tokens)]), slots.lengths[0] + len(tokens))
        slots.lengths[0] += len(tokens)
        if want == "none":
            mx.eval(slots.keys, slots.values)
            return None
        picked = logits[0] if want == "all" else logits[0, -1:]
        return host_logits(picked, slots)

    def step(self, slots: RowSlots, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run one token a slot; see `Trunk.step`."""
        logits = self._run(slots, mx.array(list(tokens))[:, None], max(slots.lengths) + 1)
        return host_logits(logits[:, -1], slots)

    def _run(self, slots: RowSlots, inputs: mx.array, needed: int) -> mx.array:
        slots.reserve(needed)
        frame = Frame(slots.lengths, inputs.shape[1], _SPAN_GRAIN)
        caches = [StepCache(slots, layer, frame) for layer in range(self._layers)]
        logits: mx.array = self._net(inputs, cache=caches)
        return logits


def foreign_caches(net: nn.Module) -> list[str]:
    """Name the kinds of state a model keeps besides plain keys and values."""
    kinds = {type(cache) for cache in make_prompt_cache(net)} - {KVCache}
    return sorted(kind.__name__ for kind in kinds)


def host_logits(logits: mx.array, slots: RowSlots) -> NDArray[np.float32]:
    """Evaluate a pass and return its logits to the host without a copy where memory is shared."""
    out = logits.astype(mx.float32)
    mx.eval(out, slots.keys, slots.values)
    return np.array(out, copy=False)
