"""Copies to the GPU from host memory that cannot be page-locked: through a few locked pieces, filled by turns."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable

from edge_transformer.cuda.runtime import Event, Gpu, Stream

RING_PIECES = 4
RING_PIECE_BYTES = 8 << 20


class _Piece:
    """One piece. Its copies have a stream of their own, so that the host can wait for this piece alone."""

    def __init__(self, gpu: Gpu, number: int, address: int) -> None:
        self.address = address
        self.stream: Stream = gpu.stream(f"weight ring {number}")
        self.sent: Event = gpu.event()


class LockedRing:
    """`pieces` of `piece_bytes` page-locked bytes. Raises CapacityError when the host refuses even these."""

    def __init__(self, gpu: Gpu, pieces: int = RING_PIECES, piece_bytes: int = RING_PIECE_BYTES) -> None:
        self.nbytes = pieces * piece_bytes
        self._gpu = gpu
        self._piece_bytes = piece_bytes
        self._memory = gpu.allocate_host(self.nbytes, "ring for weights that cannot be page-locked")
        self._pieces = [_Piece(gpu, number, self._memory.address + number * piece_bytes) for number in range(pieces)]
        for number, piece in enumerate(self._pieces):
            gpu.declare_block(piece.address, piece_bytes, f"weight ring {number}")
        self._turn = 0
        self._begun = gpu.event()

    def copy(self, destination: int, source: int, nbytes: int, stream: Stream) -> None:
        """Copy after what has been queued on `stream`, before what will be. `source` has been read on return."""
        self._gpu.record(self._begun, stream)
        for start in range(0, nbytes, self._piece_bytes):
            piece = self._pieces[self._turn]
            self._turn = (self._turn + 1) % len(self._pieces)
            size = min(self._piece_bytes, nbytes - start)
            self._gpu.synchronize(piece.stream)  # what the piece held has been sent
            ctypes.memmove(piece.address, source + start, size)
            self._gpu.wait(piece.stream, self._begun)
            try:
                self._gpu.copy(destination + start, piece.address, size, piece.stream)
                self._gpu.record(piece.sent, piece.stream)
                self._gpu.wait(stream, piece.sent)
            except BaseException:  # whoever writes to the destination next cannot know of this copy
                self._gpu.synchronize(piece.stream)
                raise

    def share_of_bus(self, destination: int, ranges: Iterable[tuple[int, int]], stream: Stream) -> float:
        """Bytes per second through the ring over those of copies from locked memory, at most 1, as measured by moving
        the (address, bytes) of `ranges`, one after the other, to `destination`, which nothing may be using.
        """
        parts = list(ranges)
        start = 0.0
        for _ in range(2):  # the first time is that of the disk, for pages of a file
            self._gpu.synchronize()
            start = time.perf_counter()
            for address, nbytes in parts:
                self.copy(destination, address, nbytes, stream)
            self._gpu.synchronize(stream)
        through = time.perf_counter()
        for _, nbytes in parts:
            for offset in range(0, nbytes, self._piece_bytes):
                self._gpu.copy(destination, self._memory.address, min(self._piece_bytes, nbytes - offset), stream)
        self._gpu.synchronize(stream)
        return min(1.0, (time.perf_counter() - through) / max(through - start, 1e-9))

    def close(self) -> None:
        """Wait for copies under way and give the memory back."""
        self._gpu.synchronize()
        self._memory.close()
