"""What must hold before a lane is installed, measured on the model it will run.

Row isolation: a row's logits keep every bit when all its neighbours change. Against B1: the
same rows at this geometry differ by no more than the type's bound. Tile: the smallest number
of rows at which the machine's products give a row the same bits at every place and width.
"""

import time
from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from ..runtime.context import RowContext, Sampling
from ..runtime.errors import LaneRefused
from .ar import ArLane
from .base import Check, Receipt, Trunk
from .geometry import GEOMETRIES

TILES: Final = (1, 8)

# Largest logit difference from B1 that is still rounding, a type; measured on real models.
BOUNDS: Final = {"float32": 2e-3, "float16": 0.25, "bfloat16": 1.0}
PACKED_BOUND: Final = 1.0  # packed weights compute in 16 bits

_STEPS: Final = 2
_LENGTHS: Final = (5, 66, 12, 3, 9, 62, 7, 2)  # one lies past a block of keys, one crosses it

Transcript = list[NDArray[np.float32]]


def probe_tile(net: nn.Module) -> int | None:
    """Return the smallest tile whose products give the same bits at every place and width.

    None when no tile does; rows then differ between widths by rounding.
    """
    weights: dict[tuple[int, ...], mx.array] = {}
    arrays: dict[str, mx.array] = dict(tree_flatten(net.parameters()))
    for array in arrays.values():
        if array.ndim == 2 and array.dtype == mx.float32:
            weights.setdefault(array.shape, array)
    for tile in TILES:
        if all(_tile_holds(weight, tile) for weight in weights.values()):
            return tile
    return None


class LaneChecker:
    """Checks the geometries of one trunk; what B1 gives is worked out once for all of them."""

    def __init__(self, trunk: Trunk, dtype: str) -> None:
        self._trunk = trunk
        self._prompts = _prompts(trunk.vocab_size)
        self._alone = _transcripts(trunk, self._prompts, 1)
        self._bound = BOUNDS.get(dtype, PACKED_BOUND)

    def check(self, lane_name: str, geometry: int) -> Receipt:
        """Check one geometry.

        Raises:
            LaneRefused: Naming the check that failed and what was seen.
        """
        began = time.perf_counter()
        together = self._alone[:1]
        if geometry > 1:
            together = _transcripts(self._trunk, self._prompts[:geometry], geometry)
        difference = max(map(_apart, together, self._alone))
        found = f"{difference:.3g} of {self._bound:.3g} allowed"
        checks = (
            _finite(together),
            self._isolation(geometry, together),
            Check("against B1", difference <= self._bound, found),
        )
        for check in checks:
            if not check.passed:
                raise LaneRefused(lane_name, check.name, check.found)
        return Receipt(checks, difference, round(time.perf_counter() - began, 3))

    def _isolation(self, geometry: int, before: Sequence[Transcript]) -> Check:
        """Change every neighbour of the first row, and its slot; its bits must stay."""
        others = [tuple(reversed(prompt)) for prompt in self._prompts[1:geometry]]
        changed = _transcripts(self._trunk, [*others, self._prompts[0]], geometry)[-1]
        apart = _apart(changed, before[0])
        return Check("row isolation", apart == 0.0, f"largest difference {apart:.3g}")


def _apart(ours: Transcript, theirs: Transcript) -> float:
    return max(float(np.abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))


def _finite(transcripts: Sequence[Transcript]) -> Check:
    bad = sum(not np.isfinite(step).all() for rows in transcripts for step in rows)
    return Check("finite logits", bad == 0, f"{bad} steps with a non-finite logit")


def _transcripts(
    trunk: Trunk, prompts: Sequence[tuple[int, ...]], geometry: int
) -> list[Transcript]:
    """Run greedy rows at a geometry and return each row's logits, step by step."""
    recorder = _Recorder(trunk)
    lane = ArLane(recorder, geometry, "", Receipt((), 0.0, 0.0))
    sampling = Sampling(temperature=0)
    rows = [
        lane.open(str(i), RowContext(p, sampling, 0, _STEPS + 1, frozenset()))
        for i, p in enumerate(prompts)
    ]
    for row in rows:
        lane.prefill(row, len(row.context.prompt))
    groups = [rows] if geometry > 1 else [[row] for row in rows]
    out: list[Transcript] = [[] for _ in rows]
    for group in groups:
        for _ in range(_STEPS):
            lane.step(group, 0)
            for place, row in enumerate(group):
                out[rows.index(row)].append(recorder.last[place].copy())
    for row in rows:
        lane.close(row)
    return out


class _Recorder:
    """A trunk that remembers the logits of its last step."""

    def __init__(self, trunk: Trunk) -> None:
        self._trunk = trunk
        self.last: NDArray[np.float32] = np.empty((0, 0), np.float32)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._trunk, name)

    def step(self, slots: Any, tokens: Sequence[int]) -> NDArray[np.float32]:
        self.last = self._trunk.step(slots, tokens)
        return self.last


def _prompts(vocab_size: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(8)
    return [tuple(map(int, rng.integers(0, vocab_size, n))) for n in _LENGTHS]


def _tile_holds(weight: mx.array, tile: int) -> bool:
    """Try one row at every place of every width that this tile leads to."""
    widths = sorted({-(-g // tile) * tile for g in GEOMETRIES} | {2 * tile})
    rng = np.random.default_rng(3)
    others = rng.standard_normal((widths[-1], weight.shape[1]), dtype=np.float32)
    probe = rng.standard_normal(weight.shape[1], dtype=np.float32)

    reference = None
    for width in widths:
        for place in range(width):
            rows = others[:width].copy()
            rows[place] = probe
            bits = np.array(mx.array(rows) @ weight.T)[place]
            if reference is None:
                reference = bits
            elif not np.array_equal(bits, reference):
                return False
    return True
