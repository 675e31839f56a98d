"""The plan of one GPU: which layers are resident, how the others are streamed, where vocabulary and KV cache lie.

All GPU memory comes from one arena whose size the plan states to the byte. Nothing in the arena is sized by how long a
sequence gets: a resident KV cache has the room it was granted, an offloaded one has two buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from edge_transformer.errors import CapacityError, UsageError
from edge_transformer.formats.weight import round_up

ALIGNMENT = 256
MINIMUM_SLOTS = 2

HEAD_BLOCK_BYTES = 16 << 20
"""A block of the output projection at most, where no layer sizes the slots: larger copies are no faster."""

HEAD_ROW_STEP = 64
"""Blocks of the output projection's rows are multiples of this, but for the last."""


BORDER_SECONDS = 1e-3
"""What lies between a token's last layer and the next one's first: logits read, a token chosen, a pass begun. What the
slots take in meanwhile keeps the bus busy.
"""

HOST_HEAD_MARGIN = 1.05
"""An output projection on the CPU, whole or in part, has to make tokens so many times faster: its logits agree with the
GPU's to rounding only, and rates are measured anew at each start.
"""


class HeadPlace(StrEnum):
    """Where the output projection is computed."""

    GPU = "gpu"  # resident
    STREAMED = "streamed"  # on the GPU, its rows in blocks through the slots of streamed layers
    SPLIT = "split"  # its first rows so, the others on the CPU at the same time
    CPU = "cpu"  # where its bytes lie, while the next pass's first weights are on their way


class KvPlace(StrEnum):
    """Where the KV cache lies."""

    GPU = "gpu"
    HOST = "host"


@dataclass(frozen=True, slots=True)
class Demand:
    """What a model needs, in bytes, as it would lie in the arena.

    segment_bytes: per layer the bytes of its segments, in order of use. vector_bytes: all small vectors. head_bytes:
    the output projection. workspace_bytes: activations, batch arrays, states, logits. kv_context_bytes: the KV cache of
    the context the user asked for. kv_buffer_bytes: one buffer for a run of KV tiles. head_rows, head_pitches: rows of
    the output projection and, for each of its planes, bytes of a row. state_bytes: the recurrent state of all
    sequences.
    """

    segment_bytes: tuple[tuple[int, ...], ...]
    vector_bytes: int
    head_bytes: int
    workspace_bytes: int
    kv_context_bytes: int
    kv_buffer_bytes: int
    head_rows: int
    head_pitches: tuple[int, ...]
    state_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the user asked for; None leaves it to the planner.

    budget_bytes: the arena's limit. resident_layers: -1 all, 0 none, n spread evenly. slots: at least 2.
    """

    budget_bytes: int
    resident_layers: int | None = None
    slots: int | None = None
    kv_offload: bool | None = None
    head: HeadPlace | None = None


@dataclass(frozen=True, slots=True)
class Rates:
    """Bytes per second: of copies from page-locked memory to the GPU, and at which the CPU reads the output
    projection's weights while it makes logits for all sequences of a pass beside such copies.
    """

    bus: float
    host_head: float


UNMEASURED = Rates(bus=25e9, host_head=1e9)
"""Where nothing was measured, the output projection goes to the CPU only where no other place fits, or where slots hide
it in any case.
"""


@dataclass(frozen=True, slots=True)
class RingCost:
    """The host refuses to page-lock `unlocked_bytes` of weights: they go through a locked ring of `ring_bytes`.

    bus_share: the speed of that over the bus's, as measured; None when nothing is streamed (only loading is slower).
    """

    unlocked_bytes: int
    ring_bytes: int
    bus_share: float | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `resident[layer]`; `unit_layers`: a slot holds a whole layer, else one segment; slot_bytes of each of
    `slots` slots (0 slots when all is resident). streamed_bytes: weights that each pass moves over the bus, those of
    an output projection among them. head_streamed_rows: its first rows that are streamed, all, some or none;
    head_block_rows: of these, rows in a slot. rates: what was measured to choose its place, where that was done;
    unmeasured: why it could not be, where it should have been. ring: known once the weights are opened.
    """

    resident: tuple[bool, ...]
    slots: int
    unit_layers: bool
    slot_bytes: int
    head: HeadPlace
    kv: KvPlace
    ledger: tuple[tuple[str, int], ...]
    streamed_bytes: int
    head_streamed_rows: int = 0
    head_block_rows: int = 0
    rates: Rates | None = None
    unmeasured: str = ""
    ring: RingCost | None = None

    @property
    def arena_bytes(self) -> int:
        """Bytes of the arena: the sum of the ledger."""
        return sum(nbytes for _, nbytes in self.ledger)


def spread(layers: int, resident: int) -> tuple[bool, ...]:
    """`resident` of `layers` layers chosen as evenly as can be, so that copies are hidden under all of them."""
    return tuple((index + 1) * resident // layers > index * resident // layers for index in range(layers))


def make_plan(demand: Demand, wishes: Wishes, rates: Rates = UNMEASURED) -> Plan:
    """Of the plans that fit the budget and the wishes, the one whose decoded token takes the least time on the buses;
    of equals, the one whose slots keep the bus busy between tokens, then the one with the smallest arena, and of these
    the one whose output projection is on the GPU.

    Raises CapacityError naming the smallest budget that would do and the options that reach it; UsageError for wishes
    that make no sense.
    """
    _check(wishes, len(demand.segment_bytes))
    plans = _plans(demand, wishes, rates)
    fitting = [plan for plan in plans if plan.arena_bytes <= wishes.budget_bytes]
    if fitting:
        return min(fitting, key=lambda plan: (*_token_seconds(demand, plan, rates), plan.arena_bytes))
    least, smallest = min(plan.arena_bytes for plan in plans), smallest_plan(demand)
    raise CapacityError(
        f"this needs at least {_mib(least)} MiB of GPU memory as asked; the budget (--vram) is "
        f"{_mib(wishes.budget_bytes, up=False)} MiB. The least that would do is {_mib(smallest.arena_bytes)} MiB, "
        f"with {_options(smallest)}"
    )


def smallest_plan(demand: Demand) -> Plan:
    """The plan with the smallest arena. As a rule all layers are streamed by segments, the KV cache is on the host and
    lm_head on the CPU; but a short context's KV cache can be smaller than two buffers, and one layer than two slots.
    """
    plans = _plans(demand, Wishes(0), UNMEASURED)
    return min(plans, key=lambda plan: (plan.arena_bytes, *_token_seconds(demand, plan, UNMEASURED)))


def _plans(demand: Demand, wishes: Wishes, rates: Rates) -> list[Plan]:
    """All plans that the wishes allow, whatever their size."""
    kv_places: tuple[KvPlace, ...] = (KvPlace.GPU, KvPlace.HOST)
    if wishes.kv_offload is not None:
        kv_places = (KvPlace.HOST,) if wishes.kv_offload else (KvPlace.GPU,)
    heads = tuple(HeadPlace) if wishes.head is None else (wishes.head,)
    if wishes.head is None and rates is UNMEASURED:  # nothing says where to split
        heads = tuple(place for place in heads if place is not HeadPlace.SPLIT)
    return [
        _plan(demand, resident, slots, unit_layers, head, kv, rates)
        for kv in kv_places
        for head in heads
        for resident, slots, unit_layers in _weight_choices(demand, wishes)
    ]


def _options(plan: Plan) -> str:
    """The options that ask for this placement."""
    resident = -1 if all(plan.resident) else sum(plan.resident)
    slots = f" --slots {plan.slots}" if plan.slots else ""
    kv = "--kv-offload" if plan.kv is KvPlace.HOST else "--no-kv-offload"
    return f"--resident-layers {resident}{slots} {kv} --lm-head {plan.head}"


def _check(wishes: Wishes, layers: int) -> None:
    if wishes.resident_layers is not None and not -1 <= wishes.resident_layers <= layers:
        raise UsageError(
            f"resident_layers is {wishes.resident_layers}; allowed (--resident-layers): -1 (all), or 0 to {layers}, "
            "this model's layers"
        )
    if wishes.slots is not None and wishes.slots < MINIMUM_SLOTS:
        raise UsageError(
            f"slots is {wishes.slots}; streaming needs (--slots) {MINIMUM_SLOTS} or more: one is filled, one is used"
        )


def _weight_choices(demand: Demand, wishes: Wishes) -> list[tuple[int, int, bool]]:
    """(resident layers, slots, whole layers in a slot) that the wishes allow."""
    layers = len(demand.segment_bytes)
    counts = range(layers + 1)
    if wishes.resident_layers is not None:
        counts = (
            range(layers, layers + 1)
            if wishes.resident_layers == -1
            else range(wishes.resident_layers, wishes.resident_layers + 1)
        )
    slots = MINIMUM_SLOTS if wishes.slots is None else wishes.slots
    choices: list[tuple[int, int, bool]] = []
    for count in counts:
        if count == layers:
            choices.append((count, slots, True))
        else:
            choices += [(count, slots, True), (count, slots, False)]
    return choices


def _plan(
    demand: Demand,
    resident_count: int,
    slots: int,
    unit_layers: bool,
    head: HeadPlace,
    kv: KvPlace,
    rates: Rates = UNMEASURED,
) -> Plan:
    resident = spread(len(demand.segment_bytes), resident_count)
    streamed = [segments for segments, stays in zip(demand.segment_bytes, resident, strict=True) if not stays]
    units = [sum(segments) for segments in streamed] if unit_layers else [size for layer in streamed for size in layer]
    streamed_rows = block_rows = 0
    if head in (HeadPlace.STREAMED, HeadPlace.SPLIT):
        room = max(units, default=min(HEAD_BLOCK_BYTES, head_block_bytes(demand.head_rows, demand.head_pitches)))
        streamed_rows = demand.head_rows
        if head is HeadPlace.SPLIT:
            ahead = min(slots * room, sum(map(sum, streamed)))
            streamed_rows = _head_rows_of_the_bus(demand, ahead, rates)
            head = HeadPlace.SPLIT if streamed_rows < demand.head_rows else HeadPlace.STREAMED  # too few to split
        block_rows = _head_block_rows(streamed_rows, demand.head_pitches, room)
        units.append(head_block_bytes(block_rows, demand.head_pitches))
    slots = slots if units else 0
    slot_bytes = round_up(max(units, default=0), ALIGNMENT)
    resident_bytes = sum(sum(segments) for segments, stays in zip(demand.segment_bytes, resident, strict=True) if stays)
    ledger = (
        (f"weights of {resident_count} resident layers", resident_bytes),
        (f"{slots} slots for {_streamed_parts(len(streamed), head)}", slots * slot_bytes),
        ("norms and biases", demand.vector_bytes),
        ("output projection", demand.head_bytes if head is HeadPlace.GPU else 0),
        ("KV cache", demand.kv_context_bytes if kv is KvPlace.GPU else 2 * demand.kv_buffer_bytes),
        ("recurrent state", demand.state_bytes),
        ("workspace", demand.workspace_bytes),
    )
    aligned = tuple((label, round_up(nbytes, ALIGNMENT)) for label, nbytes in ledger)
    streamed_bytes = sum(map(sum, streamed)) + _head_bytes(demand, streamed_rows)
    return Plan(resident, slots, unit_layers, slot_bytes, head, kv, aligned, streamed_bytes, streamed_rows, block_rows)


def head_block_bytes(rows: int, pitches: Sequence[int]) -> int:
    """Bytes of `rows` rows of a matrix whose planes have these pitches, each plane 256-aligned."""
    return sum(round_up(rows * pitch, ALIGNMENT) for pitch in pitches)


def _head_bytes(demand: Demand, rows: int) -> int:
    """Bytes of the first `rows` rows of the output projection; of all of them, the padding too."""
    return demand.head_bytes if rows == demand.head_rows else rows * sum(demand.head_pitches)


def _head_rows_of_the_bus(demand: Demand, ahead_bytes: int, rates: Rates) -> int:
    """Rows of a split output projection that are streamed, HEAD_ROW_STEP at least, and where there are more, one at
    least left to the CPU. From reading these to the next token's first layer the bus brings the others, and then the
    next token's first weights, `ahead_bytes`, to the slots: f H / bus + ahead / bus = (1 - f) H / CPU + border.
    """
    head = demand.head_rows * sum(demand.head_pitches)
    on_the_cpu, on_the_bus = head / rates.host_head, head / rates.bus
    share = (on_the_cpu + BORDER_SECONDS - ahead_bytes / rates.bus) / (on_the_cpu + on_the_bus)
    steps = math.ceil(share * demand.head_rows / HEAD_ROW_STEP)
    most = max((demand.head_rows - 1) // HEAD_ROW_STEP, 1)
    return min(max(1, min(steps, most)) * HEAD_ROW_STEP, demand.head_rows)


def _head_block_rows(rows: int, pitches: Sequence[int], room: int) -> int:
    """Of `rows` rows of the output projection those in a slot of `room` bytes, HEAD_ROW_STEP at least: as few blocks as
    can be, of about one size.
    """
    if head_block_bytes(rows, pitches) <= room:
        return rows
    most = (room - ALIGNMENT * len(pitches)) // sum(pitches) // HEAD_ROW_STEP * HEAD_ROW_STEP
    blocks = math.ceil(rows / max(most, HEAD_ROW_STEP))
    return min(rows, round_up(math.ceil(rows / blocks), HEAD_ROW_STEP))


def _streamed_parts(layers: int, head: HeadPlace) -> str:
    """What passes through the slots."""
    of_head = {HeadPlace.STREAMED: "the streamed output projection", HeadPlace.SPLIT: "a part of the output projection"}
    parts = [f"{layers} streamed layers"] if layers or head not in of_head else []
    return " and ".join([*parts, of_head[head]] if head in of_head else parts)


def _token_seconds(demand: Demand, plan: Plan, rates: Rates) -> tuple[float, float]:
    """What a decoded token takes: (on the buses, what they wait at the border between tokens, to a tenth of a
    millisecond).

    On the bus are streamed weights, and half of the context's KV cache on average when it is offloaded. What the CPU
    does of an output projection holds up the next token for the time in which its bytes are read there, less the time
    in which the rows of a split one are brought, and the slots filled with the next token's first weights meanwhile:
    until it ends, and the border after it, no slot becomes free.
    """
    kv = demand.kv_context_bytes // 2 if plan.kv is KvPlace.HOST else 0
    moved = (plan.streamed_bytes + kv) / rates.bus
    ahead = min(plan.slots * plan.slot_bytes, plan.streamed_bytes) / rates.bus
    if plan.head not in (HeadPlace.CPU, HeadPlace.SPLIT):
        return moved, round(max(0.0, BORDER_SECONDS - ahead), 4)
    streamed = _head_bytes(demand, plan.head_streamed_rows)
    held_up = max(0.0, (demand.head_bytes - streamed) / rates.host_head - streamed / rates.bus) + BORDER_SECONDS
    return (moved + max(0.0, held_up - ahead)) * HOST_HEAD_MARGIN, 0.0


def _mib(nbytes: int, up: bool = True) -> str:
    """Mebibytes with two decimals, rounded so that the number, given back as a budget, is enough."""
    hundredths = nbytes * 100 / 2**20
    return f"{(math.ceil(hundredths) if up else math.floor(hundredths)) / 100:.2f}"
