"""A model's weights as the GPU sees them: resident in the arena, or streamed from page-locked host memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from edge_transformer.cuda.arena import Arena
from edge_transformer.cuda.host_weights_feed import HostWeightsFeed
from edge_transformer.cuda.runtime import Gpu, Stream
from edge_transformer.cuda.streamed_head import StreamedHead, cut_rows, rows_from
from edge_transformer.cuda.weight_slots import HostRange, Slot, SlotState, WeightSlots
from edge_transformer.formats.weight import PLANE_ALIGNMENT, Weight, WeightLayout, round_up
from edge_transformer.ops.tensor import Tensor
from edge_transformer.placement.plan import HeadPlace, Plan

LayerWeights = Mapping[str, Mapping[str, Weight]]
"""A layer's matrices in host memory: by segment in order of use, then by role."""


class HostModel(Protocol):
    """What there is in host memory (engine.weights.HostWeights)."""

    embedding: Weight
    head: Weight
    vectors: list[Mapping[str, Tensor]]
    final_norm: Tensor

    def layer(self, index: int) -> LayerWeights: ...

    def locked_ranges(self) -> Iterable[tuple[int, int, bool]]:
        """(address, bytes, read only) of all memory that matrices lie in, to be page-locked."""
        ...

    def close(self) -> None: ...


def segment_bytes(segment: Mapping[str, Weight]) -> int:
    """Bytes of a segment in the arena: its matrices, each 256-aligned."""
    return sum(round_up(weight.layout.nbytes, PLANE_ALIGNMENT) for weight in segment.values())


def vector_bytes(host: HostModel) -> int:
    """Bytes of all small vectors in the arena, each 256-aligned."""
    vectors = [vector for layer in host.vectors for vector in layer.values()]
    return sum(round_up(vector.nbytes, PLANE_ALIGNMENT) for vector in (*vectors, host.final_norm))


class GpuWeights:
    """Weights by layer and segment for the compute stream; attributes and calls as engine.weights.HostWeights.

    embedding stays in host memory; head too when the plan computes it on the CPU; one that is streamed, whole or in
    part, is owned by a StreamedHead. ring_cost: what it costs that the host refuses to page-lock weights; None where it
    does not.
    Raises CapacityError when the host refuses page-locked memory altogether.
    """

    def __init__(self, gpu: Gpu, arena: Arena, plan: Plan, host: HostModel, compute: Stream, copies: Stream) -> None:
        self._gpu = gpu
        self._host = host
        self._feed = HostWeightsFeed(gpu, host.locked_ranges())
        self._compute = compute
        try:
            self._place(arena, plan, copies)
        except BaseException:
            self._feed.close()
            raise

    def _place(self, arena: Arena, plan: Plan, copies: Stream) -> None:
        gpu, host = self._gpu, self._host
        self.vectors: list[Mapping[str, Tensor]] = [
            {role: self._vector(arena, vector, role) for role, vector in layer.items()} for layer in host.vectors
        ]
        self.final_norm = self._vector(arena, host.final_norm, "final norm")
        self.embedding = host.embedding
        self.head = self._matrix(arena, host.head, "output projection") if plan.head is HeadPlace.GPU else host.head
        self._resident: dict[tuple[int, str], Mapping[str, Weight]] = {}
        self._places: dict[tuple[int, str], tuple[int, dict[str, tuple[Weight, int]]]] = {}
        units = self._place_layers(arena, plan)
        head_unit, head_layouts = len(units), list[WeightLayout]()
        if plan.head_streamed_rows:
            head_layouts, head_units = cut_rows(host.head, plan.head_streamed_rows, plan.head_block_rows)
            units += head_units
        self._slots: WeightSlots | None = None
        if units:
            addresses = [arena.take(plan.slot_bytes, f"weight slot {index}") for index in range(plan.slots)]
            self.ring_cost = self._feed.cost(addresses[0], units[0], copies)
            self._slots = WeightSlots(gpu, self._feed, self._compute, copies, addresses, units)
            if head_layouts:
                whole = plan.head_streamed_rows == host.head.layout.rows
                rest = None if whole else rows_from(host.head, plan.head_streamed_rows)
                streamed = StreamedHead(self._slots, head_unit, head_layouts, rest)
                self.head = Weight(host.head.layout, host.head.address, streamed)
        else:
            self.ring_cost = self._feed.cost(0, (), copies)
        self._last_of_unit = self._last_segments()
        self._current: Slot | None = None
        gpu.synchronize()

    def acquire(self, layer: int, segment: str) -> Mapping[str, Weight]:
        """The matrices of a segment by role, for what is queued on the compute stream until `release`."""
        key = (layer, segment)
        if key in self._resident:
            return self._resident[key]
        unit, matrices = self._places[key]
        if self._slots is None:
            raise ValueError(f"layer {layer} is streamed, but there are no slots")
        slot = self._current
        if slot is None or slot.unit != unit or slot.state is not SlotState.IN_USE:
            self._current = None  # first: an interrupt must not leave a slot here that is being filled
            if slot is not None:  # a pass was given up inside a unit
                self._slots.release(slot)
            self._current = slot = self._slots.acquire(unit)
        return {role: Weight(weight.layout, slot.address + offset, slot) for role, (weight, offset) in matrices.items()}

    def release(self, layer: int, segment: str) -> None:
        """The segment is read no more by what will be queued."""
        slot = self._current
        if (layer, segment) in self._last_of_unit and slot is not None and self._slots is not None:
            self._current = None
            self._slots.release(slot)

    def close(self) -> None:
        """Wait for copies under way, then unlock and give back the host memory."""
        with ExitStack() as last:
            last.callback(self._host.close)
            last.callback(self._feed.close)
            self._gpu.synchronize()

    def _vector(self, arena: Arena, vector: Tensor, label: str) -> Tensor:
        address = arena.take(vector.nbytes, label)
        staging = self._gpu.allocate_host(vector.nbytes, label)
        Tensor(staging.address, vector.shape, vector.dtype, staging).numpy()[...] = vector.numpy()
        self._gpu.copy(address, staging.address, vector.nbytes, self._compute)
        self._gpu.synchronize(self._compute)
        staging.close()
        return Tensor(address, vector.shape, vector.dtype, arena)

    def _matrix(self, arena: Arena, weight: Weight, label: str) -> Weight:
        address = arena.take(weight.layout.nbytes, label)
        self._feed.copy(address, weight.address, weight.layout.nbytes, self._compute)
        return Weight(weight.layout, address, arena)

    def _place_layers(self, arena: Arena, plan: Plan) -> list[list[HostRange]]:
        """Copy resident layers to the arena; where the matrices of the others lie in a slot, and the units' ranges."""
        units: list[dict[tuple[int, str], Mapping[str, Weight]]] = []
        for index, stays in enumerate(plan.resident):
            segments = self._host.layer(index)
            if stays:
                for name, segment in segments.items():
                    self._resident[index, name] = {
                        role: self._matrix(arena, weight, f"layer {index} {role}") for role, weight in segment.items()
                    }
            elif plan.unit_layers:
                units.append({(index, name): segment for name, segment in segments.items()})
            else:
                units += [{(index, name): segment} for name, segment in segments.items()]
        ranges = []
        for number, unit in enumerate(units):
            offsets, unit_ranges = slot_layout([weight for segment in unit.values() for weight in segment.values()])
            for key, segment in unit.items():
                matrices = {role: (weight, offsets[weight.address]) for role, weight in segment.items()}
                self._places[key] = number, matrices
            ranges.append(unit_ranges)
        return ranges

    def _last_segments(self) -> set[tuple[int, str]]:
        """Of every unit the segment used last."""
        last = {unit: key for key, (unit, _) in self._places.items()}
        return set(last.values())


def slot_layout(matrices: Sequence[Weight]) -> tuple[dict[int, int], list[HostRange]]:
    """Offsets in a slot by address in host memory, each 256-aligned, and the ranges to be copied. In the order of host
    memory: what lies one behind the other there is one copy, and each copy costs the bus some microseconds. What has
    another owner is page-locked by itself, and a copy must not cross from one such range into another.
    """
    offsets: dict[int, int] = {}
    ranges: list[HostRange] = []
    owner: object = None
    offset = 0
    for weight in sorted(matrices, key=lambda weight: weight.address):
        address, nbytes = weight.address, weight.layout.nbytes
        offsets[address] = offset
        last = ranges[-1] if ranges and weight.owner is owner else None
        if last and (last.address + last.nbytes, last.slot_offset + last.nbytes) == (address, offset):
            ranges[-1] = HostRange(last.address, last.nbytes + nbytes, last.slot_offset)
        else:
            ranges.append(HostRange(address, nbytes, offset))
        owner = weight.owner
        offset += round_up(nbytes, PLANE_ALIGNMENT)
    return offsets, ranges
