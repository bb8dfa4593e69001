"""What a checkpoint is, which lanes it gets, and what they were seen to do."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from ..runtime.context import RowContext, Sampling
from ..runtime.errors import ModelError
from ..runtime.meter import Meter
from ..runtime.model import LoadedModel, ModelCard, load
from ..runtime.modes import Mode
from ..runtime.text import Text
from .base import Lane, Receipt, Row
from .geometry import BRANCHING, GEOMETRIES, lane_name
from .install import Installed, Wanted, install
from .numerics import B1_EXACT, BALANCED

_ASKS: Final = (
    "Explain how bread rises.",
    "Write a Python function that reverses a list.",
    "List five facts about the moon.",
    "Tell me a story about a fox.",
    "What is the capital of France?",
    "Write a SQL query over a table of trains.",
    "Give me three ideas for a rainy day.",
    "Why is the sky blue?",
)
_DEEPEST: Final = 4
_NUMERICS_DEPTH: Final = 2


class Effort(msgspec.Struct, frozen=True):
    """How much is measured: tokens of each of the eight requests, and at which temperatures."""

    tokens: int
    temperatures: tuple[float, ...]


QUICK: Final = Effort(8, (0.0, 1.0))
THOROUGH: Final = Effort(32, (0.0, 0.7, 1.0))


class LaneReport(msgspec.Struct, frozen=True):
    """Whether a lane installs, and why not when it does not."""

    name: str
    installs: bool
    why_not: str = ""
    receipt: Receipt | None = None


class AcceptanceReport(msgspec.Struct, frozen=True):
    """Drafts accepted at one temperature, by depth; of those whose forerunners were."""

    temperature: float
    by_depth: dict[int, float]
    tokens_per_step: float


class NumericsReport(msgspec.Struct, frozen=True):
    """How far the widest lane of one setting is from B1.

    Args:
        identical: Requests with the same tokens as alone on B1 without drafts.
    """

    numerics: str
    lane: str
    max_logit_difference: float
    identical: int
    requests: int


class Inspection(msgspec.Struct, frozen=True):
    """All of it.

    Args:
        row_bytes_per_token: Keys and values of one position, those of the head included.
    """

    card: ModelCard
    arithmetic: str
    arithmetic_why: str
    head: str
    lanes: list[LaneReport]
    row_bytes_per_token: float
    acceptance: list[AcceptanceReport]
    numerics: list[NumericsReport]
    effort: Effort


class Checkpoint(msgspec.Struct, frozen=True):
    """How to load what is inspected; every set of lanes needs a model of its own."""

    path: Path
    dtype: str
    device: str

    def load(self) -> LoadedModel:
        """Load it once more."""
        return load(self.path, self.dtype, self.device, 0, "")


def inspect(checkpoint: Checkpoint, effort: Effort, say: Callable[[str], None]) -> Inspection:
    """Load a checkpoint, try every lane on it, and measure those that install.

    Args:
        say: Is told each stage in a few words as it begins.

    Raises:
        ModelError: When the model cannot be loaded, or not even a lone row can run.
    """
    say("loading the model")
    model = checkpoint.load()
    say("trying lanes without drafts (ar)")
    plain, plain_reports = _try(model, Mode.AR_BATCH, "ar")
    say("trying lanes that draft (mtp)")
    drafting, drafting_reports = _try(checkpoint.load(), Mode.MTP_BATCH, "mtp")
    say("trying branches (hyper)")
    _, branching_reports = _try(checkpoint.load(), Mode.HYPER, BRANCHING)
    installed = drafting or plain
    if installed is None:
        say("trying a lone row (serial)")
        installed = install(checkpoint.load(), Wanted(Mode.SERIAL))
        plain_reports = _reports(installed, plain_reports)
    text = Text(model.card.path, model.card.end_ids)
    rows = _contexts(text, effort.tokens, 0.0)
    return Inspection(
        card=model.card,
        arithmetic=installed.arithmetic,
        arithmetic_why=installed.why,
        head=drafting.head if drafting else drafting_reports[0].why_not,
        lanes=[*plain_reports, *drafting_reports, branching_reports[-1]],
        row_bytes_per_token=_row_bytes(installed.lanes[0], rows[0]),
        acceptance=_acceptance(drafting, text, effort, say) if drafting else [],
        numerics=_numerics(checkpoint, drafting, rows, say) if drafting else [],
        effort=effort,
    )


def _try(model: LoadedModel, mode: Mode, kind: str) -> tuple[Installed | None, list[LaneReport]]:
    try:
        installed = install(model, Wanted(mode))
    except ModelError as error:
        names = [lane_name(kind, geometry) for geometry in GEOMETRIES]
        return None, [LaneReport(name, False, str(error)) for name in names]
    return installed, _reports(installed, [])


def _reports(installed: Installed, others: Sequence[LaneReport]) -> list[LaneReport]:
    mine = [LaneReport(lane.spec.name, True, "", lane.receipt) for lane in installed.lanes]
    names = {report.name for report in mine}
    return [*mine, *(report for report in others if report.name not in names)]


def _contexts(text: Text, tokens: int, temperature: float) -> list[RowContext]:
    sampling = Sampling(temperature=temperature)
    prompts = [text.encode(ask) for ask in _ASKS]
    if text.has_chat_template:
        prompts = [text.encode_chat([{"role": "user", "content": ask}]) for ask in _ASKS]
    return [
        RowContext(tuple(prompt), sampling, seed, tokens, frozenset())
        for seed, prompt in enumerate(prompts)
    ]


def _row_bytes(lane: Lane, context: RowContext) -> float:
    row = lane.open("row", context)
    lane.prefill(row, len(context.prompt))
    size = row.slots.nbytes / max(row.slots.capacity, 1)
    lane.close(row)
    return size


def _acceptance(
    drafting: Installed, text: Text, effort: Effort, say: Callable[[str], None]
) -> list[AcceptanceReport]:
    found = []
    for temperature in effort.temperatures:
        say(f"measuring how many drafts are accepted at temperature {temperature:g}")
        meter = Meter()
        _run(drafting.lanes[-1], _contexts(text, effort.tokens, temperature), _DEEPEST, meter)
        kept = 1 + (meter.mean_accepted or 0.0)
        found.append(AcceptanceReport(temperature, meter.acceptance_by_depth, kept))
    return found


def _numerics(
    checkpoint: Checkpoint,
    drafting: Installed,
    rows: list[RowContext],
    say: Callable[[str], None],
) -> list[NumericsReport]:
    say("measuring numerics: each request alone")
    alone = [_run(drafting.lanes[0], [row], 0, Meter())[0] for row in rows]
    say("measuring numerics: throughput")
    found = [_compare(drafting, "throughput", rows, alone)]
    for numerics in (BALANCED, B1_EXACT):
        say(f"measuring numerics: {numerics}")
        installed = install(checkpoint.load(), Wanted(Mode.MTP_BATCH, numerics=numerics))
        found.append(_compare(installed, numerics, rows, alone))
    return found


def _compare(
    installed: Installed, numerics: str, rows: list[RowContext], alone: list[list[int]]
) -> NumericsReport:
    lane = installed.lanes[-1]
    together = _run(lane, rows, _NUMERICS_DEPTH, Meter())
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    difference = 0.0 if numerics == B1_EXACT else lane.receipt.max_logit_difference
    return NumericsReport(numerics, lane.spec.name, difference, same, len(rows))


def _run(lane: Lane, contexts: Sequence[RowContext], depth: int, meter: Meter) -> list[list[int]]:
    """Run rows side by side to their ends; return their tokens."""
    rows: list[Row] = [lane.open(str(i), context) for i, context in enumerate(contexts)]
    for row in rows:
        lane.prefill(row, len(row.context.prompt))
    live = rows
    while live:
        deltas = lane.step(live, [depth] * len(live))
        meter.saw_drafts(depth, [(delta.drafted, delta.accepted) for delta in deltas])
        live = [row for row in rows if row.left > 0]
    for row in rows:
        lane.close(row)
    return [row.generated[: row.context.budget] for row in rows]
