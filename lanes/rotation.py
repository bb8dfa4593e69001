"""Rotary embedding as a table of a pass's positions, for the kinds whose formula is known.

Each kind of mlx-lm's is named with every attribute it has. One with another type, or with an
attribute that nobody here has read, is not known: its model keeps mlx-lm's own layers.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.rope_utils import Llama3RoPE, ProportionalRoPE, SuScaledRoPE, YarnRoPE
from numpy.typing import NDArray

from .frames import Table

ATTRIBUTES: Final[dict[type, frozenset[str]]] = {
    nn.RoPE: frozenset({"dims", "traditional", "base", "scale"}),
    Llama3RoPE: frozenset({"dims", "traditional", "max_position_embeddings", "_freqs"}),
    ProportionalRoPE: frozenset({"dims", "traditional", "_freqs"}),
    YarnRoPE: frozenset({"dims", "traditional", "mscale", "_freqs"}),
    SuScaledRoPE: frozenset({"dim", "original_max_position_embeddings", "_scale", "_freqs"}),
}

# Rounding of a turned unit vector in float32, and what a position adds to it: mlx-lm works angles
# out in float32, this file in float64. Seen: 3e-7, and 1.3e-7 a position.
_ROUNDING: Final = 1e-5
_ROUNDING_A_POSITION: Final = 5e-7
_NEAR: Final = (0, 1, 2, 3, 7, 31, 100, 1000)


class Turn(NamedTuple):
    """What a kind of rotary embedding does at a position.

    Args:
        angles: Radians a position, float64 [head size / 2].
        magnitude: What queries and keys are multiplied with besides (YaRN, LongRoPE).
    """

    angles: NDArray[np.float64]
    magnitude: float


class Rotation:
    """Rotary embedding as a table of the positions of a pass (Su et al. 2021).

    Args:
        rope: A module that `known_turn` knows.
    """

    def __init__(self, rope: Any) -> None:
        turn = known_turn(rope)
        assert turn is not None, "unsupported() looks at every layer's rope"
        self._turn = turn

    def table(self, positions: NDArray[np.int64]) -> Table:
        """Return cosines and signed sines, [positions, 1, head size], times the magnitude."""
        angles = positions[:, None] * self._turn.angles
        cos, sin = self._turn.magnitude * np.cos(angles), self._turn.magnitude * np.sin(angles)
        table = np.stack([np.concatenate([cos, cos], -1), np.concatenate([-sin, sin], -1)])
        both = mx.array(table.astype(np.float32))[:, :, None]
        return both[0], both[1]


def known_turn(rope: Any) -> Turn | None:
    """Return what a rotary embedding does, or None for a kind that is not known here."""
    if type(rope) not in ATTRIBUTES or getattr(rope, "traditional", False):
        return None
    if type(rope) is nn.RoPE:
        half = rope.dims // 2
        return Turn(float(rope.scale) * float(rope.base) ** (-np.arange(half) / half), 1.0)
    wavelengths = np.array(rope._freqs.astype(mx.float32), dtype=np.float64)
    magnitude = getattr(rope, "mscale", None) or getattr(rope, "_scale", None) or 1.0
    return Turn(1.0 / wavelengths, float(magnitude))


def why_rotated_otherwise(rope: Any, size: int, far: Sequence[int]) -> str | None:
    """Turn a vector with a rotary embedding and with its table; say where they differ.

    Args:
        rope: Of a layer of mlx-lm's.
        size: The size of a head.
        far: Positions at which the kind may change its ways, tried beside the near ones.

    Returns:
        None when they agree within the rounding of float32 everywhere.
    """
    name, turn = type(rope).__name__, known_turn(rope)
    if turn is None:
        return f"does not know {name}"
    if 2 * len(turn.angles) != size:
        return f"does not know {name} over a part of each head"
    rotation = Rotation(rope)
    vector = mx.array(np.random.default_rng(6).standard_normal((1, 1, 1, size)), mx.float32)
    for position in sorted({*_NEAR, *far}):
        theirs = np.array(rope(vector, offset=position).astype(mx.float32)).ravel()
        ours = np.array(rotate(vector[0], *rotation.table(np.array([position])))).ravel()
        apart = float(np.abs(ours - theirs).max())
        if not apart <= _ROUNDING + _ROUNDING_A_POSITION * position:
            return f"turns otherwise than {name} at position {position}, by {apart:.3g}"
    return None


def rotate(x: mx.array, cos: mx.array, sin: mx.array) -> mx.array:
    """Turn [rows, heads, size] by half-split rotary embedding."""
    low, high = mx.split(x, 2, axis=-1)
    return x * cos + mx.concatenate([high, low], axis=-1) * sin
