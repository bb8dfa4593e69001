"""What mlx-lm's own layers compute, taken before anything is replaced, and the comparison with it.

B1 of a trunk cannot vouch for it, since B1 is rebuilt too. So the model is called as mlx-lm calls
it, with caches of its own: a prompt in two pieces, then token by token. Later a trunk reads the
same prompts in its own tiles, and steps over one and over several positions.
"""

from collections.abc import Sequence
from typing import Any, Final

import mlx.core as mx
import mlx.nn as nn
import msgspec
import numpy as np
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from numpy.typing import NDArray

from ..runtime.errors import ModelError
from .base import Check, Trunk
from .frames import FrameCache
from .lockstep import LockstepBlock, prefill_frame, step_frame
from .ragged import Layout, RowSlots
from .rotation import Rotation
from .sampler import Logits
from .tiles import Tiles

NAME: Final = "against mlx-lm"

_PROMPTS: Final = (37, 5)  # the short one is how the long one begins
_CUT: Final = 18  # where the second of two other ways to read it cuts
_STEPS: Final = (2, 1)  # positions of the steps behind a prompt
_PROBED: Final = 24  # positions a single layer is tried on
_LAYER_BOUND: Final = 1e-4  # of the root mean square of what a layer adds; seen: 2e-6

# Largest difference that is rounding in rebuilt layers: so many standard deviations of the logits,
# or so many times what mlx-lm's own logits move by when it reads the prompt in other pieces. Seen:
# 1e-5 deviations, and up to 15 times in models whose attention is so sharp that rounding grows.
_REBUILT_BOUND: Final = 5e-4
_LEAST_SPREAD: Final = 1e-3  # logits that lie closer together are all rounding
_TIMES_OWN: Final = 100
_TIMES_OWN_STOCK: Final = 4  # mlx-lm's own layers, whose bound is the type's


class Reference(msgspec.Struct, frozen=True):
    """What mlx-lm gives for one prompt and the tokens behind it.

    Args:
        tokens: The tokens behind the prompt.
        logits: Of the prompt's last position and of every token, [1 + tokens, vocabulary].
        moved: The largest difference of a logit, at a position of any reference, when mlx-lm reads
            all of it in other pieces, of two ways to cut it.
    """

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Logits
    moved: float


def own_logits(net: nn.Module, vocab_size: int) -> list[Reference]:
    """Run a model as mlx-lm does; to be called before any layer of it is replaced.

    Raises:
        ModelError: When mlx-lm cannot run it.
    """
    length = max(_PROMPTS)
    rng = np.random.default_rng(12)
    every = tuple(map(int, rng.integers(0, vocab_size, length + sum(_STEPS))))
    middle = length * 2 // 3
    pieces = [every[:middle], every[middle:length], *([token] for token in every[length:])]
    try:
        logits = _own(net, pieces)
        others = [_own(net, pieces) for pieces in ([every], [every[:_CUT], every[_CUT:]])]
    except Exception as error:  # whatever a family's code raises, this model cannot be served
        raise ModelError(f"mlx-lm cannot run this model: {type(error).__name__}: {error}") from None
    spans = [slice(length - 1, length + sum(_STEPS)) for length in _PROMPTS]
    moved = max(apart(other[span], logits[span]) for other in others for span in spans)
    return [
        Reference(every[:length], every[length : span.stop], logits[span], moved)
        for length, span in zip(_PROMPTS, spans, strict=True)
    ]


def _own(model: Any, pieces: Sequence[Sequence[int]]) -> Logits:
    """Return the logits of every position of a sequence that is read piece by piece."""
    caches = make_prompt_cache(model)
    rows = []
    for piece in pieces:
        logits = model(mx.array([list(piece)]), cache=caches)[0].astype(mx.float32)
        mx.eval(logits)
        rows.append(np.array(logits))
    return np.concatenate(rows)


def compare(
    trunk: Trunk,
    references: Sequence[Reference],
    bound: float,
    *,
    rewinds: bool = True,
    routed: bool = False,
) -> Check:
    """Compare a trunk with what mlx-lm gave.

    Args:
        rewinds: Whether the trunk can step over several positions, of which some may go again.
        bound: The largest difference of a logit that the type explains. Rebuilt layers, which
            compute in float32, are held to a tighter one.
        routed: Whether the model has routed experts: rounding then takes another expert where two
            are close, so that a large difference is reported and not refused.
    """
    moved = max(reference.moved for reference in references)
    if not (np.isfinite(moved) and all(sound(reference.logits) for reference in references)):
        return Check(NAME, False, "mlx-lm's own logits are not finite; the weights are damaged")
    if trunk.arithmetic == "constant-shape":
        every = np.concatenate([reference.logits for reference in references])
        spread = float(np.std(every[np.isfinite(every)]))
        bound = max(_REBUILT_BOUND * max(_LEAST_SPREAD, spread), _TIMES_OWN * moved)
        routed = False
    else:
        bound = max(bound, _TIMES_OWN_STOCK * moved)
    worst = max(apart(_seen(trunk, each, rewinds), each.logits) for each in references)
    found = f"largest logit difference {worst:.3g} of {bound:.3g} allowed"
    if routed and bound < worst < np.inf:
        return Check(NAME, True, f"{found}; taken, since rounding may choose other experts")
    return Check(NAME, worst <= bound, found)


def routed(net: nn.Module) -> bool:
    """Whether a model chooses among experts."""
    return any(isinstance(m, SwitchLinear | QuantizedSwitchLinear) for m in net.modules())


def sound(logits: Logits) -> bool:
    """Whether logits [..., vocabulary] can be sampled: no NaN, and a largest that is a number.

    Tokens that a model masks out, with -inf, are no fault.
    """
    return bool(np.isfinite(logits.max(axis=-1)).all())


def apart(ours: Logits, theirs: Logits) -> float:
    """Return the largest difference of two logits of a token, where both are numbers.

    Infinite where any is NaN or one is -inf and the other is not.
    """
    masked = np.isneginf(ours)
    if not np.array_equal(masked, np.isneginf(theirs)):
        return float("inf")
    worst = float(np.abs(np.where(masked, 0, ours) - np.where(masked, 0, theirs)).max())
    return worst if np.isfinite(worst) else float("inf")


def _seen(trunk: Trunk, reference: Reference, rewinds: bool) -> Logits:
    """Run a lone row over a reference's tokens on a trunk."""
    slots, prompt, at = trunk.new_row(), reference.prompt, 0
    rows = []
    while at < len(prompt):
        piece = prompt[at : at + trunk.prefill_tile]
        at += len(piece)
        passed = trunk.prefill(slots, piece, want="last" if at == len(prompt) else "none")
        passed.settle()
        if at == len(prompt):
            rows.append(passed.host()[-1:].copy())
    at = 0
    for count in _STEPS if rewinds else [1] * sum(_STEPS):
        tokens = mx.array(reference.tokens[at : at + count])
        rows.append(trunk.step(slots, Layout([count]), tokens).host().copy())
        slots.advance(0, count)
        at += count
    return np.concatenate(rows)


def why_layer_differs(layer: Any, tiles: Tiles) -> str | None:
    """Rebuild one layer beside mlx-lm's and compare what both add to random hidden states.

    Args:
        layer: A layer of mlx-lm's, which is left as it is.

    Returns:
        None when they agree within rounding.
    """
    size = layer.input_layernorm.weight.shape[0]
    states = np.random.default_rng(9).standard_normal((_PROBED, size), dtype=np.float32)
    x, middle = mx.array(states), _PROBED - 2
    cache = KVCache()
    theirs = [
        np.array(layer(x[None, :middle], "causal", cache)[0]),
        np.array(layer(x[None, middle:], "causal", cache)[0]),
    ]
    ours = _rebuilt(layer, x, middle, tiles)
    added = np.concatenate(theirs) - states
    off = _root_mean_square(ours - states - added) / _root_mean_square(added)
    if off <= _LAYER_BOUND:
        return None
    return f"a rebuilt layer differs from mlx-lm's by {off:.3g} of what it adds"


def _rebuilt(layer: Any, x: mx.array, middle: int, tiles: Tiles) -> NDArray[np.float32]:
    turns, block, slots = Rotation(layer.self_attn.rope), LockstepBlock(layer), RowSlots(1, 1)
    read = prefill_frame(slots, 0, 0, middle, turns)
    first = np.array(block(x[:middle, None], None, FrameCache(read, 0))[:, 0])
    layout = Layout([x.shape[0] - middle])
    step = step_frame(slots, [middle], layout, turns, tiles)
    second = np.array(block(x[middle:, None], None, FrameCache(step, 0))[:, 0])
    return np.concatenate([first, second])


def _root_mean_square(x: NDArray[np.float32]) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))
