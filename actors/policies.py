"""Which policy a mode is: who may hold a row, who reads, who steps, and how deep. A table.

Policies see plain rows and measured costs, never a clock, a lane or an array of their own.
"""

from collections.abc import Mapping
from typing import Final

from ..runtime.modes import CohortPolicy, Mode, Pace
from .batches import BatchPolicy, FinishPolicy, LengthPolicy
from .depth import Depths, RowDepths
from .scene import Policy
from .turns import CooperativePolicy, SerialPolicy

_Kind = type[SerialPolicy | CooperativePolicy | BatchPolicy]

POLICIES: Final[Mapping[Mode, _Kind]] = {
    Mode.SERIAL: SerialPolicy,
    Mode.COOPERATIVE: CooperativePolicy,
    Mode.AR_BATCH: BatchPolicy,
    Mode.MTP_BATCH: BatchPolicy,
    Mode.HYPER: SerialPolicy,
}

# What mtp_cohort_experimental tries; `depth` forms cohorts as mtp_batch does.
TRIALS: Final[Mapping[CohortPolicy, _Kind]] = {
    CohortPolicy.DEPTH: BatchPolicy,
    CohortPolicy.LENGTH: LengthPolicy,
    CohortPolicy.FAIR_FINISH: FinishPolicy,
}


def make_policy(
    mode: Mode, pace: Pace, share: float, tile: int, trial: CohortPolicy = CohortPolicy.DEPTH
) -> Policy:
    """Return the policy of a mode.

    Args:
        share: The part of a turn that reading may take while rows decode.
        tile: Prompt tokens of one forward pass of the installed lanes.
        trial: The cohort policy of `mtp_cohort_experimental`.
    """
    kind = TRIALS[trial] if mode is Mode.MTP_COHORT_EXPERIMENTAL else POLICIES[mode]
    return kind(pace, share, tile)


def make_depths(
    mode: Mode,
    kind: str,
    most: int,
    fixed: int | None,
    trial: CohortPolicy = CohortPolicy.DEPTH,
    branching: str | None = None,
) -> Depths:
    """Return what chooses the depth of each step; see `Depths`."""
    if mode is Mode.MTP_COHORT_EXPERIMENTAL and trial is CohortPolicy.DEPTH:
        return RowDepths(kind, most, fixed)
    return Depths(kind, most, fixed, branching)
