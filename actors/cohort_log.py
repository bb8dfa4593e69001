"""Cohorts in the log: each with a line at its begin and its end, as long as they are few."""

from typing import Any, Final

import msgspec

from .messages import CohortDissolved, CohortSealed, Note

PER_SECOND: Final = 8.0  # cohorts that are logged one by one, in the long run
AT_ONCE: Final = 32  # and in a burst
_SUM_SECONDS: Final = 1.0  # between two lines that sum up the others


class Unlogged(msgspec.Struct):
    """Sums of cohorts that had no lines of their own."""

    cohorts: int = 0
    steps: int = 0
    tokens: int = 0


class CohortLog:
    """Logs sealed and dissolved cohorts, and of those beyond the allowed rate the sums.

    Rows whose readers are just slower than the device come and go at every token, and so do
    cohorts. A cohort has both its lines or neither; at level debug each has both.
    """

    def __init__(self, log: Any) -> None:
        self._log = log
        self._allowed = float(AT_ONCE)
        self._at = 0.0
        self._shown: set[str] = set()
        self._unlogged = Unlogged()
        self._summed_at = 0.0

    def note(self, note: Note, now: float) -> None:
        """Log what became of a cohort."""
        fields: dict[str, Any] = {
            "cohort_id": note.cohort_id,
            "lane": note.lane,
            "geometry": note.geometry,
            "rows": note.rows,
            "real_width": len(note.rows),
        }
        match note:
            case CohortSealed():
                self._say(self._allow(note, now), "sealed", fields, request_ids=note.requests)
            case CohortDissolved():
                shown = note.cohort_id in self._shown
                self._shown.discard(note.cohort_id)
                if not shown:
                    self._unlogged.cohorts += 1
                    self._unlogged.steps += note.steps
                    self._unlogged.tokens += note.tokens
                self._say(
                    shown,
                    "dissolved",
                    fields,
                    steps=note.steps,
                    tokens=note.tokens,
                    acceptance=_share(note.accepted, note.drafted),
                    depths=note.depths,
                    duration_s=round(note.duration_s, 6),
                    reason=note.reason,
                )

    def sum_up(self, now: float, idle: bool) -> None:
        """Log the sums of the others when it is time, or when nothing runs any more."""
        if self._unlogged.cohorts and (idle or now - self._summed_at >= _SUM_SECONDS):
            self._log.info("cohort.unlogged", **msgspec.structs.asdict(self._unlogged))
            self._unlogged = Unlogged()
            self._summed_at = now

    def _allow(self, note: CohortSealed, now: float) -> bool:
        self._allowed = min(AT_ONCE, self._allowed + (now - self._at) * PER_SECOND)
        self._at = now
        if self._allowed < 1:
            return False
        self._allowed -= 1
        self._shown.add(note.cohort_id)
        return True

    def _say(self, shown: bool, what: str, fields: dict[str, Any], **more: Any) -> None:
        (self._log.info if shown else self._log.debug)(f"cohort.{what}", **fields, **more)


def _share(accepted: int, drafted: int) -> float | None:
    return round(accepted / drafted, 4) if drafted else None
