"""Rows of the output projection cut into blocks: every row of every plane arrives where its block's layout says."""

from __future__ import annotations

import numpy as np
import pytest

from edge_transformer.cuda.streamed_head import cut_rows, rows_from
from edge_transformer.formats.weight import Weight, WeightFormat, in_place_layout, packed_layout


@pytest.mark.parametrize("weight_format", ["BF16", "Q4_1", "Q8_0", "Q6_K"])
@pytest.mark.parametrize(("cut", "block_rows"), [(131, 1), (131, 64), (131, 130), (131, 131), (128, 64), (1, 64)])
def test_blocks_hold_the_rows_of_every_plane(weight_format: str, cut: int, block_rows: int) -> None:
    rows, kind = 131, WeightFormat(weight_format)
    layout = in_place_layout(kind, rows, 256) or packed_layout(kind, rows, 256)
    source = np.random.default_rng(1).integers(0, 256, layout.nbytes, np.uint8)
    layouts, units = cut_rows(Weight(layout, source.ctypes.data, source), cut, block_rows)
    assert sum(block.rows for block in layouts) == cut
    start = 0
    for block, ranges in zip(layouts, units, strict=True):
        slot = np.zeros(block.nbytes, np.uint8)
        for part in ranges:
            first = part.address - source.ctypes.data
            slot[part.slot_offset : part.slot_offset + part.nbytes] = source[first : first + part.nbytes]
        for there, here in zip(layout.planes, block.planes, strict=True):
            assert (here.offset % 256, here.row_pitch) == (0, there.row_pitch)
            for row in range(block.rows):
                at = there.offset + (start + row) * there.row_pitch
                expected = source[at : at + there.row_pitch]
                at = here.offset + row * here.row_pitch
                assert np.array_equal(slot[at : at + here.row_pitch], expected)
        start += block.rows


@pytest.mark.parametrize("weight_format", ["BF16", "Q4_1", "Q8_0", "Q6_K"])
def test_the_rows_that_are_left_are_those_after_the_blocks(weight_format: str) -> None:
    rows, first, kind = 131, 64, WeightFormat(weight_format)
    layout = in_place_layout(kind, rows, 256) or packed_layout(kind, rows, 256)
    source = np.random.default_rng(2).integers(0, 256, layout.nbytes, np.uint8)
    rest = rows_from(Weight(layout, source.ctypes.data, source), first)
    assert (rest.layout.rows, rest.layout.cols, rest.address) == (rows - first, 256, source.ctypes.data)
    for there, here in zip(layout.planes, rest.layout.planes, strict=True):
        assert (here.offset, here.row_pitch) == (there.offset + first * there.row_pitch, there.row_pitch)
