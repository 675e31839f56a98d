"""Every weight format: file blocks -> planes -> float32 equals the gguf package's own dequantization, bit for bit."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest

from edge_transformer.errors import FileChangedError
from edge_transformer.formats.dequantize import dequantize
from edge_transformer.formats.gguf import open_gguf
from edge_transformer.formats.repack import read_vector, repack
from edge_transformer.formats.weight import FORMATS, Weight, WeightFormat, in_place_layout, packed_layout
from edge_transformer.memory import HostMemory
from formats.format_fuzzing import peak_rss, reset_peak_rss
from formats.sample_files import GGUF_TYPES, GgufTensor, gguf_bytes, random_blocks

POISON = 0xA5
GOLDEN = Path(__file__).parent.parent / "golden" / "dequant_blocks.json"


def reference(data: bytes, name: str, rows: int, cols: int) -> np.ndarray:
    """float32 [rows, cols] by the gguf package."""
    blocks = np.frombuffer(data, np.uint8).reshape(rows, -1)
    with np.errstate(all="ignore"):
        return gguf.dequantize(blocks, gguf.GGMLQuantizationType[name]).reshape(rows, cols)


def assert_same_bits(actual: np.ndarray, expected: np.ndarray) -> None:
    """Equal bit for bit; a NaN may carry any payload."""
    assert actual.dtype == np.float32
    assert actual.shape == expected.shape
    both_nan = np.isnan(actual) & np.isnan(expected)
    same = (actual.view(np.uint32) == np.ascontiguousarray(expected, np.float32).view(np.uint32)) | both_nan
    assert same.all(), f"{(~same).sum()} of {same.size} values differ, first at {np.argwhere(~same)[0]}"


def open_matrix(tmp_path: Path, name: str, rows: int, cols: int, data: bytes):
    path = tmp_path / "matrix.gguf"
    # A first tensor of 5 values leaves the matrix at an odd multiple of the alignment.
    path.write_bytes(
        gguf_bytes(
            [], [GgufTensor("first", (5,), 0, bytes(20)), GgufTensor("w", (rows, cols), GGUF_TYPES[name][0], data)]
        )
    )
    return open_gguf(path)


def planes_of(checkpoint, name: str, rows: int, cols: int, row_order=None) -> Weight:
    layout = packed_layout(WeightFormat(name), rows, cols)
    memory = HostMemory(layout.nbytes)
    memory_bytes(memory)[:] = POISON
    repack(checkpoint.tensors["w"], layout, memory.address, row_order)
    return Weight(layout, memory.address, memory)


def memory_bytes(memory: HostMemory) -> np.ndarray:
    from edge_transformer.memory import bytes_at

    return bytes_at(memory.address, memory.nbytes)


@pytest.mark.parametrize("rows", [1, 2, 7, 33])
@pytest.mark.parametrize("name", GGUF_TYPES)
def test_random_blocks_equal_the_gguf_package(tmp_path: Path, name: str, rows: int) -> None:
    rng = np.random.default_rng([rows, GGUF_TYPES[name][0]])
    cols = GGUF_TYPES[name][1] * int(rng.integers(1, 6)) if GGUF_TYPES[name][1] > 1 else int(rng.integers(1, 75))
    data = random_blocks(rng, name, rows, cols)  # random scales include infinities and NaN
    checkpoint = open_matrix(tmp_path, name, rows, cols, data)
    weight = planes_of(checkpoint, name, rows, cols)
    expected = reference(data, name, rows, cols)
    assert_same_bits(dequantize(weight), expected)
    assert_same_bits(read_vector(checkpoint.tensors["w"]), expected)
    checkpoint.close()


@pytest.mark.parametrize("scale", [np.inf, -np.inf, np.nan, 0.0, -0.0, 6e-8, 65504.0])
@pytest.mark.parametrize("name", [name for name, (_, values, _) in GGUF_TYPES.items() if values > 1])
def test_extreme_scales(tmp_path: Path, name: str, scale: float) -> None:
    rng = np.random.default_rng(7)
    _, block_values, block_bytes = GGUF_TYPES[name]
    blocks = np.frombuffer(random_blocks(rng, name, 3, block_values * 2), np.uint8).reshape(-1, block_bytes).copy()
    place = 208 if name == "Q6_K" else 0
    blocks[:, place : place + 2] = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
    checkpoint = open_matrix(tmp_path, name, 3, block_values * 2, blocks.tobytes())
    weight = planes_of(checkpoint, name, 3, block_values * 2)
    assert_same_bits(dequantize(weight), reference(blocks.tobytes(), name, 3, block_values * 2))
    checkpoint.close()


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_row_order_and_row_selection(tmp_path: Path, name: str) -> None:
    rng = np.random.default_rng(3)
    rows, cols = 19, 256
    data = random_blocks(rng, name, rows, cols)
    checkpoint = open_matrix(tmp_path, name, rows, cols, data)
    expected = reference(data, name, rows, cols)
    order = rng.permutation(rows)
    weight = planes_of(checkpoint, name, rows, cols, order)
    assert_same_bits(dequantize(weight), expected[order])
    some = rng.permutation(rows)[:7]
    assert_same_bits(dequantize(planes_of(checkpoint, name, len(some), cols, some)), expected[some])
    picked = np.array([4, 4, 18, 0])
    assert_same_bits(dequantize(weight, picked), expected[order][picked])
    checkpoint.close()


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_padding_and_neighbours_stay_untouched(tmp_path: Path, name: str) -> None:
    rows, cols = 3, 7 if GGUF_TYPES[name][1] == 1 else GGUF_TYPES[name][1]
    data = random_blocks(np.random.default_rng(1), name, rows, cols)
    checkpoint = open_matrix(tmp_path, name, rows, cols, data)
    weight = planes_of(checkpoint, name, rows, cols)
    written = np.zeros(weight.layout.nbytes, bool)
    for spec, plane in zip(FORMATS[weight.layout.format].planes, weight.layout.planes, strict=True):
        for row in range(rows):
            start = plane.offset + row * plane.row_pitch
            written[start : start + cols // spec.block_cols * spec.block_bytes] = True
    assert written.sum() == len(data)  # the planes hold the file's bits, no more and no less
    assert (memory_bytes(weight.owner)[: weight.layout.nbytes][~written] == POISON).all()
    checkpoint.close()


def test_order_of_codes_inside_a_group(tmp_path: Path) -> None:
    """The layout that kernels are written against, spelled out for one row of Q5_1 with known codes."""
    codes = np.random.default_rng(5).integers(0, 32, 32)
    high = sum(int(code >> 4) << i for i, code in enumerate(codes))
    nibbles = bytes(int(codes[j] & 15) | int(codes[j + 16] & 15) << 4 for j in range(16))
    block = np.float16(0.5).tobytes() + np.float16(-3).tobytes() + high.to_bytes(4, "little") + nibbles
    checkpoint = open_matrix(tmp_path, "Q5_1", 1, 32, block)
    weight = planes_of(checkpoint, "Q5_1", 1, 32)
    raw = memory_bytes(weight.owner)
    offsets = [plane.offset for plane in weight.layout.planes]
    assert offsets == [0, 256, 512, 768]
    assert raw[0:16].tobytes() == nibbles
    assert int.from_bytes(raw[256:260].tobytes(), "little") == high
    assert raw[512:514].view(np.float16)[0] == 0.5
    assert raw[768:770].view(np.float16)[0] == -3
    assert_same_bits(dequantize(weight)[0], np.float32(0.5) * codes.astype(np.float32) - np.float32(3))
    checkpoint.close()


@pytest.mark.parametrize("name", ["Q4_K", "Q5_K", "Q6_K"])
def test_k_formats_have_the_same_code_order(tmp_path: Path, name: str) -> None:
    """Nibble and high-bit planes of the 256-blocks, read by the rule in weight.py, give the codes of the values."""
    rng = np.random.default_rng(11)
    rows, cols = 2, 512
    block_bytes = GGUF_TYPES[name][2]
    blocks = np.frombuffer(random_blocks(rng, name, rows, cols), np.uint8).reshape(-1, block_bytes).copy()
    one = np.frombuffer(np.float16(1).tobytes(), np.uint8)
    if name == "Q6_K":
        blocks[:, 192:208] = 1
        blocks[:, 208:210] = one
    else:
        blocks[:, 0:2] = one
        blocks[:, 2:4] = 0
        blocks[:, 4:16] = np.frombuffer(bytes([1] * 4 + [0] * 4 + [1] * 4), np.uint8)
    checkpoint = open_matrix(tmp_path, name, rows, cols, blocks.tobytes())
    weight = planes_of(checkpoint, name, rows, cols)
    raw = memory_bytes(weight.owner)
    codes_plane, high_plane = weight.layout.planes[0], weight.layout.planes[1]
    bits = {"Q4_K": 0, "Q5_K": 1, "Q6_K": 2}[name]
    codes = np.zeros((rows, cols))
    for row in range(rows):
        for col in range(cols):
            group, i = divmod(col, 32)
            byte = raw[codes_plane.offset + row * codes_plane.row_pitch + group * 16 + i % 16]
            codes[row, col] = byte >> 4 if i >= 16 else byte & 15
            for bit in range(bits):
                place = high_plane.offset + row * high_plane.row_pitch + (group * bits + bit) * 4
                word = int.from_bytes(raw[place : place + 4].tobytes(), "little")
                codes[row, col] += (word >> i & 1) << (4 + bit)
    expected = reference(blocks.tobytes(), name, rows, cols)
    np.testing.assert_array_equal(codes - (32 if name == "Q6_K" else 0), expected)
    checkpoint.close()


def test_golden_blocks_of_real_files(tmp_path: Path) -> None:
    golden = json.loads(GOLDEN.read_text())["blocks"]
    assert {block["type"] for block in golden} == {"Q4_1", "Q8_0", "Q5_0", "Q4_K", "Q6_K"}
    for block in golden:
        cols = block["block_values"]
        checkpoint = open_matrix(tmp_path, block["type"], 1, cols, bytes.fromhex(block["hex"]))
        weight = planes_of(checkpoint, block["type"], 1, cols)
        assert_same_bits(dequantize(weight)[0], np.array(block["values"], np.float32))
        checkpoint.close()


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_in_place_layout_reads_the_same_values(tmp_path: Path, name: str) -> None:
    rows, cols = 5, 24
    data = random_blocks(np.random.default_rng(2), name, rows, cols)
    checkpoint = open_matrix(tmp_path, name, rows, cols, data)
    info = checkpoint.tensors["w"]
    layout = in_place_layout(info.format, rows, cols)
    assert layout is not None
    weight = Weight(layout, info.file.address + info.offset, info.file)
    assert_same_bits(dequantize(weight), reference(data, name, rows, cols))
    assert in_place_layout(info.format, rows, 23) is None
    checkpoint.close()


def test_large_matrix_with_page_release(tmp_path: Path) -> None:
    """More than one release chunk per thread; the pages are read again afterwards."""
    rows, cols = 3001, 4096
    data = random_blocks(np.random.default_rng(4), "Q4_0", rows, cols)
    checkpoint = open_matrix(tmp_path, "Q4_0", rows, cols, data)
    for _ in range(2):
        weight = planes_of(checkpoint, "Q4_0", rows, cols)
        some = np.array([0, 1, 1499, 1500, 1501, 3000])
        expected = reference(b"".join(data[r * 2304 : r * 2304 + 2304] for r in some), "Q4_0", len(some), cols)
        assert_same_bits(dequantize(weight, some), expected)
        weight.owner.close()
    checkpoint.close()


def test_memory_holds_one_copy_of_a_matrix_that_is_loaded(tmp_path: Path) -> None:
    """Its pages in the file are given back as they are read: 53 MiB and a little more, not twice as much. Where rows
    change their order that is done at the end of the matrix.
    """
    rows, cols = 24_000, 4096
    checkpoint = open_matrix(tmp_path, "Q4_0", rows, cols, bytes(rows * cols // 32 * 18))
    layout = packed_layout(WeightFormat.Q4_0, rows, cols)
    for order in (None, np.arange(rows).reshape(-1, 2, 60).swapaxes(1, 2).reshape(-1)):
        memory = HostMemory(layout.nbytes)
        reset_peak_rss()
        before = peak_rss()
        repack(checkpoint.tensors["w"], layout, memory.address, order)
        if order is not None:
            reset_peak_rss()
        assert layout.nbytes - (1 << 20) <= peak_rss() - before <= layout.nbytes + (8 << 20)
        memory.close()
    checkpoint.close()


def test_a_file_that_shrinks_while_it_is_loaded(tmp_path: Path) -> None:
    rows, cols = 64, 4096
    data = random_blocks(np.random.default_rng(8), "Q4_K", rows, cols)
    checkpoint = open_matrix(tmp_path, "Q4_K", rows, cols, data)
    info = checkpoint.tensors["w"]
    os.truncate(info.file.path, 40_000)
    target = HostMemory(packed_layout(info.format, rows, cols).nbytes)
    with pytest.raises(FileChangedError, match=r"matrix\.gguf"):
        repack(info, packed_layout(info.format, rows, cols), target.address)
    with pytest.raises(FileChangedError, match=r"matrix\.gguf"):
        read_vector(info)
    checkpoint.close()


def test_arguments_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    checkpoint = open_matrix(tmp_path, "Q4_0", 2, 32, bytes(36))
    info = checkpoint.tensors["w"]
    target = np.zeros(4096, np.uint8)
    with pytest.raises(ValueError, match="layout of"):
        repack(info, packed_layout(WeightFormat.Q4_0, 3, 32), target.ctypes.data)
    layout = packed_layout(WeightFormat.Q4_0, 2, 32)
    for order in ([0, 2], [-1, 0]):
        with pytest.raises(ValueError, match="row_order"):
            repack(info, layout, target.ctypes.data, np.array(order))
    with pytest.raises(ValueError, match="layout"):
        repack(info, layout, target.ctypes.data, np.array([0]))
    with pytest.raises(ValueError, match="multiples of 32"):
        packed_layout(WeightFormat.Q4_0, 2, 33)
    checkpoint.close()


def test_spreading_high_bits_by_a_multiplication() -> None:
    """docs/weight-layout.md: (x * 0x02040810) & 0x10101010 moves bits 0..3 to bits 4, 12, 20, 28."""
    for x in range(16):
        spread = (x * 0x02040810) & 0x10101010
        assert spread == sum((x >> i & 1) << (4 + 8 * i) for i in range(4))
