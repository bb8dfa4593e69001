"""throughput, balanced, b1-exact: three ways to build the wider lanes, no branch in a step.

throughput runs everything at the lane's geometry. balanced does so too, except that the most
sensitive products, those of the first layer's attention, whose rounding all later layers carry on,
are computed row by row in B1's shape. b1-exact steps its rows one after another on the B1 lane.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from msgspec.structs import replace

from ..runtime.context import RowContext
from .base import Check, Lane, LaneSpec, Receipt, Row, RowDelta, Trunk
from .geometry import lane_name
from .lockstep import LockstepTrunk

BALANCED: Final = "balanced"
B1_EXACT: Final = "b1-exact"

_ATTENTION: Final = ("self_attn.", "linear_attn.", "qkv")  # names in the families we know


class RowByRow(nn.Module):
    """A product that takes the rows of its input one at a time, in the shape a lone row has."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def __call__(self, x: mx.array) -> mx.array:
        """Multiply [rows, ..., width]."""
        linear: Any = self.linear
        return mx.concatenate([linear(x[row : row + 1]) for row in range(x.shape[0])])


class InTurn:
    """A wider lane whose rows step one after another on the B1 lane."""

    def __init__(self, narrow: Lane, geometry: int) -> None:
        self._narrow = narrow
        spec = narrow.spec
        self.spec: LaneSpec = replace(
            spec, name=lane_name(spec.kind, geometry), geometry=geometry, numerics=B1_EXACT
        )
        itself = Check("arithmetic of B1", True, f"steps each row on {spec.name}")
        self.receipt: Receipt = replace(narrow.receipt, checks=(*narrow.receipt.checks, itself))

    def open(self, key: str, context: RowContext) -> Row:
        """Start a row; see `Lane.open`."""
        return self._narrow.open(key, context)

    def prefill(self, row: Row, count: int) -> RowDelta | None:
        """Read prompt tokens; see `Lane.prefill`."""
        return self._narrow.prefill(row, count)

    def step(self, rows: Sequence[Row], depths: Sequence[int]) -> list[RowDelta]:
        """Step every row once; see `Lane.step`."""
        pairs = zip(rows, depths, strict=True)
        return [delta for row, depth in pairs for delta in self._narrow.step([row], [depth])]

    def close(self, row: Row) -> None:
        """Let the row go; see `Lane.close`."""
        self._narrow.close(row)


def balance(trunk: Trunk, first_layer: nn.Module) -> str:
    """Let the products of a model's first attention take row by row; say what was done."""
    if isinstance(trunk, LockstepTrunk) and trunk.tiles.lone == trunk.tiles.tile:
        return "balanced: every product has B1's bits as it is"
    swaps = [
        (name, RowByRow(module))
        for name, module in first_layer.named_modules()
        if isinstance(module, nn.Linear | nn.QuantizedLinear) and name.startswith(_ATTENTION)
    ]
    first_layer.update_modules(tree_unflatten(swaps))
    return "balanced: row by row " + ", ".join(sorted(name for name, _ in swaps))
