"""Norms, rope with KV append, row selection and argmax on an emulated GPU, against numpy fp64.

Every launch runs with its threads in ascending and in descending order (EmulatedGpu, order "both").
"""

from __future__ import annotations

import numpy as np
import pytest

from cuda.device_pass import F32, DevicePass
from edge_transformer.cuda.elementwise import ElementwiseOps
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS
from edge_transformer.ops.contracts import CONTRACTS
from edge_transformer.ops.reference.bf16 import round_to_bf16
from edge_transformer.ops.tensor import DType, Tensor
from emulator.gpu import EmulatedGpu


class Ops:
    def __init__(self) -> None:
        self.gpu = EmulatedGpu(int(np.random.default_rng().integers(1 << 30)), order="both")
        self.elementwise = ElementwiseOps(self.gpu)
        self.at = DevicePass(self.gpu)


@pytest.fixture
def ops() -> Ops:
    return Ops()


def random(*shape: int) -> F32:
    return np.random.default_rng().standard_normal(shape, dtype=np.float32)


def padded(array: F32, spare: int) -> F32:
    return np.concatenate([array, np.full((spare, *array.shape[1:]), np.nan, np.float32)])


def rms_exact(x: np.ndarray, eps: float) -> np.ndarray:
    return np.sqrt((x**2).mean(axis=-1, keepdims=True) + eps)


@pytest.mark.parametrize("cols", [1, 3, 64, 257, 1023, 1500, 2113, 9216])
@pytest.mark.parametrize("kind", ["norm", "delta", "delta_norm"])
def test_add_norm(ops: Ops, kind: str, cols: int) -> None:
    rows, spare, eps = 5, 2, 1e-5
    start, change = random(rows, cols) * 3, random(rows, cols)
    weight, delta_weight = 1 + 0.3 * random(cols), 1 + 0.3 * random(cols)
    residual = ops.at.tensor(padded(start, spare), "residual")
    out = ops.at.output((rows + spare, cols))
    delta = None if kind == "norm" else ops.at.tensor(padded(change, spare), "delta")
    delta_norm = ops.at.tensor(delta_weight, "delta norm") if kind == "delta_norm" else None
    ops.elementwise.add_norm(
        residual, delta, delta_norm, ops.at.tensor(weight, "weight"), eps, out, ops.at.rows(2, rows, spare=1),
        ops.at.stream,
    )  # fmt: skip
    got_residual, got = ops.at.read(residual), ops.at.read(out)
    assert np.isnan(got[rows:]).all()
    x, d = start.astype(np.float64), change.astype(np.float64)
    added = {"norm": 0 * d, "delta": d, "delta_norm": d / rms_exact(d, eps) * delta_weight}[kind]
    p = np.abs(x) + np.abs(added)
    x = x + added
    bound = CONTRACTS["add_norm"].eps
    assert (np.abs(got_residual[:rows] - x) <= bound * p).all()
    if kind == "norm":
        assert np.array_equal(got_residual[:rows], start)
    rms = rms_exact(x, eps)
    magnitude = (p + np.abs(x) * p.max(axis=1, keepdims=True) / rms) / rms * np.abs(weight)
    assert (np.abs(got[:rows] - x / rms * weight) <= bound * magnitude).all()


def test_norm_of_a_row_does_not_depend_on_its_place(ops: Ops) -> None:
    x, change, weight = random(7, 300), random(7, 300), random(300)

    def norm(rows: slice) -> F32:
        part = x[rows]
        out = ops.at.output(part.shape)
        ops.elementwise.add_norm(
            ops.at.tensor(part), ops.at.tensor(change[rows]), None, ops.at.tensor(weight), 1e-6, out,
            ops.at.rows(0, len(part)), ops.at.stream,
        )  # fmt: skip
        return ops.at.read(out)

    assert np.array_equal(norm(slice(0, 7)), np.concatenate([norm(slice(row, row + 1)) for row in range(7)]))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary", "normed"),
    [(4, 2, 64, 64, True), (3, 1, 80, 40, False), (2, 2, 256, 256, True), (5, 1, 72, 0, True), (1, 1, 8, 8, False)],
)
@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
def test_qk_norm_rope_append(
    ops: Ops, heads: int, kv_heads: int, head_dim: int, rotary: int, normed: bool, kv_dtype: DType
) -> None:
    eps, spare = 1e-6, 2
    positions = np.array([0, 1, 511, 512, 1030], np.int32)
    sequences = np.array([0, 0, 1, 1, 0], np.int32)
    rows = len(positions)
    q, k, v = (random(rows, count * head_dim) for count in (heads, kv_heads, kv_heads))
    angles = np.random.default_rng().uniform(-4, 4, (rows + spare, rotary // 2))
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    norms = [1 + 0.3 * random(head_dim) for _ in range(2)] if normed else [None, None]
    shape = AttentionShape(
        layer=0, heads=heads, kv_heads=kv_heads, head_dim=head_dim, rotary_dim=rotary, rope=0 if rotary else None,
        scale=1.0, softcap=None, window=None, kv_dtype=kv_dtype,
    )  # fmt: skip
    put = ops.at.arrays.put
    dtype = np.uint16 if kv_dtype is DType.BF16 else np.float32
    tile_shape = (2, kv_heads, KV_TILE_POSITIONS, head_dim)
    tiles = {
        place: ops.at.arrays.empty(tile_shape, dtype, f"tile {place}") for place in ((0, 0), (0, 2), (1, 0), (1, 1))
    }
    table = np.zeros((2, 3), np.int64)
    for place, address in tiles.items():
        table[place] = address
    nbytes = int(np.prod(tile_shape)) * np.dtype(dtype).itemsize
    on_device = [ops.at.tensor(padded(array, spare), name) for array, name in ((q, "q"), (k, "k"), (v, "v"))]
    ops.elementwise.qk_norm_rope_append(
        *on_device,
        *(None if norm is None else ops.at.tensor(norm, "norm") for norm in norms),
        eps, shape,
        put(cos, "cos") if rotary else 0, put(sin, "sin") if rotary else 0,
        put(np.append(positions, [9999] * spare).astype(np.int32), "positions"),
        put(np.append(sequences, [77] * spare).astype(np.int32), "sequences"),
        put(table, "table"), 3, [(address, nbytes) for address in tiles.values()],
        ops.at.rows(2, rows, spare=1), ops.at.stream,
    )  # fmt: skip

    def turned(x: F32, norm: F32 | None) -> tuple[np.ndarray, np.ndarray]:
        """fp64 result and |a| + |b| of the turned pair."""
        x = x.reshape(rows, -1, head_dim).astype(np.float64)
        if norm is not None:
            x = x / rms_exact(x, eps) * norm
        half = rotary // 2
        c, s = (angle[:rows, None].astype(np.float64) for angle in (cos, sin))
        a, b = x[..., :half], x[..., half:rotary]
        result = np.concatenate([a * c - b * s, b * c + a * s, x[..., rotary:]], axis=-1)
        pair = np.abs(a) + np.abs(b)
        return result, np.concatenate([pair, pair, np.abs(x[..., rotary:])], axis=-1)

    bound = CONTRACTS["qk_norm_rope_append"].eps
    exact, magnitude = turned(q, norms[0])
    got_q = ops.at.read(on_device[0])
    assert (np.abs(got_q[:rows].reshape(exact.shape) - exact) <= bound * magnitude).all()
    assert np.isnan(got_q[rows:]).all()
    exact, magnitude = turned(k, norms[1])
    written = 0
    read = {place: ops.at.arrays.get(address) for place, address in tiles.items()}
    for row, (position, sequence) in enumerate(zip(positions, sequences, strict=True)):
        tile = read[sequence, position // KV_TILE_POSITIONS]
        slot = position % KV_TILE_POSITIONS
        keys, values = tile[0, :, slot], tile[1, :, slot]
        of_v = v[row].reshape(kv_heads, head_dim)
        if kv_dtype is DType.BF16:
            keys = (keys.astype(np.uint32) << 16).view(np.float32)
            assert (np.abs(keys - exact[row]) <= 2**-8 * np.abs(exact[row]) + bound * magnitude[row]).all()
            assert np.array_equal(values, round_to_bf16(of_v))
        else:
            assert (np.abs(keys - exact[row]) <= bound * magnitude[row]).all()
            assert np.array_equal(values, of_v)
        written += 2 * kv_heads * head_dim
    untouched = np.uint16(0xFFFF) if kv_dtype is DType.BF16 else np.float32(np.nan)
    poison = sum(
        int((tile == untouched).sum() if dtype is np.uint16 else np.isnan(tile).sum()) for tile in read.values()
    )
    assert poison == sum(tile.size for tile in read.values()) - written


def test_bf16_keys_are_the_rounded_f32_keys(ops: Ops) -> None:
    """Without norm and rope k goes into its tile as it is: rounded to nearest even, also where it is not finite."""
    head_dim = 64
    k = random(1, head_dim)
    k[0, :6] = [np.inf, -np.inf, np.nan, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38]
    shape = AttentionShape(0, 1, 1, head_dim, 0, None, 1.0, None, None, DType.BF16)
    tile = ops.at.arrays.empty((2, KV_TILE_POSITIONS, head_dim), np.uint16, "tile")
    put = ops.at.arrays.put
    ops.elementwise.qk_norm_rope_append(
        ops.at.tensor(random(1, head_dim)), ops.at.tensor(k), ops.at.tensor(k), None, None, 1e-6, shape, 0, 0,
        put(np.array([5], np.int32), "positions"), put(np.array([0], np.int32), "sequences"),
        put(np.array([[tile]], np.int64), "table"), 1, [(tile, 4 * KV_TILE_POSITIONS * head_dim)],
        ops.at.rows(0, 1), ops.at.stream,
    )  # fmt: skip
    got = ops.at.arrays.get(tile)[:, 5]
    expected = round_to_bf16(k[0])
    finite = ~np.isnan(k[0])
    for row in got:
        assert np.array_equal(row[finite], expected[finite])
        assert (row[2] & 0x7F80) == 0x7F80
        assert row[2] & 0x7F


@pytest.mark.parametrize("cols", [1, 37, 300])
def test_select_rows(ops: Ops, cols: int) -> None:
    x = random(6, cols)
    out = ops.at.output((5, cols))
    indices = ops.at.arrays.put(np.array([5, 0, 5, 2, 0], np.int32), "indices")
    ops.elementwise.select_rows(ops.at.tensor(x), indices, out, ops.at.rows(3, 6, logits=3, spare=2), ops.at.stream)
    got = ops.at.read(out)
    assert np.array_equal(got[:3], x[[5, 0, 5]])
    assert np.isnan(got[3:]).all()


@pytest.mark.parametrize("vocabulary", [1, 31, 1023, 5000])
def test_argmax(ops: Ops, vocabulary: int) -> None:
    """The first of the largest, or -1 where a logit is not finite."""
    logits = np.random.default_rng().integers(-9, 10, (7, vocabulary)).astype(np.float32)
    logits[3, vocabulary // 2] = np.nan
    logits[4, -1] = np.inf
    logits[5, 0] = -np.inf
    ids = ops.at.arrays.put(np.full(8, 99, np.int32), "ids")
    rows = ops.at.rows(0, 7, logits=7, spare=1)
    ops.elementwise.argmax(ops.at.tensor(padded(logits, 1)), ids, rows, ops.at.stream)
    expected = np.where(np.isfinite(logits).all(axis=1), logits.argmax(axis=1), -1)
    assert ops.at.arrays.get(ids).tolist() == [*expected.tolist(), 99]


def test_wrong_arguments_are_refused(ops: Ops) -> None:
    elementwise, stream, rows = ops.elementwise, ops.at.stream, ops.at.rows(0, 2, logits=2)
    x, narrow = ops.at.output((2, 64)), ops.at.output((2, 8))
    with pytest.raises(ValueError, match="needed: at least 2 rows of 64"):
        elementwise.add_norm(x, None, None, ops.at.output((64,)), 1e-6, narrow, rows, stream)
    with pytest.raises(ValueError, match="delta_norm is"):
        elementwise.add_norm(x, x, ops.at.output((8,)), ops.at.output((64,)), 1e-6, x, rows, stream)
    with pytest.raises(ValueError, match="needed: at least 2 rows of 64"):
        elementwise.select_rows(x, 0, Tensor(x.address, (1, 64), DType.F32, None), rows, stream)
    shape = AttentionShape(0, 1, 1, 264, 0, None, 1.0, None, None, DType.F32)
    with pytest.raises(ValueError, match="head_dim is 264"):
        elementwise.qk_norm_rope_append(x, x, x, None, None, 1e-6, shape, 0, 0, 0, 0, 0, 1, [], rows, stream)
