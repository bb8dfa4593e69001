"""throughput, balanced, b1-exact: three ways to build the lanes, each held to what it promises."""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from tests.lanes.test_heads import saved
from tests.lanes.test_mtp import SAMPLERS, at, context, run
from tests.lanes.tiny import LLAMA, tensors_of, tiny_head, tiny_llama

from paceline.lanes.install import Installed, Wanted, install
from paceline.lanes.numerics import InTurn, RowByRow
from paceline.runtime.model import load
from paceline.runtime.modes import Mode


def _installed(folder: Path, **wanted: Any) -> Installed:
    dtype = wanted.pop("dtype", "auto")
    return install(load(folder, dtype, "cpu", 0, ""), Wanted(Mode.MTP_BATCH, **wanted))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    net = tiny_llama()
    return saved(tmp_path, net, LLAMA, tensors_of(tiny_head(net)))


def test_b1_exact_has_the_bits_of_a_lone_row(folder: Path) -> None:
    """Tokens and log probabilities are those of the B1 lane, in any company, in any type."""
    for dtype in ("float32", "bfloat16"):
        lanes = _installed(folder, numerics="b1-exact", dtype=dtype).lanes
        assert [type(lane) for lane in lanes[1:]] == [InTurn, InTurn]
        assert [lane.spec.name for lane in lanes] == ["mtp-b1", "mtp-b3", "mtp-b8"]
        assert {lane.spec.numerics for lane in lanes} == {"b1-exact"}
        rows = [context(i, SAMPLERS[i % 3], 4 + 9 * i, 12) for i in range(8)]
        alone = [run(lanes[0], [row], at(2))[0] for row in rows]
        assert run(lanes[2], rows, at(2), [0, 0, 1, 1, 2, 3, 3, 4]) == alone
        row = lanes[2].open("r", rows[0])
        lanes[2].prefill(row, 100)
        assert lanes[2].step([row], [2])[0].drafted == 2


def test_balanced_takes_the_first_attention_row_by_row(folder: Path) -> None:
    """Where shapes matter: the named products are swapped, and lanes still pass their checks."""
    installed = _installed(folder, numerics="balanced", dtype="bfloat16")
    assert "row by row self_attn.k_proj, self_attn.o_proj, self_attn.q_proj" in installed.why
    assert {lane.spec.numerics for lane in installed.lanes} == {"balanced"}
    trunk: Any = installed.lanes[0]
    layer = trunk.trunk._net.layers[0]
    assert isinstance(layer.self_attn.q_proj, RowByRow)
    assert not isinstance(layer.mlp.down_proj, RowByRow)


def test_balanced_has_nothing_to_do_in_constant_shape(folder: Path) -> None:
    """There every product has B1's bits as it is, and the server says so."""
    installed = _installed(folder, numerics="balanced")
    assert installed.arithmetic == "constant-shape"
    assert "every product has B1's bits" in installed.why
    assert [lane.receipt.max_logit_difference for lane in installed.lanes] == [0.0, 0.0, 0.0]


def test_balanced_follows_a_lone_rows_own_products(folder: Path) -> None:
    """Without exact_widths a lone row has its own shape, and balanced keeps to it."""
    installed = _installed(folder, numerics="balanced", exact_widths=False)
    assert "row by row qkv" in installed.why


def test_row_by_row_gives_each_row_its_lone_bits() -> None:
    """Every row of a wide product has the bits it has alone."""
    mx.random.seed(7)
    linear = nn.Linear(64, 192)
    x = mx.random.normal((8, 3, 64))
    wide = np.array(RowByRow(linear)(x))
    for row in range(8):
        assert np.array_equal(wide[row], np.array(linear(x[row : row + 1]))[0])
