"""Rows whose keys and values are no numbers, for checks that nobody else notices."""

from collections.abc import Sequence

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from ..runtime.context import Sampling
from .base import Lane, Row
from .device import pick_keyed

_SAMPLING = Sampling(temperature=0.8, top_p=0.9)
_KEYS = ((1, 2), (3, 4))


def leave_spoilt(lane: Lane, rows: Sequence[Row]) -> list[Row]:
    """Let spoilt copies of rows fail in a lane, and the last of them leave; return the others."""
    spoilt = [row.copy() for row in rows]
    for row in spoilt:
        row.slots.spoil()
    if len(spoilt) > 1:
        lane.step(spoilt, [0] * len(spoilt))
        lane.close(spoilt.pop())
    return spoilt


def chosen_alike(logits: NDArray[np.float32]) -> bool:
    """Whether the device chooses a row's token beside no numbers as it does beside numbers."""
    picks = [
        pick_keyed(mx.array(np.stack([other, logits])), (_SAMPLING,) * 2, _KEYS, None)
        .tokens[1]
        .item()
        for other in (np.zeros_like(logits), np.full_like(logits, np.nan))
    ]
    return picks[0] == picks[1]
