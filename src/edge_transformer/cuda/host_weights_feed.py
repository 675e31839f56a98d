"""Weights on their way from host memory to the GPU: straight from page-locked memory, or through a ring."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack

from edge_transformer.cuda.locked_ring import LockedRing
from edge_transformer.cuda.runtime import Gpu, Stream
from edge_transformer.cuda.weight_slots import HostRange
from edge_transformer.placement.plan import RingCost


def page_locking_is_refused(gpu: Gpu, ranges: Iterable[tuple[int, int, bool]]) -> bool:
    """Whether the first page of one of `ranges`, (address, bytes, read only), cannot be page-locked: told before all
    is, which takes long.
    """
    for address, _, read_only in ranges:
        registration = gpu.register_host(address, 1, read_only)
        if registration is None:
            return True
        with registration:
            pass
    return False


class HostWeightsFeed:
    """Page-locks `ranges`, (address, bytes, read only); for what the host refuses there is a locked ring.

    Raises CapacityError when the host refuses the ring too.
    """

    def __init__(self, gpu: Gpu, ranges: Iterable[tuple[int, int, bool]]) -> None:
        self._gpu = gpu
        self._registrations = ExitStack()
        self._locked: list[tuple[int, int]] = []
        self._unlocked_bytes = 0
        for address, nbytes, read_only in ranges:
            registration = gpu.register_host(address, nbytes, read_only)
            if registration is None:
                self._unlocked_bytes += nbytes
            else:
                self._registrations.enter_context(registration)
                self._locked.append((address, address + nbytes))
        self._ring: LockedRing | None = None
        if self._unlocked_bytes:
            with self._registrations.pop_all() as opened:
                self._ring = LockedRing(gpu)
                self._registrations = opened.pop_all()

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy weights after what has been queued on `stream`, before what will be."""
        if self._ring is None or any(start <= source and source + nbytes <= end for start, end in self._locked):
            self._gpu.copy(destination, source, nbytes, stream)
        else:
            self._ring.copy(destination, source, nbytes, stream)

    def cost(self, slot: int, unit: Sequence[HostRange], copies: Stream) -> RingCost | None:
        """What the ring costs, None where there is none. Measured by moving `unit`, if any, to the unused `slot`."""
        if self._ring is None:
            return None
        share = None
        if unit:
            share = self._ring.share_of_bus(slot, ((part.address, part.nbytes) for part in unit), copies)
        return RingCost(self._unlocked_bytes, self._ring.nbytes, share)

    def close(self) -> None:
        """Unlock the host memory. No copy may be under way."""
        with self._registrations:
            if self._ring is not None:
                self._ring.close()
