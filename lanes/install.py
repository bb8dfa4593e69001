"""From mode, model and settings to installed lanes: check each, then install it or refuse aloud."""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx
import msgspec
from mlx.utils import tree_flatten

from ..runtime.errors import HeadRefused, LaneRefused, NoHead, PacelineError
from ..runtime.model import LoadedModel
from ..runtime.modes import MUST_DRAFT, NEVER_DRAFT, Mode
from .ar import ArLane
from .base import Check, Lane, Receipt, Trunk
from .choosing import Chooser, HostChooser
from .device import DeviceChooser, device_is_faster
from .geometry import GEOMETRIES, geometry_for, lane_name
from .halves import halves
from .head import Head, LockstepHead, StockHead
from .heads.qwen3_next import HeadParts, build_head
from .heads.source import HeadSource, find_head
from .hyper import HYPER_LANE, HyperLane
from .lockstep import LockstepTrunk
from .mtp import MtpLane
from .numerics import B1_EXACT, BALANCED, InTurn, balance
from .prefix import PrefixBank
from .reference import own_logits
from .selfcheck import LaneChecker, check_golden, rounding
from .solo import without_checkpoint
from .stock import StockTrunk
from .trunks import choose_trunk
from .verify import ACCEPTANCE, Coupled

# Which geometries a mode needs; rows then run on the narrowest that carries them.
NEEDS: Final[dict[Mode, Sequence[int]]] = {
    Mode.SERIAL: (1,),
    Mode.COOPERATIVE: (1,),
    Mode.AR_BATCH: GEOMETRIES,
    Mode.MTP_BATCH: GEOMETRIES,
    Mode.MTP_COHORT_EXPERIMENTAL: GEOMETRIES,
    Mode.HYPER: (1,),  # and the lane that carries branches, whose steps are those of B1
}


class Wanted(msgspec.Struct, frozen=True):
    """What lanes are asked for.

    Args:
        widest: The most rows that will step together; wider geometries are left out.
        exact_widths: Give a lone row the bits of any width, where arithmetic is constant-shape.
        mtp: Draft with the model's head where the mode can and the model has one.
        acceptance: How drafts are accepted, "coupled" or "rejection".
        numerics: "throughput", "balanced" or "b1-exact"; see numerics.py.
        depth: A depth that was asked for, or None; above 0 it cannot be had without a head.
        prefix_bytes: Bytes of prompts' keys and values that are kept for reuse; 0 for none.
        chunk: The most prompt tokens read in one turn; None for as many as the arithmetic likes.
    """

    mode: Mode
    widest: int = 8
    exact_widths: bool = True
    mtp: bool = True
    acceptance: str = "coupled"
    numerics: str = "throughput"
    depth: int | None = None
    prefix_bytes: int = 0
    chunk: int | None = None


class Installed(msgspec.Struct, frozen=True):
    """The lanes of a running server, narrowest first, and how they came to be chosen.

    Args:
        why: Why this arithmetic.
        head: Where the head is from, or why there is none.
    """

    lanes: tuple[Lane, ...]
    arithmetic: str
    why: str
    head: str


def install(model: LoadedModel, wanted: Wanted) -> Installed:
    """Build and check the lanes a mode needs on a loaded model.

    Raises:
        LaneRefused: When a check fails; nothing else is run in its place.
        HeadRefused: When the mode needs a head and there is none, or the model's own is damaged.
        ModelError: When the model has no lane for the mode.
    """
    try:
        return _install(model, wanted)
    except PacelineError:
        raise
    except Exception as error:  # a family's code may raise anything on rows side by side
        line = (str(error) or "no message").splitlines()[0]
        raise LaneRefused(
            wanted.mode.value, "runs at all", f"{type(error).__name__}: {line}"
        ) from error


def _install(model: LoadedModel, wanted: Wanted) -> Installed:
    needed = [g for g in NEEDS[wanted.mode] if g <= geometry_for(wanted.widest)]
    found, origin = _find(model, wanted)
    parts = found[1] if found else None
    one_row = needed[-1] == 1 and wanted.mode is not Mode.HYPER
    own = own_logits(model.net, model.card.vocab_size)  # before any layer of it is replaced
    trunk, why, same = choose_trunk(model, parts, one_row, wanted.exact_widths, wanted.chunk, own)
    head = _attach(trunk, *found) if found else None
    if wanted.numerics == BALANCED:
        why += "; " + balance(trunk, model.net.layers[0])
    checker = LaneChecker(trunk, rounding(model.card), needed[-1], head)
    golden = _golden(head, trunk, found[0], model) if head is not None and found else ()
    chooser = _chooser(wanted, model.card.vocab_size)
    bank = _bank(trunk, wanted.prefix_bytes)
    lanes: list[Lane] = []
    for geometry in needed:
        if geometry > 1 and wanted.numerics == B1_EXACT:
            lanes.append(InTurn(lanes[0], geometry))
            continue
        receipt = checker.check(lane_name("ar" if head is None else "mtp", geometry), geometry)
        receipt = msgspec.structs.replace(receipt, checks=(*receipt.checks, *same, *golden))
        lanes.append(_lane(trunk, geometry, model, receipt, chooser, head, bank, wanted))
    if wanted.mode is Mode.HYPER:
        assert head is not None, "a mode that must draft is refused without a head"
        receipt = checker.check_branching(HYPER_LANE, lanes[0].receipt)
        lanes.append(HyperLane(trunk, model.card.dtype, receipt, head))
    return Installed(tuple(lanes), trunk.arithmetic, why, origin)


def _lane(
    trunk: Trunk,
    geometry: int,
    model: LoadedModel,
    receipt: Receipt,
    chooser: Chooser,
    head: Head | None,
    bank: PrefixBank | None,
    wanted: Wanted,
) -> Lane:
    dtype = model.card.dtype
    if head is None:
        return ArLane(trunk, geometry, dtype, receipt, chooser, None, bank)
    lane = MtpLane(trunk, geometry, dtype, receipt, chooser, head, bank)
    lane.spec = msgspec.structs.replace(
        lane.spec, numerics=wanted.numerics, acceptance=wanted.acceptance
    )
    return lane


def _bank(trunk: Trunk, limit: int) -> PrefixBank | None:
    """Return a bank where rows are nothing but keys and values; other state has no tiles."""
    if limit == 0 or not isinstance(trunk, LockstepTrunk | StockTrunk):
        return None
    return PrefixBank(limit, trunk.prefill_tile, trunk.layers)


def _chooser(wanted: Wanted, vocab_size: int) -> Chooser:
    """Choose where this machine is quicker; the device knows coupled acceptance only."""
    if wanted.acceptance == Coupled.name and device_is_faster(vocab_size):
        return DeviceChooser()
    return HostChooser(ACCEPTANCE[wanted.acceptance])


def _find(model: LoadedModel, wanted: Wanted) -> tuple[tuple[HeadSource, HeadParts] | None, str]:
    """Build the model's head where the mode drafts; before the trunk takes the layers over."""
    if not wanted.mtp or wanted.mode in NEVER_DRAFT:
        return None, "none wanted"
    try:
        source = find_head(model)
        _check_rewinds(model)
        parts = halves(model.net)
        if parts is None:
            raise NoHead(f"no head is known for {type(model.net).__module__}")
        return (source, build_head(source, parts.net, _head_type(model))), source.origin
    except NoHead as error:
        if wanted.mode in MUST_DRAFT:
            raise HeadRefused(
                f"scheduler_mode {wanted.mode.value!r} needs an MTP head: {error}; "
                "use ar_batch, or a model with a head"
            ) from None
        if wanted.depth:
            raise HeadRefused(
                f"speculative_depth {wanted.depth} needs an MTP head: {error}"
            ) from None
        return None, f"none: {error}"
    except HeadRefused as error:
        raise HeadRefused(f"{error}; with mtp off the model is served without its head") from None


def _check_rewinds(model: LoadedModel) -> None:
    kinds = without_checkpoint(model.net)
    if kinds:
        raise NoHead(f"state in {', '.join(kinds)} cannot be taken back behind a wrong draft")


def _head_type(model: LoadedModel) -> mx.Dtype:
    """Return the float type the model computes in."""
    arrays: dict[str, mx.array] = dict(tree_flatten(model.net.parameters()))
    return next(a.dtype for a in arrays.values() if mx.issubdtype(a.dtype, mx.floating))


def _attach(trunk: Trunk, source: HeadSource, parts: HeadParts) -> Head:
    if isinstance(trunk, LockstepTrunk):
        return LockstepHead(trunk, parts, source.draft_ids)
    return StockHead(trunk, parts, source.draft_ids)


def _golden(head: Head, trunk: Trunk, source: HeadSource, model: LoadedModel) -> tuple[Check, ...]:
    if source.golden is None:
        return ()
    return (check_golden(head, trunk, source.golden, rounding(model.card)),)
