"""Self-checks of speculative lanes: each kind of damage is refused under its own name."""

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import pytest
from tests.lanes.test_mtp import lockstep

from paceline.lanes.base import Trunk
from paceline.lanes.head import LockstepHead
from paceline.lanes.ragged import Layout, Pass, RowSlots
from paceline.lanes.selfcheck import LaneChecker
from paceline.runtime.errors import LaneRefused


def _check(trunk: Trunk, head: Any, geometry: int) -> list[str]:
    receipt = LaneChecker(trunk, 2e-3, geometry, head).check(f"mtp-b{geometry}", geometry)
    assert receipt.max_logit_difference == 0.0
    return [check.name for check in receipt.checks]


@pytest.mark.parametrize("geometry", [1, 3, 8])
def test_a_sound_lane_passes_every_check(geometry: int) -> None:
    """Bit for bit in constant-shape arithmetic, at every width."""
    trunk, head = lockstep()
    assert _check(trunk, head, geometry) == [
        "finite logits",
        "row isolation",
        "uneven acceptance",
        "rewind against recompute",
        "against B1",
    ]


def test_a_rewind_that_keeps_a_wrong_draft_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One position too many kept after a rejection shows in the step behind it."""
    plain = RowSlots.advance

    def advance(self: RowSlots, slot: int, kept: int) -> None:
        plain(self, slot, kept + (kept == 1 and self.count > 1))

    monkeypatch.setattr(RowSlots, "advance", advance)
    trunk, head = lockstep()
    with pytest.raises(LaneRefused, match="rewind against recompute"):
        _check(trunk, head, 3)


class _Blurred:
    """A trunk whose passes over several positions are off by a little."""

    def __init__(self, inner: Trunk, several: float, single: float) -> None:
        self._inner = inner
        self._off = (several, single)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, slots: RowSlots, layout: Layout, tokens: mx.array) -> Pass:
        passed = self._inner.step(slots, layout, tokens)
        assert passed.logits is not None
        if layout.total > 1:
            off = [self._off[count == 1] for count in layout.counts for _ in range(count)]
            passed.logits = passed.logits + mx.array(off)[:, None]
        return passed


def test_a_verify_that_differs_from_decoding_is_refused() -> None:
    """Logits of several positions must be those of one position at a time."""
    trunk, head = lockstep()
    with pytest.raises(LaneRefused, match="uneven acceptance"):
        _check(_Blurred(trunk, 0.01, 0.0), head, 3)
    with pytest.raises(LaneRefused, match="against B1"):
        _check(_Blurred(trunk, 0.0, 0.01), head, 3)


def test_a_head_whose_rows_leak_far_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that depends on the rows beside it by more than rounding fails isolation."""
    plain = LockstepHead.step

    def step(self: LockstepHead, slots: RowSlots, lengths: Sequence[int], *rest: Any) -> mx.array:
        out = plain(self, slots, lengths, *rest)
        return out + mx.mean(out, axis=0, keepdims=True)

    monkeypatch.setattr(LockstepHead, "step", step)
    trunk, head = lockstep()
    with pytest.raises(LaneRefused, match="row isolation"):
        _check(trunk, head, 3)
