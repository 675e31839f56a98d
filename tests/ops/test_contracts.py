"""Bytes and operations of the contracts, by hand; and that every op has one."""

from __future__ import annotations

import inspect

from cpu.attention_cases import make_shape
from cpu.delta_cases import delta_shape
from edge_transformer.formats.weight import FORMATS, WeightFormat, packed_layout, round_up
from edge_transformer.ops.backend import Backend
from edge_transformer.ops.contracts import (
    CONTRACTS,
    add_norm_bytes,
    attention_decode_bytes,
    attention_flops,
    gated_delta_decode_bytes,
    gated_delta_step_flops,
    visible_positions,
    weight_bytes,
)
from edge_transformer.ops.tensor import DType


def test_every_op_has_a_contract() -> None:
    methods = {name for name, _ in inspect.getmembers(Backend, inspect.isfunction) if not name.startswith("_")}
    assert methods - {"allocate", "reserve", "read", "argmax", "write", "give_up", "close"} == set(CONTRACTS)


def test_weight_bytes_are_those_of_the_file() -> None:
    """Planes hold the bits of the blocks, re-arranged: as many bytes."""
    for weight_format, spec in FORMATS.items():
        if spec.file_block_bytes == 0:
            continue
        layout = packed_layout(weight_format, 7, 512)
        assert weight_bytes(layout) == 7 * 512 // spec.block_cols * spec.file_block_bytes
    assert weight_bytes(packed_layout(WeightFormat.Q4_1, 576, 576)) == 576 * 18 * 20
    assert weight_bytes(packed_layout(WeightFormat.I8_ROW, 3, 512)) == 3 * (512 + 4)
    assert weight_bytes(packed_layout(WeightFormat.I4_G64, 3, 512)) == 3 * (256 + 8 * 2)


def test_attention() -> None:
    shape = make_shape(9, 3, 64, window=100, kv_dtype=DType.BF16)
    assert [visible_positions(shape, position) for position in (0, 98, 99, 100, 5000)] == [1, 99, 100, 100, 100]
    assert attention_decode_bytes(shape, 5000) == 100 * 3 * 64 * 2 * 2
    assert attention_flops(shape, 98, rows=3) == (99 + 100 + 100) * 9 * 64 * 2 * 2


def test_add_norm() -> None:
    assert add_norm_bytes(2, 10, has_delta=False) == 160
    assert add_norm_bytes(2, 10, has_delta=True) == 320


def test_gated_delta() -> None:
    shape = delta_shape(2, 4, key_dim=16, value_dim=8, conv_width=4)
    assert shape.channels == 2 * 2 * 16 + 4 * 8
    assert shape.block_bytes == round_up((4 * 16 * 8 + 96 * 3) * 4, 256)
    assert gated_delta_decode_bytes(shape) == (2 * (4 * 16 * 8 + 96 * 3) + 96 + 2 * 32) * 4
    assert gated_delta_step_flops(shape) == 4 * 16 * 8 * 7
