"""The recurrent state of one sequence: what its gated-delta layers remember, and checkpoints to go back to.

A state cannot be cut to fewer tokens as a KV cache can. So copies of it are kept on the host: in a prompt at multiples
of CHECKPOINT_BORDER, from which it is computed in the same pieces as one that was never interrupted, and gives the same
bits; and where a conversation's next prompt begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.kv import Allocation, HostTileMemory, StateMemory
from edge_transformer.ops.backend import DeltaShape
from edge_transformer.ops.batch import DELTA_CHUNK_POSITIONS

CHECKPOINT_BORDER = DELTA_CHUNK_POSITIONS
"""Prompts restart at multiples of this. Position 0, where the state is zero, always counts as a checkpoint."""

CHECKPOINT_SPACING = 512
"""A checkpoint is made at the first border so many tokens after the one before."""

CHECKPOINT_BUDGET_BYTES = 512 << 20
"""What the checkpoints of a sequence may take; one is kept however large it is."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The gated-delta layers of a model, in order, and where sequences keep their state. A sequence's blocks lie one
    behind the other in one allocation.
    """

    layers: tuple[DeltaShape, ...]
    memory: StateMemory
    budget_bytes: int = CHECKPOINT_BUDGET_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of a sequence's state."""
        return sum(layer.block_bytes for layer in self.layers)

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """int64 [layers]: where each layer's block begins."""
        sizes = [layer.block_bytes for layer in self.layers]
        return np.cumsum([0, *sizes[:-1]], dtype=np.int64)


def recurrent_shape(layers: Sequence[DeltaShape], memory: StateMemory | None) -> RecurrentShape | None:
    """None for a model without gated-delta layers; `memory` None: ordinary host memory."""
    return RecurrentShape(tuple(layers), HostTileMemory() if memory is None else memory) if layers else None


class RecurrentState:
    """The blocks of one sequence and its checkpoints. Not safe for use by two threads at once."""

    def __init__(self, shape: RecurrentShape) -> None:
        self.shape = shape
        self.checkpoints: dict[int, Bytes] = {}
        self._allocation: Allocation | None = None
        self._offsets = shape.offsets
        # What the blocks are to hold before they are used again: going back needs no work of the executor, which may
        # just have failed.
        self._pending: Bytes | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks and of the checkpoints."""
        blocks = 0 if self._allocation is None else self.shape.nbytes
        return blocks + len(self.checkpoints) * self.shape.nbytes

    def prepare(self) -> None:
        """Have the blocks in place for a pass. Raises CapacityError when the memory is refused."""
        if self._allocation is None:
            self._allocation = self.shape.memory.allocate(self.shape.nbytes)
        if self._pending is not None:
            self.shape.memory.write(self._allocation.address, self._pending)
            self._pending = None

    def addresses(self) -> npt.NDArray[np.int64]:
        """int64 [layers]: each layer's block. Raises ValueError before `prepare`."""
        if self._allocation is None:
            raise ValueError("the blocks of recurrent state have not been prepared")
        return self._offsets + self._allocation.address

    def read(self) -> Bytes:
        """A copy of all blocks on the host."""
        if self._pending is not None:
            return self._pending.copy()
        if self._allocation is None:
            return np.zeros(self.shape.nbytes, np.uint8)
        return self.shape.memory.read(self._allocation.address, self.shape.nbytes)

    def write(self, data: Bytes) -> None:
        """Replace all blocks. Raises ValueError when the size is another."""
        if data.shape != (self.shape.nbytes,):
            raise ValueError(f"a state of {self.shape.nbytes} bytes was expected, got {data.shape}")
        self._pending = data

    def due(self, position: int) -> bool:
        """Whether a state at `position` should become a checkpoint without anybody asking."""
        newest = max(self.checkpoints, default=0)
        return position % CHECKPOINT_BORDER == 0 and position - newest >= CHECKPOINT_SPACING

    def keep(self, position: int) -> None:
        """Make the state, which is that after `position` tokens, a checkpoint; others give way when the budget is
        used up.
        """
        if position == 0 or position in self.checkpoints:
            return
        self.checkpoints[position] = self.read()
        while len(self.checkpoints) > max(1, self.shape.budget_bytes // self.shape.nbytes):
            del self.checkpoints[_least_missed(sorted(self.checkpoints))]

    def nearest(self, length: int) -> list[int]:
        """Positions of checkpoints that are at most `length`, the nearest first; 0 is the last."""
        return [*sorted((p for p in self.checkpoints if 0 < p <= length), reverse=True), 0]

    def restore(self, position: int) -> None:
        """Go back to the checkpoint at `position` (0: the beginning). Later ones are dropped."""
        self._pending = self.checkpoints[position] if position else None
        self.checkpoints = {at: state for at, state in self.checkpoints.items() if at <= position}

    def fork(self) -> RecurrentState:
        """A second state with the same past. Checkpoints are shared; nobody writes into them."""
        other = RecurrentState(self.shape)
        other.checkpoints = dict(self.checkpoints)
        other._pending = self._pending
        if self._pending is None and self._allocation is not None:
            other._allocation = self.shape.memory.allocate(self.shape.nbytes)
            self.shape.memory.copy(other._allocation.address, self._allocation.address, self.shape.nbytes)
        return other

    def release(self) -> None:
        """Give the blocks back until `prepare`; what they hold is kept on the host, as checkpoints are."""
        if self._allocation is not None:
            self._pending = self.read()
            self._allocation.close()
            self._allocation = None

    def close(self) -> None:
        """Give the blocks and the checkpoints back."""
        allocation, self._allocation = self._allocation, None
        self._pending = None
        self.checkpoints = {}
        if allocation is not None:
            allocation.close()


def _least_missed(positions: list[int]) -> int:
    """Of checkpoints in ascending order the one without which the widest gap stays narrowest; never the newest."""
    around = [0, *positions]
    gaps = {around[index]: around[index + 1] - around[index - 1] for index in range(1, len(around) - 1)}
    return min(gaps, key=lambda position: (gaps[position], position))
