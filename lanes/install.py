"""From mode, model and settings to installed lanes: check each, then install it or refuse aloud."""

from collections.abc import Sequence
from typing import Final

import msgspec

from ..runtime.errors import ModelError
from ..runtime.model import LoadedModel
from ..runtime.modes import Mode
from . import lockstep
from .ar import ArLane
from .base import Lane, Trunk
from .geometry import GEOMETRIES, geometry_for, lane_name
from .lockstep import LockstepTrunk
from .selfcheck import LaneChecker, probe_tile
from .solo import SoloTrunk
from .stock import StockTrunk, foreign_caches

# Which geometries a mode needs; rows then run on the narrowest that carries them.
NEEDS: Final[dict[Mode, Sequence[int]]] = {
    Mode.SERIAL: (1,),
    Mode.COOPERATIVE: (1,),
    Mode.AR_BATCH: GEOMETRIES,
}


class Installed(msgspec.Struct, frozen=True):
    """The lanes of a running server, narrowest first, and how their arithmetic was chosen."""

    lanes: tuple[Lane, ...]
    arithmetic: str
    why: str


def install(model: LoadedModel, mode: Mode, widest: int, exact_widths: bool = True) -> Installed:
    """Build and check the lanes a mode needs on a loaded model.

    Args:
        widest: The most rows that will step together; wider geometries are left out.
        exact_widths: Give a lone row the bits of any width, where arithmetic is constant-shape.

    Raises:
        LaneRefused: When a check fails; nothing else is run in its place.
        ModelError: When the mode or the model has no lane in this build.
    """
    if mode not in NEEDS:
        names = ", ".join(m.value for m in NEEDS)
        raise ModelError(
            f"scheduler_mode {mode.value!r} is not installed in this build; it has: {names}"
        )
    needed = [g for g in NEEDS[mode] if g <= geometry_for(widest)]
    trunk, why = _choose_trunk(model, needed, exact_widths)
    checker = LaneChecker(trunk, model.card.dtype)
    lanes: list[Lane] = []
    for geometry in needed:
        receipt = checker.check(lane_name("ar", geometry), geometry)
        lanes.append(ArLane(trunk, geometry, model.card.dtype, receipt))
    return Installed(tuple(lanes), trunk.arithmetic, why)


def _choose_trunk(
    model: LoadedModel, geometries: Sequence[int], exact_widths: bool
) -> tuple[Trunk, str]:
    """Take constant-shape arithmetic where it holds on this machine, else mlx-lm's own layers."""
    net, vocab_size = model.net, model.card.vocab_size
    why_not = _why_not_constant_shape(model)
    if why_not is None:
        tile = probe_tile(net)
        if tile is not None:
            lone = tile if exact_widths else 1
            why = f"rows keep their bits in tiles of {tile}, a lone row is in one of {lone}"
            return LockstepTrunk(net, tile, lone, vocab_size), why
        why_not = "this BLAS rounds by a row's place in every tile"
    foreign = foreign_caches(net)
    if not foreign:
        return StockTrunk(net, vocab_size), why_not
    if max(geometries) > 1:
        raise ModelError(
            f"model {model.card.name!r} keeps its state in {', '.join(foreign)}, which holds no "
            "rows side by side; serve it with scheduler_mode serial or cooperative"
        )
    return SoloTrunk(net, vocab_size), f"{why_not}; state in {', '.join(foreign)}"


def _why_not_constant_shape(model: LoadedModel) -> str | None:
    if model.card.device != "cpu" or model.card.dtype != "float32":
        return "constant-shape arithmetic is for float32 on CPUs"
    return lockstep.unsupported(model.net)
