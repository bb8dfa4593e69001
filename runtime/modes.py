"""The six scheduler modes, the four presets, and the settings each of them allows."""

from enum import StrEnum
from typing import Final

import msgspec


class Mode(StrEnum):
    """How rows share the model; chosen at start and never switched while running."""

    SERIAL = "serial"
    COOPERATIVE = "cooperative"
    AR_BATCH = "ar_batch"
    MTP_BATCH = "mtp_batch"
    MTP_COHORT_EXPERIMENTAL = "mtp_cohort_experimental"
    HYPER = "hyper"


class Preset(StrEnum):
    """A named set of the four scheduling numbers; an explicit setting beats it."""

    SOLO = "solo"
    LATENCY = "latency"
    AGENT = "agent"
    THROUGHPUT = "throughput"


class Priority(StrEnum):
    """How much a request's turns weigh in `cooperative`, least first."""

    BACKGROUND = "background"
    NORMAL = "normal"
    INTERACTIVE = "interactive"


class CohortPolicy(StrEnum):
    """How `mtp_cohort_experimental` forms its cohorts."""

    DEPTH = "depth"
    LENGTH = "length"
    FAIR_FINISH = "fair-finish"


class Pace(msgspec.Struct, frozen=True):
    """The four numbers a preset stands for.

    Args:
        max_active_requests: Rows that may be open in turns (mode cooperative).
        decode_batch_max: Rows that may step together (the batch modes).
        batch_wait_ms: How long a first row waits for company, in milliseconds.
        prefill_chunk_tokens: The most prompt tokens read in one turn.
    """

    max_active_requests: int
    decode_batch_max: int
    batch_wait_ms: float
    prefill_chunk_tokens: int


PRESETS: Final[dict[Preset, Pace]] = {
    Preset.SOLO: Pace(1, 1, 0, 1024),
    Preset.LATENCY: Pace(8, 8, 0, 1024),
    Preset.AGENT: Pace(4, 4, 50, 2048),
    Preset.THROUGHPUT: Pace(8, 8, 20, 2048),
}
DEFAULT_PRESET: Final = Preset.LATENCY

EXPERIMENTAL: Final = frozenset({Mode.MTP_COHORT_EXPERIMENTAL})

# Modes in which one request's turns may weigh more than another's.
PRIORITY_MODES: Final = frozenset({Mode.COOPERATIVE})

# Modes that run one request at a time, first come, first served.
ONE_AT_A_TIME: Final = frozenset({Mode.SERIAL, Mode.HYPER})

# Modes that are nothing without drafts, and those that never draft.
MUST_DRAFT: Final = frozenset({Mode.MTP_BATCH, Mode.MTP_COHORT_EXPERIMENTAL, Mode.HYPER})
NEVER_DRAFT: Final = frozenset({Mode.AR_BATCH})

NUMERICS_MODES: Final = frozenset({Mode.MTP_BATCH, Mode.MTP_COHORT_EXPERIMENTAL})

# hyper spends the whole width on one request, so what shares or gathers is a contradiction.
HYPER_REFUSES: Final = ("max_active_requests", "decode_batch_max", "batch_wait_ms")
HYPER_REFUSES_PRESETS: Final = frozenset({Preset.AGENT, Preset.THROUGHPUT})
