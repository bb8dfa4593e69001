"""The noise of a row: a pure function of (seed, position, purpose, token), whoever asks and when.

Counter-based, never a stateful generator: order, neighbours, width, depth and mode cannot
change it. Integer mixing only (Salmon et al. 2011, "Parallel random numbers: as easy as
1, 2, 3"), so any subset of tokens sees the noise the whole vocabulary would, on any device.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

_MASK: Final = (1 << 64) - 1
_GOLDEN: Final = 0x9E3779B97F4A7C15

TOKEN_STEP: Final = 0x9E3779B9  # sets the counters of neighbouring tokens apart
MIXERS: Final = (0x7FEB352D, 0x846CA68B)  # the factors of "lowbias32"

# Purposes: what a position's noise is for. Draws that must be independent of each other differ
# in it; a coupled draft shares CHOOSE with the choice it foretells.
CHOOSE: Final = 0  # choosing the token of a position
DRAFT: Final = 1  # drafting it, under rejection sampling
ACCEPT: Final = 2  # accepting the draft
RESIDUAL: Final = 3  # choosing another token in a rejected draft's place

# 32 random bits a token: u lies in [2^-33, 1 - 2^-33], so Gumbel noise has hard bounds.
GUMBEL_MAX: Final = float(-np.log(-np.log1p(-(2.0**-33))))


def stream_key(seed: int, position: int, purpose: int = CHOOSE) -> tuple[int, int]:
    """Return the two 32-bit words that name the noise of one position.

    splitmix64 (Steele et al. 2014) over the three inputs, each absorbed in its own round.
    """
    state = seed & _MASK
    for word in (position, purpose):
        state = _splitmix64(state ^ _splitmix64((word + _GOLDEN) & _MASK))
    return state & 0xFFFFFFFF, state >> 32


def token_bits(key: tuple[int, int], tokens: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return 32 random bits for each token id."""
    bits = tokens * np.uint32(TOKEN_STEP)
    bits += np.uint32(key[0])
    _mix32(bits)
    bits ^= np.uint32(key[1])
    _mix32(bits)
    return bits


def uniform(key: tuple[int, int]) -> float:
    """Return the one number in [0, 1) that a key stands for, with 53 random bits."""
    return (key[1] << 21 | key[0] >> 11) * 2.0**-53


def gumbel(bits: NDArray[np.uint32]) -> NDArray[np.float64]:
    """Return standard Gumbel noise for random bits; argmax of logits + noise samples softmax."""
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log(uniform))


def bits_at_least(threshold: float) -> int:
    """Return the smallest bits whose Gumbel noise may reach `threshold` (a safe lower bound)."""
    uniform = float(np.exp(-np.exp(-threshold)))
    return max(0, min(int(uniform * 2.0**32) - 1, 0xFFFFFFFF))


def _mix32(x: NDArray[np.uint32]) -> None:
    """Mix in place: the 32-bit finaliser "lowbias32" (Wellons 2018, hash-prospector)."""
    x ^= x >> np.uint32(16)
    x *= np.uint32(MIXERS[0])
    x ^= x >> np.uint32(15)
    x *= np.uint32(MIXERS[1])
    x ^= x >> np.uint32(16)


def _splitmix64(state: int) -> int:
    z = (state + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
