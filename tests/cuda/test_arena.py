"""The arena: aligned blocks, a ledger, and never a byte more."""

from __future__ import annotations

import pytest

from edge_transformer.cuda.arena import Arena, padded
from edge_transformer.errors import CapacityError
from emulator import EmulatedGpu, RaceError


def test_blocks_are_aligned_apart_and_counted() -> None:
    gpu = EmulatedGpu(seed=1, total_bytes=10_000)
    arena = Arena(gpu, 4096)
    sizes = [1, 255, 256, 257, 1000]
    addresses = [arena.take(size, f"block {size}") for size in sizes]
    assert all(address % 256 == 0 for address in addresses)
    for (start, size), following in zip(zip(addresses, sizes, strict=True), [*addresses[1:], None], strict=True):
        assert following is None or start + size <= following
    assert arena.ledger == [(f"block {size}", padded(size)) for size in sizes]
    assert arena.used == sum(taken for _, taken in arena.ledger) == 256 * (1 + 1 + 1 + 2 + 4)
    assert arena.address == addresses[0]
    assert gpu.memory_info()[0] == 10_000 - 4096


def test_it_can_be_filled_to_the_last_byte_and_not_beyond() -> None:
    arena = Arena(EmulatedGpu(seed=1), 1024)
    arena.take(512, "slots")
    arena.take(256, "state")
    with pytest.raises(CapacityError) as raised:
        arena.take(257, "workspace")
    for part in ("workspace: 257 bytes", "256 left of the 1024", "--vram", "slots (512 bytes), state (256 bytes)"):
        assert part in str(raised.value)
    arena.take(256, "rest")
    with pytest.raises(CapacityError, match="0 left"):
        arena.take(1, "one more")
    with pytest.raises(ValueError, match="nothing: 0 bytes"):
        arena.take(0, "nothing")


def test_more_than_the_gpu_has() -> None:
    gpu = EmulatedGpu(seed=1, total_bytes=1000)
    with pytest.raises(CapacityError, match="arena: 1001 bytes"):
        Arena(gpu, 1001)
    assert gpu.open_memory() == []


def test_closing_gives_it_back() -> None:
    gpu = EmulatedGpu(seed=1, total_bytes=1000)
    arena = Arena(gpu, 1000)
    arena.close()
    arena.close()
    assert gpu.memory_info() == (1000, 1000)


def test_blocks_have_names_in_errors() -> None:
    gpu = EmulatedGpu(seed=1)
    arena = Arena(gpu, 1024)
    slot = arena.take(300, "slot 0")
    gpu.fill(slot, 300, 1, gpu.stream("one"))
    with pytest.raises(RaceError, match="'slot 0'"):
        gpu.fill(slot + 299, 1, 1, gpu.stream("two"))
