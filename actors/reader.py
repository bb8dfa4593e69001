"""Which prompt is read next, and how much of it in one turn. Pure."""

from collections.abc import Sequence
from typing import Final

from ..runtime.modes import Pace
from .scene import RowView, Scene

READ_SECONDS: Final = 0.25  # the most a turn may spend reading, so that leaving stays quick


class Reader:
    """Reads prompts first come, first served, but a long one lets short ones by.

    Args:
        share: The part of a turn that reading may take while rows decode.
        tile: Prompt tokens of one forward pass of the installed lanes.
    """

    def __init__(self, pace: Pace, share: float, tile: int) -> None:
        self._most = pace.prefill_chunk_tokens
        self.ratio = share / (1 - share)
        self._tile = tile
        self._short_next = False

    def next(self, rows: Sequence[RowView]) -> RowView:
        """Alternate between the first of some rows and the one with the least left to read."""
        short = min(rows, key=lambda row: row.unread)
        chosen = short if self._short_next else rows[0]
        self._short_next = not self._short_next
        return chosen

    def tokens(self, row: RowView, scene: Scene, beside_s: float) -> int:
        """Return how many tokens to read, in whole tiles.

        Args:
            beside_s: Seconds of decoding this turn shares with; 0 when nobody decodes.
        """
        cost = scene.costs.per_prompt_token
        if cost == 0:
            return min(self._tile, row.unread)
        seconds = min(READ_SECONDS, beside_s * self.ratio) if beside_s else READ_SECONDS
        tiles = max(1, int(seconds / cost) // self._tile)
        return min(tiles * self._tile, max(self._most // self._tile, 1) * self._tile, row.unread)
