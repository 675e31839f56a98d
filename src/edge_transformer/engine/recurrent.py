"""The recurrent state of one sequence: what its gated-delta layers remember, and checkpoints to go back to.

A state cannot be cut to fewer tokens as a KV cache can. So copies of it are kept on the host: in a prompt at multiples
of CHECKPOINT_BORDER, from which it is computed in the same pieces as one that was never interrupted, and gives the same
bits; and where a conversation's next prompt begins. Those of a prompt are made by its passes on the way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.kv import Allocation, HostTileMemory, Landing, RecurrentMemory
from edge_transformer.formats.weight import round_up
from edge_transformer.ops.backend import DeltaShape
from edge_transformer.ops.batch import DELTA_CHUNK_POSITIONS

CHECKPOINT_BORDER = DELTA_CHUNK_POSITIONS
"""Prompts restart at multiples of this. Position 0, where the state is zero, always counts as a checkpoint."""

CHECKPOINT_SPACING = 512
"""A checkpoint is made at the first border so many tokens after the one before."""

PASS_CHECKPOINTS = 4
"""In a long pass checkpoints are wider apart, so that they are about so many: each costs kernels and a copy a layer."""

CHECKPOINT_BUDGET_BYTES = 512 << 20
"""What the checkpoints of a sequence may take; one is kept however large it is."""

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The gated-delta layers of a model, in order, and where sequences keep their state. A sequence's blocks lie one
    behind the other in one allocation.
    """

    layers: tuple[DeltaShape, ...]
    memory: RecurrentMemory
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

    @property
    def most_checkpoints(self) -> int:
        """Of a sequence."""
        return max(1, self.budget_bytes // self.nbytes)


def recurrent_shape(layers: Sequence[DeltaShape], memory: RecurrentMemory | None) -> RecurrentShape | None:
    """None for a model without gated-delta layers; `memory` None: ordinary host memory."""
    return (
        RecurrentShape(tuple(layers), HostTileMemory("recurrent state") if memory is None else memory)
        if layers
        else None
    )


class RecurrentState:
    """The blocks of one sequence and its checkpoints. Not safe for use by two threads at once."""

    def __init__(self, shape: RecurrentShape) -> None:
        self.shape = shape
        self._checkpoints: dict[int, Bytes] = {}
        # Copies that the pass at hand is to make, and those that the newest passes have made when they have ended.
        self._expected: dict[int, Landing] = {}
        self._landed: dict[int, Landing] = {}
        self._allocation: Allocation | None = None
        self._offsets = shape.offsets
        # What the blocks are to hold before they are used again: going back needs no work of the executor, which may
        # just have failed.
        self._pending: Bytes | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes of the blocks and of the checkpoints."""
        blocks = 0 if self._allocation is None else self.shape.nbytes
        return blocks + len(self.positions) * self.shape.nbytes

    @property
    def positions(self) -> list[int]:
        """Where there are checkpoints, in ascending order."""
        return sorted([*self._checkpoints, *self._landed])

    @property
    def checkpoints(self) -> dict[int, Bytes]:
        """The state on the host after so many tokens. Waits for passes that have not ended."""
        self._arrive()
        return self._checkpoints

    def prepare(self) -> None:
        """Have the blocks in place for a pass. Raises CapacityError when the memory is refused."""
        self._expected = {}  # of a pass that was not begun
        if self._landed:
            self._arrive()
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
        newest = max(self.positions, default=0)
        return position % CHECKPOINT_BORDER == 0 and position - newest >= CHECKPOINT_SPACING

    def expect(self, start: int, stop: int, asked: int | None) -> list[tuple[int, npt.NDArray[np.int64]]]:
        """Checkpoints that a pass of the prompt's tokens [start, stop) is to make: those that are due, and `asked`
        where it is a border that the pass reaches. For each its position and, int64 [layers], where the layers' blocks
        are to go. Raises CapacityError when the host refuses the memory.
        """
        spacing = max(CHECKPOINT_SPACING, round_up(-(-(stop - start) // PASS_CHECKPOINTS), CHECKPOINT_BORDER))
        first = max(max(self.positions, default=0) + spacing, start + 1)
        wanted = set(range(round_up(first, CHECKPOINT_BORDER), stop + 1, spacing))
        if asked is not None and asked % CHECKPOINT_BORDER == 0 and start < asked <= stop:
            wanted.add(asked)
        kept = self._within_budget([*self.positions, *wanted])
        self._expected = {at: self.shape.memory.landing(self.shape.nbytes) for at in kept if at in wanted}
        return [(at, self._offsets + landing.address) for at, landing in self._expected.items()]

    def commit(self) -> None:
        """The pass at hand has been queued to its end: the copies it makes are checkpoints."""
        if self._expected:
            self.shape.memory.have_landings(self.shape.nbytes, len(self._expected))  # the executor is still at work
            self._landed |= self._expected
            self._expected = {}
            self._drop_but(self._within_budget(self.positions))

    def keep(self, position: int) -> None:
        """Make the state, which is that after `position` tokens, a checkpoint; others give way when the budget is
        used up.
        """
        if position == 0 or position in self.positions:
            return
        self._checkpoints[position] = self.read()
        self._drop_but(self._within_budget(self.positions))

    def nearest(self, length: int) -> list[int]:
        """Positions of checkpoints that are at most `length`, the nearest first; 0 is the last."""
        return [*(p for p in reversed(self.positions) if p <= length), 0]

    def restore(self, position: int) -> None:
        """Go back to the checkpoint at `position` (0: the beginning). Later ones are dropped, and so are those of a
        pass that has not come to its end.
        """
        self._expected = {}
        self._drop_but([at for at in self.positions if at <= position])
        self._pending = self.checkpoints[position] if position else None

    def fork(self) -> RecurrentState:
        """A second state with the same past. Checkpoints are shared; nobody writes into them."""
        other = RecurrentState(self.shape)
        other._checkpoints = dict(self.checkpoints)
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
        self._checkpoints, self._landed, self._expected = {}, {}, {}
        if allocation is not None:
            allocation.close()

    def _arrive(self) -> None:
        for position in list(self._landed):
            self._checkpoints[position] = self._landed[position].take()
            del self._landed[position]

    def _within_budget(self, positions: Sequence[int]) -> list[int]:
        """Those of `positions` that are to be kept, in ascending order."""
        kept = sorted(positions)
        while len(kept) > self.shape.most_checkpoints:
            kept.remove(_least_missed(kept))
        return kept

    def _drop_but(self, kept: Sequence[int]) -> None:
        """Drop all checkpoints but those at `kept`."""
        self._checkpoints = {at: state for at, state in self._checkpoints.items() if at in kept}
        self._landed = {at: landing for at, landing in self._landed.items() if at in kept}


def _least_missed(positions: list[int]) -> int:
    """Of checkpoints in ascending order the one without which the widest gap stays narrowest; never the newest."""
    around = [0, *positions]
    gaps = {around[index]: around[index + 1] - around[index - 1] for index in range(1, len(around) - 1)}
    return min(gaps, key=lambda position: (gaps[position], position))
