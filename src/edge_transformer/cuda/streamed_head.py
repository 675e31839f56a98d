"""The output projection streamed to the GPU, whole or its first rows: in blocks, which are the last units of a pass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from edge_transformer.cuda.weight_slots import HostRange, WeightSlots
from edge_transformer.formats.weight import PLANE_ALIGNMENT, Plane, Weight, WeightLayout, round_up


def cut_rows(weight: Weight, rows_to_cut: int, block_rows: int) -> tuple[list[WeightLayout], list[list[HostRange]]]:
    """Layouts in a slot, and ranges of host memory, of the first rows in blocks of `block_rows` (the last may have
    fewer).

    Each plane of a block is 256-aligned in the slot and keeps its row pitch.
    """
    layouts: list[WeightLayout] = []
    units: list[list[HostRange]] = []
    for start in range(0, rows_to_cut, block_rows):
        rows = min(block_rows, rows_to_cut - start)
        planes: list[Plane] = []
        ranges: list[HostRange] = []
        offset = 0
        for plane in weight.layout.planes:
            nbytes = rows * plane.row_pitch
            planes.append(Plane(offset, plane.row_pitch))
            ranges.append(HostRange(weight.address + plane.offset + start * plane.row_pitch, nbytes, offset))
            offset += round_up(nbytes, PLANE_ALIGNMENT)
        layouts.append(WeightLayout(weight.layout.format, rows, weight.layout.cols, tuple(planes), offset))
        units.append(ranges)
    return layouts, units


def rows_from(weight: Weight, first_row: int) -> Weight:
    """The rows from `first_row` on, where they lie."""
    layout = weight.layout
    planes = tuple(Plane(plane.offset + first_row * plane.row_pitch, plane.row_pitch) for plane in layout.planes)
    return Weight(replace(layout, rows=layout.rows - first_row, planes=planes), weight.address, weight.owner)


class StreamedHead:
    """Blocks of rows of the output projection, which are the units of `slots` from `first_unit` on. for_the_cpu: the
    rows after them, which are computed where they lie.
    """

    def __init__(
        self, slots: WeightSlots, first_unit: int, layouts: Sequence[WeightLayout], for_the_cpu: Weight | None
    ) -> None:
        self.for_the_cpu = for_the_cpu
        self._slots = slots
        self._first_unit = first_unit
        self._layouts = layouts

    def __len__(self) -> int:
        return len(self._layouts)

    @contextmanager
    def block(self, index: int) -> Iterator[tuple[int, Weight]]:
        """(first row, rows of the matrix) for what is queued on the compute stream meanwhile."""
        first_row = sum(layout.rows for layout in self._layouts[:index])
        slot = self._slots.acquire(self._first_unit + index)
        try:
            yield first_row, Weight(self._layouts[index], slot.address, slot)
        finally:
            self._slots.release(slot)
