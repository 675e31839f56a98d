"""What kernels are made of, against what CUDA defines: lanes, shared memory, conversions, tensor cores, cp.async.

On the emulated GPU, and on a real one (conftest.py): so the emulator is held to the hardware.
"""

from __future__ import annotations

import numpy as np
import pytest

from cuda.kernel_sources import basic
from emulator import DeviceArrays, EmulatedGpu


@pytest.fixture
def gpu() -> EmulatedGpu:
    return EmulatedGpu(seed=1, order="both", capability=(8, 0))


def bf16(values: np.ndarray) -> np.ndarray:
    """Round to nearest even, in integers."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def bf16_value(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("count", [1, 127, 128, 129, 1000])
def test_scale_add(gpu: EmulatedGpu, count: int) -> None:
    arrays = DeviceArrays(gpu)
    x, y = np.random.default_rng(count).standard_normal((2, count)).astype(np.float32)
    out = arrays.empty(count, np.float32, "out")
    kernel = gpu.kernel(basic("scale_add"))
    arguments = arrays.put(x, "x"), arrays.put(y, "y"), out, np.float32(0.3), np.int64(count)
    gpu.launch(kernel, (8, 1, 1), 0, arrays.stream, arguments)
    expected = (x.astype(np.float64) * np.float32(0.3) + y).astype(np.float32)  # one rounding, as fmaf
    np.testing.assert_array_equal(arrays.get(out), expected)


def test_static_shared_memory_and_barrier(gpu: EmulatedGpu) -> None:
    arrays = DeviceArrays(gpu)
    x = np.arange(512, dtype=np.float32)
    out = arrays.empty(2, np.float32, "out")
    gpu.launch(gpu.kernel(basic("block_sum", 256)), (2, 1, 1), 0, arrays.stream, (arrays.put(x, "x"), out))
    np.testing.assert_array_equal(arrays.get(out), x.reshape(2, 256).sum(1))


@pytest.mark.parametrize("entry", ["reverse_block", "reverse_async"])
def test_dynamic_shared_memory_and_cp_async(gpu: EmulatedGpu, entry: str) -> None:
    arrays = DeviceArrays(gpu)
    width = 4 if entry == "reverse_async" else 1
    x = np.arange(3 * 64 * width, dtype=np.uint32).reshape(3, 64, width)
    out = arrays.empty(x.shape, np.uint32, "out")
    shared = 256 if entry == "reverse_block" else 0
    gpu.launch(gpu.kernel(basic(entry, 64)), (3, 1, 1), shared, arrays.stream, (arrays.put(x, "x"), out))
    np.testing.assert_array_equal(arrays.get(out), x[:, ::-1])


def test_conversions_of_every_16_bit_number(gpu: EmulatedGpu) -> None:
    arrays = DeviceArrays(gpu)
    bits = np.arange(65536, dtype=np.uint16)
    random = np.random.default_rng(3)
    values = random.integers(0, 1 << 32, 65536, np.uint32).view(np.float32)
    values[:30000] = random.standard_normal(30000) * 10.0 ** random.integers(-9, 6, 30000)
    ties = bits[1000:2000].view(np.float16).astype(np.float32)
    values[:999] = (ties[:-1] + ties[1:]) / 2
    out, back = arrays.empty((2, 65536), np.float32, "out"), arrays.empty((3, 65536), np.uint16, "back")
    arguments = arrays.put(bits, "bits"), arrays.put(values, "values"), out, back, np.int32(65536)
    gpu.launch(gpu.kernel(basic("convert", 256)), (256, 1, 1), 0, arrays.stream, arguments)
    got, got_back = arrays.get(out), arrays.get(back)
    np.testing.assert_array_equal(got[0], bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(got[1].view(np.uint32), bits.astype(np.uint32) << 16)
    number = ~np.isnan(values)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(got_back[0][number], values.astype(np.float16).view(np.uint16)[number])
    for row in got_back[1:]:
        np.testing.assert_array_equal(row[number], bf16(values)[number])
    for row, kind in ((got_back[0], lambda b: b.view(np.float16)), *((row, bf16_value) for row in got_back[1:])):
        assert np.isnan(kind(row[~number])).all()


def test_lanes(gpu: EmulatedGpu) -> None:
    arrays = DeviceArrays(gpu)
    x = np.random.default_rng(4).permutation(32).astype(np.int32)
    out = arrays.empty((6, 32), np.int32, "out")
    gpu.launch(gpu.kernel(basic("lanes", 32)), (1, 1, 1), 0, arrays.stream, (arrays.put(x, "x"), out))
    got, lane = arrays.get(out), np.arange(32)
    np.testing.assert_array_equal(got[0], x[lane * 7 % 32])
    np.testing.assert_array_equal(got[1], x[lane ^ 5])
    np.testing.assert_array_equal(got[2], np.where(lane + 3 < 32, x[(lane + 3) % 32], x))
    np.testing.assert_array_equal(got[3], np.where(lane >= 4, x[lane - 4], x))
    ballot = sum(1 << i for i in range(32) if x[i] % 3 == 0)
    assert (got[4].view(np.uint32) == ballot).all()
    assert (got[5] == 3).all()


def test_words(gpu: EmulatedGpu) -> None:
    arrays = DeviceArrays(gpu)
    a, b, c = np.random.default_rng(5).integers(0, 1 << 32, (3, 64), np.uint32)
    c &= 0x77777777
    out = arrays.empty((3, 64), np.uint32, "out")
    arguments = *(arrays.put(values, "in") for values in (a, b, c)), out
    gpu.launch(gpu.kernel(basic("words", 64)), (1, 1, 1), 0, arrays.stream, arguments)
    got = arrays.get(out)
    products = a.view(np.int8).reshape(64, 4).astype(np.int32) * b.view(np.int8).reshape(64, 4)
    np.testing.assert_array_equal(got[0].view(np.int32), products.sum(1) + 7)
    both = np.concatenate([a.view(np.uint8).reshape(64, 4), b.view(np.uint8).reshape(64, 4)], 1)
    chosen = [[both[i, c[i] >> (4 * j) & 7] for j in range(4)] for i in range(64)]
    np.testing.assert_array_equal(got[1], np.array(chosen, np.uint8).view(np.uint32)[:, 0])
    assert [int(word).bit_count() for word in a] == list(got[2])


@pytest.mark.parametrize("half", [False, True])
def test_tensor_core_product(gpu: EmulatedGpu, half: bool) -> None:
    arrays = DeviceArrays(gpu)
    random = np.random.default_rng(6)
    a, b = random.standard_normal((16, 16)).astype(np.float32), random.standard_normal((16, 8)).astype(np.float32)
    c = random.standard_normal((16, 8)).astype(np.float32)
    pack = (lambda v: v.astype(np.float16).view(np.uint16)) if half else bf16
    unpack = (lambda v: v.view(np.float16).astype(np.float64)) if half else bf16_value
    d = arrays.empty((16, 8), np.float32, "d")
    kernel = gpu.kernel(basic("multiply", 32, **({"ETE_HALF": 1} if half else {})))
    arguments = arrays.put(pack(a), "a"), arrays.put(pack(b), "b"), arrays.put(c, "c"), d
    gpu.launch(kernel, (1, 1, 1), 0, arrays.stream, arguments)
    exact = c + unpack(pack(a)).astype(np.float64) @ unpack(pack(b)).astype(np.float64)
    magnitude = np.abs(c) + np.abs(unpack(pack(a))).astype(np.float64) @ np.abs(unpack(pack(b)))
    error = np.abs(arrays.get(d) - exact)
    assert (error <= magnitude * 17 * 2.0**-24).all()
    assert error.max() > 0


def test_tensor_core_truncates(gpu: EmulatedGpu) -> None:
    """1 + 1.5 * 2^-24 gives 1, as measured on a GPU; rounding would give 1 + 2^-23. Likewise below 1, toward zero."""
    arrays = DeviceArrays(gpu)
    a, b = np.zeros((16, 16), np.float32), np.zeros((16, 8), np.float32)
    a[:, 0], b[0] = 1.5, 2.0**-24
    c = np.ones((16, 8), np.float32)
    c[1] = -1
    d = arrays.empty((16, 8), np.float32, "d")
    arguments = arrays.put(bf16(a), "a"), arrays.put(bf16(b), "b"), arrays.put(c, "c"), d
    gpu.launch(gpu.kernel(basic("multiply", 32)), (1, 1, 1), 0, arrays.stream, arguments)
    got = arrays.get(d)
    assert (got[0] == 1).all()
    assert (got[1] == np.float32(-1 + 2.0**-23)).all()
