"""Where the matrices of a unit lie in a slot: every byte of each, aligned, in as few copies as host memory allows."""

from __future__ import annotations

import numpy as np
import pytest

from edge_transformer.cuda.weights import slot_layout
from edge_transformer.formats.weight import PLANE_ALIGNMENT, Weight, WeightFormat, in_place_layout, round_up


def matrices(sizes: list[tuple[int, int]], first: int, owner: object = None) -> list[Weight]:
    """F32 matrices in a file, `owner`, of `rows` rows of 16 numbers, each `gap` bytes after the one before."""
    found, address = [], first
    for rows, gap in sizes:
        address += gap
        layout = in_place_layout(WeightFormat.F32, rows, 16)
        assert layout is not None
        found.append(Weight(layout, address, owner))
        address += layout.nbytes
    return found


@pytest.mark.parametrize("seed", range(20))
def test_every_byte_has_its_place(seed: int) -> None:
    random = np.random.default_rng()
    memory = random.integers(0, 256, 1 << 16, np.uint8)
    sizes = [(int(random.integers(1, 9)) * 4, int(random.choice([0, 0, 64, 256]))) for _ in range(7)]
    sizes = [(rows if random.integers(3) else rows + 1, gap) for rows, gap in sizes]
    unit = matrices(sizes, 64)
    random.shuffle(unit)  # type: ignore[arg-type]
    offsets, ranges = slot_layout(unit)
    room = sum(round_up(weight.layout.nbytes, PLANE_ALIGNMENT) for weight in unit)
    slot = np.zeros(room, np.uint8)
    for part in ranges:
        assert part.slot_offset + part.nbytes <= room
        slot[part.slot_offset : part.slot_offset + part.nbytes] = memory[part.address : part.address + part.nbytes]
    for weight in unit:
        offset, nbytes = offsets[weight.address], weight.layout.nbytes
        assert offset % PLANE_ALIGNMENT == 0
        assert np.array_equal(slot[offset : offset + nbytes], memory[weight.address : weight.address + nbytes])


def test_neighbours_in_memory_are_one_copy_whatever_the_order_of_use() -> None:
    down, gate, up, key, output, query, value = matrices(
        [(40, 0), (80, 0), (80, 0), (4, 256), (20, 0), (20, 0), (4, 0)], 4096
    )
    _, ranges = slot_layout([query, key, value, output, gate, up, down])
    assert [(part.address, part.nbytes) for part in ranges] == [(4096, 200 * 64), (4096 + 200 * 64 + 256, 48 * 64)]


def test_what_would_not_be_aligned_is_a_copy_of_its_own() -> None:
    first, second = matrices([(5, 0), (4, 0)], 4096)
    offsets, ranges = slot_layout([first, second])
    assert [part.slot_offset for part in ranges] == [0, 512]
    assert offsets[second.address] == 512


def test_no_copy_crosses_from_one_file_into_another() -> None:
    """Each is page-locked by itself, and they may be mapped one behind the other."""
    first = matrices([(4, 0), (4, 0)], 4096, "first.safetensors")
    second = matrices([(8, 0), (4, 0)], 4096 + 512, "second.safetensors")
    _, ranges = slot_layout([*second, *first])
    assert [(part.address, part.nbytes) for part in ranges] == [(4096, 512), (4096 + 512, 768)]
