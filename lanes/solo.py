"""Models whose state is more than keys and values, such as sliding windows or recurrences.

Each row keeps mlx-lm's own cache objects, so any family mlx-lm can run is served at B1; the
wider lanes need rows side by side, which these caches cannot hold.
"""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.cache import make_prompt_cache
from numpy.typing import NDArray

from ..runtime.errors import ModelError
from .ragged import RowSlots


class CachedRow(RowSlots):
    """One row's state in the model's own caches; it has no slots to move between."""

    def __init__(self, caches: list[Any]) -> None:
        super().__init__(1, 0)
        self.caches = caches


class SoloTrunk:
    """An mlx-lm model as it is, one row a pass."""

    arithmetic = "stock"
    prefill_tile = 512

    def __init__(self, net: nn.Module, vocab_size: int) -> None:
        self._net: Any = net
        self.vocab_size = vocab_size

    def tile_for(self, rows: int) -> int:
        """Return 1: products have the shape the row has."""
        return 1

    def new_row(self) -> RowSlots:
        """Return a row with fresh caches."""
        return CachedRow(make_prompt_cache(self._net))

    def new_slots(self, count: int) -> RowSlots:
        """Return a row; there are no wider slots.

        Raises:
            ModelError: When more than one is asked for.
        """
        if count != 1:
            raise ModelError(f"this model's caches cannot hold {count} rows side by side")
        return self.new_row()

    def prefill(
        self, slots: RowSlots, tokens: Sequence[int], *, want: str
    ) -> NDArray[np.float32] | None:
        """Read one tile; see `Trunk.prefill`."""
        logits = self._run(slots, tokens)
        slots.lengths[0] += len(tokens)
        if want == "none":
            return None
        return logits if want == "all" else logits[-1:]

    def step(self, slots: RowSlots, tokens: Sequence[int]) -> NDArray[np.float32]:
        """Run one token; see `Trunk.step`."""
        return self._run(slots, tokens)

    def _run(self, slots: RowSlots, tokens: Sequence[int]) -> NDArray[np.float32]:
        assert isinstance(slots, CachedRow)
        logits = self._net(mx.array([list(tokens)]), cache=slots.caches)[0].astype(mx.float32)
        mx.eval(logits, [cache.state for cache in slots.caches])
        return np.array(logits, copy=False)
