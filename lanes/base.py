"""What a lane is: one installed, checked way to run rows at one geometry."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import msgspec

from ..runtime.context import RowContext, TokenLogprob
from ..runtime.exits import Ids
from .penalties import Adjuster

DRAFT_FAILURES: Final = 3  # of one row, after which nothing is drafted for it any more

if TYPE_CHECKING:  # the scheduler core reads this file and must not load MLX by it
    import mlx.core as mx

    from .fork import Fork
    from .halves import Halves
    from .ragged import Layout, Pass, RowSlots
    from .tree import Reach


class Check(msgspec.Struct, frozen=True):
    """One self-check and what it saw."""

    name: str
    passed: bool
    found: str


class Receipt(msgspec.Struct, frozen=True):
    """The record that a lane was checked when it was installed.

    Args:
        max_logit_difference: Largest difference of a logit from B1 on the same rows; 0 is bitwise.
        seconds: What the checks took.
    """

    checks: tuple[Check, ...]
    max_logit_difference: float
    seconds: float


class LaneSpec(msgspec.Struct, frozen=True):
    """What a lane is.

    Args:
        geometry: Rows of its forward pass: 1, 3 or 8.
        arithmetic: "constant-shape" when a row's bits cannot depend on its neighbours or on the
            width; "stock" for mlx-lm's own layers, whose difference from B1 is measured.
        tile: Rows every matrix product is padded to (1: none).
        prefill_tile: Prompt tokens of one forward pass; boundaries lie at its multiples.
        max_depth: The most tokens a step can draft; 0 for a lane without a head.
        acceptance: How drafts are accepted, "coupled" or "rejection"; empty without a head.
        numerics: Which rows share a forward pass: see docs/speculation.md.
        choosing: Where tokens are chosen, "host" or "device".
    """

    name: str
    kind: str
    geometry: int
    dtype: str
    arithmetic: str
    tile: int
    prefill_tile: int
    max_depth: int = 0
    acceptance: str = ""
    numerics: str = "throughput"
    choosing: str = "host"


class Branches(msgspec.Struct, frozen=True):
    """What a step that drafted a tree carried, and what came of it.

    Args:
        carried: Branches of the tree, each a way from its root to a leaf.
        nodes: Tokens drafted, on all branches together.
        taken: The branch that came true furthest, counted from the likeliest, which is 0.
        main: Tokens on the likeliest branch.
        main_accepted: How many of them, from the first, the model itself chose.
    """

    carried: int
    nodes: int
    taken: int
    main: int
    main_accepted: int


class RowDelta(msgspec.Struct, frozen=True):
    """What one row gained in one call.

    Args:
        tokens: Newly chosen tokens, in order.
        logprobs: One entry a token when asked for, else empty.
        prompt_logprobs: Entries of prompt tokens just read, when asked for.
        drafted: Tokens drafted for the row in this step; in a tree, those of its longest branch.
        accepted: How many of them, from the first, the model itself chose.
        branches: More of a step that drafted a tree.
        cached: Prompt tokens that were taken from the prefix bank and not computed.
        draft_failed: Whether drafting failed for the row, which then stepped with fewer drafts.
        error: Why the row cannot go on; its neighbours are not concerned.
        code: What kind of error that is.
    """

    key: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    drafted: int = 0
    accepted: int = 0
    branches: Branches | None = None
    cached: int = 0
    draft_failed: bool = False
    error: str | None = None
    code: str = "row_failed"


def reason(error: Exception) -> str:
    """Return why a row cannot go on; never empty, which an error without words would be."""
    return str(error) or type(error).__name__


class SeatHolder(Protocol):
    """A wider lane's shared buffers, as a seated row sees them."""

    def leave(self, row: Row, *, keep: bool = False) -> None:
        """Give the seat back; with `keep`, carry keys and values to the row's own buffers."""
        ...


class Hidden(NamedTuple):
    """Hidden states of consecutive positions: a run of a pass's packed rows."""

    states: mx.array
    start: int
    length: int


class Row:
    """The device side of one sequence; only the device thread touches it."""

    def __init__(self, key: str, context: RowContext, slots: RowSlots) -> None:
        self.key = key
        self.context = context
        self.slots = slots  # its keys and values while it has no seat in a wider lane
        self.seats: SeatHolder | None = None  # where it is seated, if it is
        self.read = 0  # prompt tokens whose keys and values are written
        self.generated: list[int] = []
        self.counts: dict[int, int] = {}  # how often each token was generated
        self.unheard: list[Hidden] = []  # positions a head has still to read, oldest first
        self.adjuster = Adjuster(context.sampling, context.prompt)
        self.form = context.grammar.follow() if context.grammar is not None else None
        self.failed = False  # its keys and values may be no numbers
        self.draft_failures = 0  # since a draft that worked
        self.head_failed = False  # what a head wrote for it may be no numbers

    def copy(self) -> Row:
        """Return an unseated twin that goes on by itself."""
        twin = Row(self.key, self.context, self.slots.copy())
        twin.read, twin.unheard = self.read, list(self.unheard)
        twin.generated, twin.counts = list(self.generated), dict(self.counts)
        twin.adjuster = self.adjuster
        twin.form = self.form.copy() if self.form is not None else None
        twin.failed, twin.draft_failures = self.failed, self.draft_failures
        twin.head_failed = self.head_failed
        return twin

    @property
    def drafts(self) -> bool:
        """Whether a head still drafts for it."""
        return self.draft_failures < DRAFT_FAILURES

    def draft_failed(self, times: int = 1) -> None:
        """Note that drafting failed; the row goes on without drafts, after a few times for good."""
        self.draft_failures += times
        self.head_failed = True
        if not self.drafts:
            self.unheard = []  # nobody will read them

    def draft_worked(self) -> None:
        """Note that drafting worked: failures before it count no more."""
        if self.drafts:
            self.draft_failures = 0

    @property
    def position(self) -> int:
        """Position of the token to be chosen next, counted from the prompt's first."""
        return len(self.context.prompt) + len(self.generated)

    @property
    def last_token(self) -> int:
        """The token whose keys and values are not written yet."""
        return self.generated[-1] if self.generated else self.context.prompt[-1]

    @property
    def unheard_count(self) -> int:
        """Positions a head has still to read."""
        return sum(hidden.length for hidden in self.unheard)

    def tokens_from(self, start: int, count: int) -> list[int]:
        """Return the tokens at `count` positions, prompt and answer in one."""
        prompt, known = self.context.prompt, len(self.context.prompt)
        head = prompt[start : start + count] if start < known else ()
        tail = self.generated[max(0, start - known) : max(0, start + count - known)]
        return [*head, *tail]

    @property
    def left(self) -> int:
        """Tokens the row may still generate."""
        return self.context.budget - len(self.generated)

    def allowed(self, ahead: Sequence[int] = ()) -> Ids | None:
        """Return the tokens its grammar allows next, ascending; None for all of them.

        Args:
            ahead: Drafts to suppose committed first.

        Raises:
            RowError: When the grammar has become too costly to follow.
        """
        if self.form is None:
            return None
        return self.form.allowed(ahead)

    def fits(self, token: int) -> bool:
        """Say whether the row may choose a token that is allowed; see `Follower.fits`."""
        return self.form is None or self.form.fits(token, self.left)

    @property
    def near_end(self) -> bool:
        """Whether the row's form may refuse what it chooses next."""
        return self.form is not None and self.form.near_end(self.left)

    def commit(self, token: int) -> None:
        """Append a chosen token.

        Raises:
            RowError: When its grammar has become too costly to follow.
        """
        if self.form is not None:
            self.form.take(token, self.left)
        self.generated.append(token)
        self.counts[token] = self.counts.get(token, 0) + 1


class Trunk(Protocol):
    """A model behind the two forward passes that lanes need."""

    arithmetic: str
    prefill_tile: int
    vocab_size: int

    @property
    def halves(self) -> Halves | None:
        """The model's two halves, where they can be told apart."""
        ...

    def add_head_layer(self) -> int:
        """Let rows hold one more layer, for a head; return its index."""
        ...

    def tile_for(self, rows: int) -> int:
        """Return the rows that products of a step of `rows` rows are padded to; 1 is none."""
        ...

    def new_row(self) -> RowSlots:
        """Return empty keys and values for one row."""
        ...

    def new_slots(self, count: int) -> RowSlots:
        """Return empty keys and values for `count` rows side by side."""
        ...

    def prefill(self, slots: RowSlots, tokens: Sequence[int], *, want: str) -> Pass:
        """Read tokens into slot 0 at its length, which is advanced; one tile at most.

        Args:
            want: "none", "last" or "all" positions' logits.
        """
        ...

    def step(self, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        """Write each slot's new tokens behind its length and give every position's logits.

        Lengths are not advanced: the caller keeps what it accepts (`RowSlots.advance`).

        Args:
            tokens: Token ids packed as the layout says, [positions].
        """
        ...

    def branch(self, fork: Fork, reach: Reach, tokens: mx.array) -> Pass:
        """Run the nodes of a tree of drafts behind one row and give every node's logits.

        Nothing is written to the row: the caller keeps a branch (`Fork.keep`).

        Args:
            tokens: The nodes' token ids, [nodes].
        """
        ...


class Lane(Protocol):
    """One way to run rows; rows may move between lanes between two calls."""

    spec: LaneSpec
    receipt: Receipt

    def open(self, key: str, context: RowContext) -> Row:
        """Start a row."""
        ...

    def prefill(self, row: Row, count: int) -> RowDelta | None:
        """Read up to `count` more prompt tokens, and what comes from a prefix bank besides.

        The last of them yields the first token.
        """
        ...

    def step(self, rows: Sequence[Row], depths: Sequence[int]) -> list[RowDelta]:
        """Run one lockstep step over rows whose prompts are read; one delta a row.

        Args:
            depths: Tokens to draft for each row, at most the lane's own `max_depth`.
        """
        ...

    def close(self, row: Row) -> None:
        """Let go of whatever the row holds here; closing twice does nothing."""
        ...
