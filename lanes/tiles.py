"""Products in tiles: rows pass through a weight in blocks of fixed size, padded and cut again.

A BLAS picks its kernel, and so the order of its sums, by the shape of a product. Shapes that a
machine was seen to treat alike give a row the same bits wherever it lies and whoever is beside it.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Final

import mlx.core as mx
import msgspec
import numpy as np

_TILE: Final = 8  # the widest geometry, so one tile carries a step of any width
WIDE: Final = 16  # the widest tile: reading a weight costs so much that it is nearly free


class Tiles(msgspec.Struct, frozen=True):
    """Which shapes of a product give a row the same bits on this machine.

    Args:
        tile: Rows of the narrow tile; 1 when a row's bits depend on no shape.
        wide: Rows of the wide tile, `tile` when there is none.
        lone: Rows a product of a single row is padded to; with another number than `tile` its
            bits differ from everyone else's by rounding.
    """

    tile: int
    wide: int
    lone: int

    def tile_for(self, rows: int) -> int:
        """Return the rows that a product of `rows` rows is padded to a multiple of."""
        return self.lone if rows == 1 else self.tile

    def pieces(self, rows: int) -> list[int]:
        """Return the tiles that carry `rows` rows, the wide ones first."""
        if rows == 1:
            return [self.lone]
        if self.tile == 1:
            return [rows]
        whole, rest = divmod(rows, self.wide)
        narrow = -(-rest // self.tile) * self.tile
        return [self.wide] * whole + ([narrow] if narrow else [])


def probe_tiles(weights: Sequence[mx.array], exact_widths: bool) -> Tiles | None:
    """Find the tiles of this machine by trying one row at every place of each of them.

    Args:
        weights: The matrices rows will be multiplied with, one of each shape [out, in].
        exact_widths: Give a lone row the bits of the others, too.

    Returns:
        None when a row's bits depend on its place in every tile.
    """
    if all(_holds(weight, (1, 2, 3, 8, WIDE)) for weight in weights):
        return Tiles(1, 1, 1)
    if not all(_holds(weight, (_TILE,)) for weight in weights):
        return None
    wide = WIDE if all(_holds(weight, (_TILE, WIDE)) for weight in weights) else _TILE
    return Tiles(_TILE, wide, _TILE if exact_widths else 1)


def tiled(linear: Callable[[mx.array], mx.array], x: mx.array, tiles: Tiles) -> mx.array:
    """Multiply [rows, width] piece by piece; what a padded row holds does not matter."""
    rows = x.shape[0]
    pieces = tiles.pieces(rows)
    if len(pieces) == 1:
        return _padded(linear, x, pieces[0])
    out, at = [], 0
    for piece in pieces:
        out.append(_padded(linear, x[at : at + piece], piece))
        at += piece
    return mx.concatenate(out)


def _padded(linear: Callable[[mx.array], mx.array], x: mx.array, size: int) -> mx.array:
    rows = x.shape[0]
    if rows == size:
        return linear(x)
    if rows == 1:  # a single row repeats itself, without a copy
        return linear(mx.broadcast_to(x, (size, x.shape[1])))[:1]
    return linear(mx.concatenate([x, zeros(size - rows, x.shape[1])]))[:rows]


@cache
def zeros(rows: int, width: int) -> mx.array:
    """Return rows to pad with; made once, since making them is an operation of its own."""
    made = mx.zeros((rows, width), mx.float32)
    mx.eval(made)
    return made


def _holds(weight: mx.array, sizes: Sequence[int]) -> bool:
    """Whether one row has the same bits at every place of products of all these sizes."""
    rng = np.random.default_rng(3)
    others = rng.standard_normal((max(sizes), weight.shape[1]), dtype=np.float32)
    probe = rng.standard_normal(weight.shape[1], dtype=np.float32)
    seen = set()
    for size in sizes:
        for place in range(size):
            rows = others[:size].copy()
            rows[place] = probe
            seen.add(np.array(mx.array(rows) @ weight.T)[place].tobytes())
            if len(seen) > 1:
                return False
    return True
