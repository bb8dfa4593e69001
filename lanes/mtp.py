"""Draft, verify, commit at one geometry: a head drafts, one pass of the model verifies all rows.

A step at depth K: the head reads what was committed since it last drafted and drafts K tokens a
row; the model computes K + 1 positions of every row in one pass; each row accepts its own drafts
up to the first that the model would not have chosen, commits one token more, and forgets the keys
and values behind that. Rows may accept different numbers, end inside a step, and join or leave
between steps.
"""

from collections.abc import Sequence
from typing import Final

import mlx.core as mx
import msgspec

from .ar import ArLane, Seated
from .base import Hidden, Receipt, RowDelta, Trunk
from .choosing import Chooser, Column, Span
from .head import LONG, Head
from .prefix import PrefixBank
from .ragged import Pass, RowSlots
from .reading import gathered, hear
from .verify import Draft

MAX_DEPTH: Final = 4


class MtpLane(ArLane):
    """Speculative decoding of up to `geometry` rows with a native MTP head."""

    kind = "mtp"

    def __init__(
        self,
        trunk: Trunk,
        geometry: int,
        dtype: str,
        receipt: Receipt,
        chooser: Chooser,
        head: Head,
        bank: PrefixBank | None = None,
    ) -> None:
        super().__init__(trunk, geometry, dtype, receipt, chooser, head, bank)
        self.spec = msgspec.structs.replace(self.spec, max_depth=MAX_DEPTH)
        self._drafting = head

    def _step(self, seated: Seated, depths: Sequence[int]) -> list[RowDelta]:
        drafter = Drafter(self._drafting, self.chooser, seated, depths)
        drafter.run()
        columns = [column.tokens for column in drafter.columns]
        deltas = self._verify_drafts(seated, drafter.woven(), drafter.drafts, columns)
        drafter.look_back()
        for at, drafts in enumerate(drafter.drafts):
            if drafts and at not in drafter.failed:
                seated.rows[at].draft_worked()
        return [
            msgspec.structs.replace(delta, draft_failed=True) if at in drafter.failed else delta
            for at, delta in enumerate(deltas)
        ]

    def _keep(self, slots: RowSlots, place: int, passed: Pass, span: Span, kept: int) -> None:
        super()._keep(slots, place, passed, span, kept)
        if span.row.drafts:
            assert passed.hidden is not None
            span.row.unheard.append(Hidden(passed.hidden, span.first, kept))


class Drafter:
    """Drafts for the rows of one step; a row whose draft fails gets no more of them.

    Args:
        depths: How many tokens to draft for each row; near its budget a row drafts no more than
            it may still commit.
    """

    def __init__(self, head: Head, chooser: Chooser, seated: Seated, depths: Sequence[int]) -> None:
        self._head = head
        self._chooser = chooser
        self._seated = seated
        self._slots = seated.slots
        self._depths = [
            max(0, min(depth, row.left - 1)) if row.drafts and row.unheard else 0
            for row, depth in zip(seated.rows, depths, strict=True)
        ]
        self._finite: list[tuple[Sequence[int], mx.array]] = []  # of drafts the host has not seen
        self.columns: list[Column] = []
        self.drafts: list[list[Draft | None]] = [[] for _ in seated.rows]
        self.failed: set[int] = set()  # rows

    def run(self) -> None:
        """Draft depth by depth; `columns` and `drafts` hold what came of it."""
        for at in catch_up(self._head, self._seated):
            self._fail(at)
        live = self._wanting(0)
        if not live:
            return
        hidden = listen(self._head, self._seated, live)
        lengths = list(self._slots.drafted)
        while live:
            drafted = self._draft(hidden, live)
            deeper = self._wanting(len(self.columns))
            if deeper:
                hidden = self._deepen(hidden, lengths, live, drafted, deeper)
            live = deeper

    def look_back(self) -> None:
        """Note whose drafts the device chose from what was no number; the step is over."""
        for rows, finite in self._finite:
            for at, sound in zip(rows, finite.tolist(), strict=True):  # type: ignore[arg-type]
                if not sound:
                    self._fail(at)

    def woven(self) -> mx.array:
        """Return every row's last token and its drafts behind it, row after row."""
        last = mx.array([row.last_token for row in self._seated.rows], mx.uint32)
        if not self.columns:
            return last
        ends = [len(self._seated.rows)]
        for column in self.columns:
            ends.append(ends[-1] + column.tokens.shape[0])
        order = []
        for i, wanted in enumerate(self._depths):
            order.append(i)
            order += [ends[d] + self._wanting(d).index(i) for d in range(wanted)]
        tokens = [column.tokens.astype(mx.uint32) for column in self.columns]
        return mx.concatenate([last, *tokens])[mx.array(order)]

    def _wanting(self, depth: int) -> list[int]:
        """Return the rows that want more than `depth` drafts."""
        return [i for i, wanted in enumerate(self._depths) if wanted > depth]

    def _fail(self, at: int) -> None:
        """Leave a row without further drafts in this step, and clean what the head made of it."""
        self._depths[at] = len(self.drafts[at])
        if at not in self.failed:
            self.failed.add(at)
            self._seated.rows[at].draft_failed()
            place = self._seated.places[at]
            self._slots.wipe(place, self._slots.lengths[place])

    def _draft(self, hidden: mx.array, live: Sequence[int]) -> list[int]:
        """Draft one token for each live row from the head's hidden states [live, size].

        Returns:
            The rows that have one.
        """
        column = self._chooser.draft(
            self._head.logits(hidden),
            [self._seated.rows[i] for i in live],
            [self.drafts[i] for i in live],
            self._head.ids,
        )
        if None in column.drafts:
            finite = mx.all(mx.isfinite(hidden), axis=-1)
            mx.async_eval(finite)
            self._finite.append((list(live), finite))
        sound = [d is None or not d.failed for d in column.drafts]
        drafted = [i for i, fine in zip(live, sound, strict=True) if fine]
        for i, fine in zip(live, sound, strict=True):
            if not fine:
                self._fail(i)
        if not drafted:
            return drafted
        if len(drafted) < len(live):
            kept = [at for at, fine in enumerate(sound) if fine]
            column = Column(column.tokens[mx.array(kept)], [column.drafts[at] for at in kept])
        self.columns.append(column)
        for i, draft in zip(drafted, column.drafts, strict=True):
            self.drafts[i].append(draft)
        return drafted

    def _deepen(
        self,
        hidden: mx.array,
        lengths: list[int],
        live: Sequence[int],
        drafted: Sequence[int],
        deeper: Sequence[int],
    ) -> mx.array:
        """Run the head on its own output and the last draft of each row that goes deeper.

        Args:
            lengths: Where each slot's temporary entries go; advanced.
            live: The rows of `hidden`.
            drafted: Those of the last column.
        """
        layout = self._seated.layout([int(i in deeper) for i in range(len(self._seated.rows))])
        tokens = self.columns[-1].tokens
        if len(deeper) < len(live):
            hidden = hidden[mx.array([live.index(i) for i in deeper])]
        if len(deeper) < len(drafted):
            tokens = tokens[mx.array([drafted.index(i) for i in deeper])]
        out = self._head.step(self._slots, lengths, layout, hidden, tokens)
        for i in deeper:
            lengths[self._seated.places[i]] += 1
        return out


def catch_up(head: Head, seated: Seated) -> list[int]:
    """Let a head read long runs of committed positions, as prompts are read.

    Returns:
        The rows that it could not read.
    """
    return [
        at
        for at, (row, place) in enumerate(zip(seated.rows, seated.places, strict=True))
        if row.unheard_count > LONG and not hear(head, row, seated.slots, place)
    ]


def listen(head: Head, seated: Seated, live: Sequence[int]) -> mx.array:
    """Read what live rows committed since their last draft; return each one's last hidden state."""
    slots = seated.slots
    counts = [0] * len(seated.rows)
    tokens: list[int] = []
    spans: list[Hidden] = []
    for i in live:
        row, place = seated.rows[i], seated.places[i]
        counts[i] = row.unheard_count
        tokens += row.tokens_from(slots.drafted[place] + 1, counts[i])
        spans += row.unheard
        row.unheard = []
    layout = seated.layout(counts)
    hidden = head.step(slots, slots.drafted, layout, gathered(spans), mx.array(tokens))
    for i in live:
        slots.drafted[seated.places[i]] += counts[i]
    return hidden
