"""Weights of streamed layers: slots filled by the copy stream, emptied by the compute stream, ahead of their use.

Each slot goes FREE -> FILLING -> READY -> IN_USE -> FREE. Both dependencies are always expressed: the copy stream waits
for a slot's `freed` event before it writes, the compute stream waits for its `filled` event before it reads. Slots are
filled in the order of use and round again at the last layer, so the first units of the next pass are on their way while
this one ends. Which slot a unit meets changes no result.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from edge_transformer.cuda.runtime import Event, Gpu, Stream


class SlotState(Enum):
    """What a slot is in. FILLING and READY differ for the GPU only: the `filled` event tells them apart."""

    FREE = "free"
    FILLING = "filling"
    IN_USE = "in use"


@dataclass(frozen=True, slots=True)
class HostRange:
    """Consecutive bytes of a unit: host address, bytes, offset in the slot."""

    address: int
    nbytes: int
    slot_offset: int


class Feed(Protocol):
    """What brings bytes of host memory to a slot."""

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None: ...


class Slot:
    """One buffer for one unit of weights."""

    def __init__(self, gpu: Gpu, address: int) -> None:
        self.address = address
        self.state = SlotState.FREE
        self.unit = -1
        self.filled: Event = gpu.event()
        self.freed: Event = gpu.event()


class WeightSlots:
    """`units` of weights, used in cyclic order, streamed through slots at `addresses` (at least two)."""

    def __init__(
        self,
        gpu: Gpu,
        feed: Feed,
        compute: Stream,
        copies: Stream,
        addresses: Sequence[int],
        units: Sequence[Sequence[HostRange]],
    ) -> None:
        if len(addresses) < 2:
            raise ValueError(f"{len(addresses)} slots; streaming needs two or more")
        self._gpu = gpu
        self._feed = feed
        self._compute = compute
        self._copies = copies
        self._units = units
        self._slots = [Slot(gpu, address) for address in addresses]
        for slot in self._slots:
            gpu.record(slot.freed, compute)
        self._ahead: deque[Slot] = deque()  # filled or being filled, in order of use
        self._next_unit = 0
        self._interrupted = False  # in the middle of a call: what a KeyboardInterrupt left is not relied on

    def acquire(self, unit: int) -> Slot:
        """The slot that holds `unit`, ready for what is queued on the compute stream from now on."""
        if self._interrupted or not self._ahead or self._ahead[0].unit != unit:
            self._start_from(unit)
        self._interrupted = True
        slot = self._ahead.popleft()
        self._gpu.wait(self._compute, slot.filled)
        slot.state = SlotState.IN_USE
        self._interrupted = False
        return slot

    def release(self, slot: Slot) -> None:
        """What has been queued on the compute stream is the last that reads the slot: fill it with the next unit.

        A slot that was taken back meanwhile, by another start, is left alone.
        """
        if slot.state is not SlotState.IN_USE:
            return
        self._interrupted = True
        self._gpu.record(slot.freed, self._compute)
        slot.state = SlotState.FREE
        self._fill(slot)
        self._interrupted = False

    def _start_from(self, unit: int) -> None:
        """A first pass, or one after a pass given up: drop what was fetched ahead, take back what is in use."""
        self._interrupted = True
        self._ahead.clear()
        self._next_unit = unit
        for slot in self._slots:
            if slot.state is SlotState.IN_USE:
                self._gpu.record(slot.freed, self._compute)
                slot.state = SlotState.FREE
            self._fill(slot)
        self._interrupted = False

    def _fill(self, slot: Slot) -> None:
        slot.state = SlotState.FILLING
        slot.unit = self._next_unit
        self._gpu.wait(self._copies, slot.freed)
        for part in self._units[slot.unit]:
            self._feed.copy(slot.address + part.slot_offset, part.address, part.nbytes, self._copies)
        self._gpu.record(slot.filled, self._copies)
        self._next_unit = (self._next_unit + 1) % len(self._units)
        self._ahead.append(slot)
