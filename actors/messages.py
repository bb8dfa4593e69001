"""Every message between actors, frozen and tagged; nothing else crosses between them."""

from typing import Literal

import msgspec

from ..lanes.base import Branches
from ..runtime.context import RowContext, TokenLogprob
from ..runtime.modes import Priority

Finish = Literal["stop", "length"]


class Lease(msgspec.Struct, frozen=True):
    """The right to one row: what carries a stale epoch is dropped."""

    row: str
    epoch: int


class Admit(msgspec.Struct, frozen=True, tag=True):
    """To the owner: queue a row.

    Args:
        credits: Tokens the request is ready to take before it grants more.
        at: When the request was received, in the owner's clock.
        priority: What its turns weigh, where the mode knows priorities.
    """

    lease: Lease
    request_id: str
    context: RowContext
    credits: int
    at: float
    priority: Priority = Priority.NORMAL


class Leave(msgspec.Struct, frozen=True, tag=True):
    """To the owner: drop a row wherever it is; an unknown or ended one is nothing."""

    lease: Lease
    reason: str


class Grant(msgspec.Struct, frozen=True, tag=True):
    """To the owner: the request can take this many more tokens of a row."""

    lease: Lease
    tokens: int


OwnerMessage = Admit | Leave | Grant


class Admitted(msgspec.Struct, frozen=True, tag=True):
    """To a request: a row has its place; reading its prompt begins."""

    lease: Lease
    queue_wait_s: float


class Tokens(msgspec.Struct, frozen=True, tag=True):
    """To a request: what a row gained in one turn.

    Args:
        width: Real rows that stepped together, 0 for a token that came of reading the prompt.
        finish: Set on the last message of a row that ended by itself.
        drafted: Tokens drafted for the row in that turn.
        accepted: How many of them the model chose as well.
        cached: Prompt tokens that came from the prefix bank in that turn.
    """

    lease: Lease
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    prompt_logprobs: tuple[TokenLogprob, ...]
    lane: str
    width: int
    cohort_id: str | None
    finish: Finish | None
    drafted: int = 0
    accepted: int = 0
    cached: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """To a request: a row cannot go on."""

    lease: Lease
    code: str
    message: str


RowMessage = Admitted | Tokens | Failed


class CohortSealed(msgspec.Struct, frozen=True, tag=True):
    """A set of rows began to step together."""

    cohort_id: str
    lane: str
    geometry: int
    rows: tuple[str, ...]
    requests: tuple[str, ...]


class CohortDissolved(msgspec.Struct, frozen=True, tag=True):
    """A cohort's rows or lane changed; its sums are final.

    Args:
        depths: How many steps drafted so many tokens a row.
    """

    cohort_id: str
    lane: str
    geometry: int
    rows: tuple[str, ...]
    steps: int
    tokens: int
    drafted: int
    accepted: int
    depths: dict[int, int]
    duration_s: float
    reason: str


Note = CohortSealed | CohortDissolved


class Drafts(msgspec.Struct, frozen=True):
    """What one row drafted in a step and what came of it.

    Args:
        committed: Tokens the row gained.
        branches: More of a step that drafted a tree.
        failed: Whether drafting failed, so that the row stepped with fewer drafts.
    """

    drafted: int
    accepted: int
    committed: int
    branches: Branches | None = None
    failed: bool = False


class Turn(msgspec.Struct, frozen=True):
    """All that one turn of the owner brought forth; it crosses to trio in one hop.

    Args:
        width: Real rows of the step, 0 when there was none.
        depth: The most tokens the step drafted for a row.
        drafts: Of each row of the step what it drafted.
        prompt_tokens: Prompt tokens that were computed.
        cached_tokens: Prompt tokens that came from the prefix bank.
        active_rows: Rows that have a place and can go on.
        parked: Rows that wait for their readers.
        queue_depth: Rows that wait for a place, such as were parked among them.
        state: What there is to do: nothing (idle), prefilling or decoding.
    """

    messages: tuple[RowMessage, ...]
    notes: tuple[Note, ...]
    width: int
    lane: str | None
    step_s: float
    depth: int
    drafts: tuple[Drafts, ...]
    committed: int
    prompt_tokens: int
    cached_tokens: int
    read_s: float
    active_rows: int
    parked: frozenset[Lease]
    queue_depth: int
    state: str
