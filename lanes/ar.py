"""Target-only decoding at one geometry: rows step together, join and leave between steps."""

from collections.abc import Mapping, Sequence

from ..runtime.context import RowContext, TokenLogprob
from ..runtime.errors import RowError
from . import sampler
from .base import LaneSpec, Receipt, Row, RowDelta, Trunk
from .geometry import lane_name
from .sampler import Logits
from .seats import OwnSeat, Seats


class ArLane:
    """Autoregressive decoding of up to `geometry` rows in one forward pass.

    At geometry 1 a row steps on its own buffers; a wider lane has shared ones (see seats.py).
    """

    def __init__(self, trunk: Trunk, geometry: int, dtype: str, receipt: Receipt) -> None:
        self.spec = LaneSpec(
            name=lane_name("ar", geometry),
            kind="ar",
            geometry=geometry,
            dtype=dtype,
            arithmetic=trunk.arithmetic,
            tile=trunk.tile_for(geometry),
            prefill_tile=trunk.prefill_tile,
        )
        self.receipt = receipt
        self._trunk = trunk
        self._seats = Seats(trunk.new_slots(geometry)) if geometry > 1 else OwnSeat()

    def open(self, key: str, context: RowContext) -> Row:
        """Start a row; see `Lane.open`."""
        return Row(key, context, self._trunk.new_row())

    def prefill(self, row: Row, count: int) -> RowDelta | None:
        """Read up to `count` prompt tokens in whole tiles; see `Lane.prefill`."""
        prompt = row.context.prompt
        tile = self._trunk.prefill_tile
        stop = min(row.read + count, len(prompt))
        scored: list[TokenLogprob] = []
        last: Logits | None = None
        while row.read < stop:
            # Boundaries lie at multiples of the tile, so the arithmetic knows only the prompt.
            end = min((row.read // tile + 1) * tile, len(prompt))
            want = "last" if end == len(prompt) else "none"
            if row.context.score_prompt:
                want = "all"
            tokens = prompt[row.read : end]
            logits = self._trunk.prefill(row.slots, tokens, want=want)
            if logits is not None:
                last = logits[-1]
                if row.context.score_prompt:
                    scored += _scored(row, logits, end)
            row.read = end
        if row.read < len(prompt):
            return RowDelta(row.key, prompt_logprobs=tuple(scored)) if scored else None
        assert last is not None, "the prompt's last tile yields logits"
        return _chosen(row, last, tuple(scored))

    def step(self, rows: Sequence[Row], depth: int = 0) -> list[RowDelta]:
        """Run one step; see `Lane.step`. Depth is 0: nothing is drafted here."""
        places: dict[str, int] = {}
        deltas = []
        for row in rows:
            try:
                places[row.key] = self._seats.take(row, rows)
            except RowError as error:
                deltas.append(RowDelta(row.key, error=str(error)))
        stepping = [row for row in rows if row.key in places]
        return [*deltas, *self._step(stepping, places)] if stepping else deltas

    def _step(self, rows: Sequence[Row], places: Mapping[str, int]) -> list[RowDelta]:
        slots = self._seats.buffers(rows)
        tokens = [0] * slots.count
        for row in rows:
            tokens[places[row.key]] = row.last_token
        logits = self._trunk.step(slots, tokens)
        for row in rows:
            slots.lengths[places[row.key]] += 1
        return [_chosen(row, logits[places[row.key]], ()) for row in rows]

    def close(self, row: Row) -> None:
        """Free the row's slot wherever it is; see `Lane.close`."""
        if row.seats is not None:
            row.seats.leave(row)


def _chosen(row: Row, logits: Logits, scored: tuple[TokenLogprob, ...]) -> RowDelta:
    """Choose and commit a row's next token; what goes wrong in here is that row's alone."""
    try:
        token, report = sampler.choose(logits, row)
    except Exception as error:
        return RowDelta(row.key, error=f"choosing a token failed: {error}")
    row.commit(token)
    logprobs = (report,) if report is not None else ()
    return RowDelta(row.key, (token,), logprobs, scored)


def _scored(row: Row, logits: Logits, end: int) -> list[TokenLogprob]:
    """Return log probabilities of the prompt tokens that positions up to `end` predict."""
    prompt, alternatives = row.context.prompt, row.context.sampling.logprobs or 0
    start = end - len(logits)
    entries = [TokenLogprob(prompt[0], None, ())] if start == 0 else []
    entries.extend(
        sampler.logprob_of(logits[at - start], prompt[at + 1], alternatives)
        for at in range(start, min(end, len(prompt) - 1))
    )
    return entries
