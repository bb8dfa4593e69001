"""Target-only decoding at one geometry: rows step together, join and leave between steps."""

from collections.abc import Sequence
from contextlib import suppress

import mlx.core as mx
import msgspec

from ..runtime.context import RowContext
from ..runtime.errors import RowError
from .base import LaneSpec, Receipt, Row, RowDelta, Trunk, reason
from .choosing import ON_HOST, Chooser, Span
from .geometry import lane_name
from .head import Head
from .prefix import PrefixBank
from .ragged import Layout, Pass, RowSlots
from .reading import PromptReader
from .seats import OwnSeat, Seats
from .verify import Draft


class Seated(msgspec.Struct):
    """The rows of one step where they sit, in the order of their slots."""

    slots: RowSlots
    rows: list[Row]
    places: list[int]

    def layout(self, counts: Sequence[int]) -> Layout:
        """Return the layout of a pass with so many positions of each row."""
        every = [0] * self.slots.count
        for place, count in zip(self.places, counts, strict=True):
            every[place] = count
        return Layout(every)


class ArLane:
    """Autoregressive decoding of up to `geometry` rows in one forward pass.

    At geometry 1 a row steps on its own buffers; a wider lane has shared ones (see seats.py).
    """

    kind = "ar"

    def __init__(
        self,
        trunk: Trunk,
        geometry: int,
        dtype: str,
        receipt: Receipt,
        chooser: Chooser,
        head: Head | None = None,
        bank: PrefixBank | None = None,
    ) -> None:
        self.spec = LaneSpec(
            name=lane_name(self.kind, geometry),
            kind=self.kind,
            geometry=geometry,
            dtype=dtype,
            arithmetic=trunk.arithmetic,
            tile=trunk.tile_for(geometry),
            prefill_tile=trunk.prefill_tile,
            choosing=chooser.name,
        )
        self.receipt = receipt
        self.trunk = trunk
        self.chooser = chooser
        self._reader = PromptReader(trunk, head, bank)
        self._seats = Seats(trunk.new_slots(geometry)) if geometry > 1 else OwnSeat()

    def open(self, key: str, context: RowContext) -> Row:
        """Start a row; see `Lane.open`."""
        return Row(key, context, self.trunk.new_row())

    def prefill(self, row: Row, count: int) -> RowDelta | None:
        """Read up to `count` prompt tokens in whole tiles; see `Lane.prefill`."""
        last, scored, cached = self._reader.read(row, count)
        if last is None:
            kept = RowDelta(row.key, prompt_logprobs=scored, cached=cached)
            return kept if scored or cached else None
        # On the host wherever the rest is chosen: it is one token, and the logits are there.
        delta = ON_HOST.verify_one(last[None], Span(row, 0, []))
        return msgspec.structs.replace(delta, prompt_logprobs=scored, cached=cached)

    def step(self, rows: Sequence[Row], depths: Sequence[int]) -> list[RowDelta]:
        """Run one step; see `Lane.step`."""
        places: dict[int, tuple[Row, int]] = {}
        deltas = []
        for row, depth in zip(rows, depths, strict=True):
            try:
                places[self._seats.take(row, rows)] = row, depth
            except Exception as error:  # whatever it was, the row has no seat
                deltas.append(RowDelta(row.key, error=reason(error)))
        while places:
            order = sorted(places)
            stepping = [places[place][0] for place in order]
            slots = self._seats.buffers(stepping)
            wanted = [places[place][1] for place in order]
            try:
                # One more than a pass writes: a second one begins behind what the first kept.
                slots.reserve(max(slots.lengths) + 2 + max(wanted))
            except RowError as error:  # room for the longest is what there is none of
                row, _ = places.pop(max(order, key=lambda at: slots.lengths[at]))
                deltas.append(RowDelta(row.key, error=reason(error)))
                self.close(row)  # its length must not weigh on the others' step
                continue
            return [*deltas, *self._step(Seated(slots, stepping, order), wanted)]
        return deltas

    def _step(self, seated: Seated, depths: Sequence[int]) -> list[RowDelta]:
        """Step seated rows; nothing is drafted here, so every depth is 0."""
        tokens = mx.array([row.last_token for row in seated.rows])
        return self._verify_drafts(seated, tokens, [[] for _ in seated.rows], ())

    def _verify_drafts(
        self,
        seated: Seated,
        tokens: mx.array,
        drafts: Sequence[list[Draft | None]],
        columns: Sequence[mx.array],
    ) -> list[RowDelta]:
        """Run each row's last token and its drafts, and commit what comes of them.

        Args:
            tokens: Packed row after row.
            columns: The drafts' arrays, to compute along with the pass.
        """
        deltas, broken = self._run(seated, range(len(seated.rows)), tokens, drafts, columns)
        # Masks do not hide what is no number: a wrong draft's, or one that was left in the slot.
        # A row that stops at one steps once more, from a clean slot and without drafts.
        again = [at for at in broken if seated.slots.retract(seated.places[at])]
        if again:
            with suppress(Exception):  # the first pass's errors stand; the others have committed
                last = mx.array([seated.rows[at].last_token for at in again])
                found, _ = self._run(seated, again, last, [[] for _ in again], ())
                for at, delta in zip(again, found, strict=True):
                    deltas[at] = delta
        for row, delta in zip(seated.rows, deltas, strict=True):
            row.failed = delta.error is not None
        return deltas

    def _run(
        self,
        seated: Seated,
        which: Sequence[int],
        tokens: mx.array,
        drafts: Sequence[list[Draft | None]],
        columns: Sequence[mx.array],
    ) -> tuple[list[RowDelta], list[int]]:
        """Run one pass over some of the seated rows.

        Returns:
            One delta for each of them, and those that failed on logits that are no numbers.
        """
        counts = [0] * len(seated.rows)
        for at, drafted in zip(which, drafts, strict=True):
            counts[at] = 1 + len(drafted)
        layout = seated.layout(counts)
        passed = self.trunk.step(seated.slots, layout, tokens)
        spans = [
            Span(seated.rows[at], layout.first[seated.places[at]], drafted)
            for at, drafted in zip(which, drafts, strict=True)
        ]
        deltas = self.chooser.verify(passed, spans, columns)
        broken = []
        for at, span, delta in zip(which, spans, deltas, strict=True):
            if delta.error is None:
                self._keep(seated.slots, seated.places[at], passed, span, len(delta.tokens))
            elif not passed.finite(span.first):
                broken.append(at)
        return deltas, broken

    def _keep(self, slots: RowSlots, place: int, passed: Pass, span: Span, kept: int) -> None:
        """Keep the first `kept` of a row's positions."""
        slots.advance(place, kept)

    def close(self, row: Row) -> None:
        """Free the row's slot wherever it is; see `Lane.close`."""
        if row.seats is not None:
            row.seats.leave(row)
