"""Where tokens are chosen: the seam between a pass's logits and what rows commit.

Two ways exist, here and in device.py; the faster one on this machine is taken at load.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import mlx.core as mx
import numpy as np

from ..runtime.errors import FormError
from ..runtime.exits import Ids
from .base import Row, RowDelta, reason
from .ragged import Pass
from .sampler import Logits
from .verify import Acceptance, Coupled, Draft, Verdict


class Column(NamedTuple):
    """The drafts of one depth.

    Args:
        tokens: One a row, on the device.
        drafts: The same on the host, None where they are not known there yet.
    """

    tokens: mx.array
    drafts: list[Draft | None]


class Span(NamedTuple):
    """A row's part of a verified pass: its packed positions from `first` on, and its drafts."""

    row: Row
    first: int
    drafts: list[Draft | None]

    def delta(self, verdict: Verdict) -> RowDelta:
        """Return what the row gained."""
        return RowDelta(
            self.row.key,
            tuple(verdict.tokens),
            tuple(verdict.logprobs),
            drafted=len(self.drafts),
            accepted=verdict.accepted,
        )


class Chooser(Protocol):
    """One way to choose."""

    name: str

    def draft(
        self,
        logits: mx.array,
        rows: Sequence[Row],
        before: Sequence[Sequence[Draft | None]],
        ids: Ids | None,
    ) -> Column:
        """Draft one token a row.

        Args:
            logits: The head's, [rows, tokens].
            before: Each row's drafts so far.
            ids: The tokens the logits are of; None for the whole vocabulary.
        """
        ...

    def verify(
        self, passed: Pass, spans: Sequence[Span], columns: Sequence[mx.array]
    ) -> list[RowDelta]:
        """Compute a pass and commit what each row makes of its drafts.

        Args:
            columns: The drafts' arrays, to compute along with the pass.
        """
        ...


class HostChooser:
    """Chooses on the host, from logits that are brought over.

    Args:
        acceptance: How drafts are made and accepted.
    """

    name = "host"

    def __init__(self, acceptance: Acceptance) -> None:
        self._acceptance = acceptance

    def draft(
        self,
        logits: mx.array,
        rows: Sequence[Row],
        before: Sequence[Sequence[Draft | None]],
        ids: Ids | None,
    ) -> Column:
        """See `Chooser.draft`."""
        host = on_host(logits)
        drafts = [
            self.draft_one(host[at], row, earlier, ids)
            for at, (row, earlier) in enumerate(zip(rows, before, strict=True))
        ]
        return Column(mx.array([draft.token for draft in drafts]), list(drafts))

    def draft_one(
        self, logits: Logits, row: Row, before: Sequence[Draft | None], ids: Ids | None
    ) -> Draft:
        """Draft a single row's next token; what goes wrong in here is that row's alone."""
        try:
            return self._acceptance.draft(logits, row, known(before), ids)
        except Exception:  # without a draft the row has the same tokens, only fewer a step
            return Draft(0, failed=True)

    def verify(
        self, passed: Pass, spans: Sequence[Span], columns: Sequence[mx.array]
    ) -> list[RowDelta]:
        """See `Chooser.verify`."""
        logits = passed.host()
        return [self.verify_one(logits, span) for span in spans]

    def verify_one(self, logits: Logits, span: Span) -> RowDelta:
        """Commit what a row makes of its drafts; what goes wrong in here is that row's alone.

        Args:
            logits: The pass's, [positions, vocabulary].
        """
        mine = logits[span.first : span.first + 1 + len(span.drafts)]
        try:
            return span.delta(self._acceptance.verify(mine, span.row, known(span.drafts)))
        except Exception as error:
            return choosing_failed(span.row, error)


ON_HOST: Final = HostChooser(Coupled())


def choosing_failed(row: Row, error: Exception) -> RowDelta:
    """Return the end of a row whose next token could not be chosen."""
    if isinstance(error, FormError):
        return RowDelta(row.key, error=reason(error), code="form_failed")
    return RowDelta(row.key, error=f"choosing a token failed: {reason(error)}")


def known(drafts: Sequence[Draft | None]) -> list[Draft]:
    """Return drafts that are all known on the host by now."""
    return [draft for draft in drafts if draft is not None]


def on_host(logits: mx.array) -> Logits:
    """Compute logits and return them, without a copy where memory is shared."""
    out = logits.astype(mx.float32)
    mx.eval(out)
    return np.array(out, copy=False)
