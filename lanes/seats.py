"""Which row sits in which slot of a wider lane, and how a row moves between lanes.

A row is seated when it first steps in a lane, by copying its keys and values into a free slot,
and stays until it is closed, steps in another lane, or has to make room for a stepping row.
"""

from collections.abc import Sequence

from .base import Row
from .ragged import RowSlots


class Seats:
    """The shared buffers of one wider lane and the rows in them."""

    def __init__(self, slots: RowSlots) -> None:
        self._slots = slots
        self._rows: list[Row | None] = [None] * slots.count

    def take(self, row: Row, stepping: Sequence[Row]) -> int:
        """Seat a row, if it is not seated yet, and return its slot.

        Args:
            stepping: The rows of this step, no more than there are slots; another one that sits
                here leaves when there is no free slot.

        Raises:
            RowError: When there is no memory to seat it; nothing has changed then.
        """
        if row.seats is not self:
            self._seat(row, stepping)
        return self._place(row)

    def buffers(self, rows: Sequence[Row]) -> RowSlots:
        """Return the buffers that seated rows step on."""
        return self._slots

    def leave(self, row: Row, *, keep: bool = False) -> None:
        """Give the seat back; with `keep`, carry keys and values to the row's own buffers."""
        at = self._place(row)
        if keep:
            row.slots = self._slots.extract(at)
        row.seats = None
        self._rows[at] = None
        if not any(self._rows):
            self._slots.clear()
        else:
            self._slots.vacate(at, spoilt=row.failed or row.head_failed)

    def _seat(self, row: Row, stepping: Sequence[Row]) -> None:
        if row.seats is not None:
            row.seats.leave(row, keep=True)
        if all(self._rows):
            idle = next(r for r in self._rows if r is not None and r not in stepping)
            self.leave(idle, keep=True)
        at = self._rows.index(None)
        try:
            self._slots.place(at, row.slots)
        except Exception:
            self._slots.vacate(at, spoilt=True)
            raise
        row.slots.clear()
        self._rows[at] = row
        row.seats = self

    def _place(self, row: Row) -> int:
        return next(at for at, seated in enumerate(self._rows) if seated is row)


class OwnSeat:
    """Geometry 1: a row steps on its own buffers, wherever it sat before."""

    def take(self, row: Row, stepping: Sequence[Row]) -> int:
        """Bring the one row back to its own buffers, whose only slot it has."""
        if row.seats is not None:
            row.seats.leave(row, keep=True)
        return 0

    def buffers(self, rows: Sequence[Row]) -> RowSlots:
        """Return the one row's own buffers."""
        return rows[0].slots
