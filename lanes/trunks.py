"""Which arithmetic a model gets: constant-shape where it holds, else mlx-lm's own layers.

Whatever is taken gives what mlx-lm gives, which is measured before and after (reference.py).
"""

from collections.abc import Sequence

from ..runtime.errors import LaneRefused, ModelError
from ..runtime.model import LoadedModel
from . import lockstep, reference
from .base import Check, Trunk
from .halves import Halves
from .heads.qwen3_next import HeadParts
from .known import unsupported
from .lockstep import LockstepTrunk
from .reference import Reference, why_layer_differs
from .selfcheck import rounding
from .solo import SoloTrunk, without_checkpoint
from .stock import StockTrunk, foreign_caches
from .tiles import Tiles, probe_tiles


def choose_trunk(
    model: LoadedModel,
    parts: HeadParts | None,
    one_row: bool,
    exact_widths: bool,
    chunk: int | None,
    own: Sequence[Reference],
) -> tuple[Trunk, str, tuple[Check]]:
    """Take constant-shape arithmetic where it holds on this machine, else mlx-lm's own layers.

    Args:
        one_row: Whether no pass will hold more than one row and one branch of it.
        chunk: The most prompt tokens of one pass of mlx-lm's layers, None for their own number.
        own: What mlx-lm's own layers and caches give.

    Returns:
        The trunk, why it is that one, and how far it is from mlx-lm.

    Raises:
        LaneRefused: When no trunk gives what mlx-lm gives.
        ModelError: When the model's state cannot lie side by side and the mode needs that.
    """
    net, vocab_size, bound = model.net, model.card.vocab_size, rounding(model.card)
    tiles, why = _tiles(model, parts, exact_widths)
    if tiles is not None:
        trunk = LockstepTrunk(net, tiles, vocab_size)
        check = reference.compare(trunk, own, bound)
        _refuse_other_logits(check, trunk.arithmetic)
        return trunk, why, (check,)
    foreign, routed = foreign_caches(net), reference.routed(net)
    if not foreign:
        stock = StockTrunk(net, vocab_size, chunk)
        check = _compared(stock, own, bound, True, routed)
        if not (check.passed or one_row):
            _refuse_other_logits(check, "rows side by side")
        if check.passed:
            return stock, why, (check,)
        why += f"; on caches of its own, since rows side by side are off {check.found}"
    elif not one_row:
        raise ModelError(
            f"model {model.card.name!r} keeps its state in {', '.join(foreign)}, which holds no "
            "rows or branches side by side; serve it with scheduler_mode serial or cooperative"
        )
    else:
        why += f"; state in {', '.join(foreign)}"
    solo = SoloTrunk(net, vocab_size, chunk)
    check = _compared(solo, own, bound, not without_checkpoint(net), routed)
    _refuse_other_logits(check, solo.arithmetic)
    return solo, why, (check,)


def _compared(
    trunk: Trunk, own: Sequence[Reference], bound: float, rewinds: bool, routed: bool
) -> Check:
    """Compare with mlx-lm; a model whose classes cannot run so differs, whatever they raise."""
    try:
        return reference.compare(trunk, own, bound, rewinds=rewinds, routed=routed)
    except Exception as error:
        return Check(reference.NAME, False, f"{type(error).__name__}: {error}")


def _refuse_other_logits(check: Check, what: str) -> None:
    if not check.passed:
        raise LaneRefused(what, check.name, check.found)


def _tiles(
    model: LoadedModel, parts: HeadParts | None, exact_widths: bool
) -> tuple[Tiles | None, str]:
    """Return the shapes of constant-shape arithmetic, None where it does not hold, and why."""
    if model.card.device != "cpu" or model.card.dtype != "float32":
        return None, "constant-shape arithmetic is for float32 on CPUs"
    if (why_not := unsupported(model.net)) is not None:
        return None, why_not
    net = model.net
    layers = [net.layers[0], *([] if parts is None else parts.layers)]
    others = [Halves(net).output_weight, *([] if parts is None else [parts.fc.weight])]
    tiles = probe_tiles(lockstep.products(layers, *others), exact_widths)
    if tiles is None:
        return None, "this BLAS rounds by a row's place in every tile"
    for layer in layers:
        if (differs := why_layer_differs(layer, tiles)) is not None:
            return None, differs
    return tiles, f"rows keep their bits in tiles of {tiles.tile}, a lone row is in {tiles.lone}"
