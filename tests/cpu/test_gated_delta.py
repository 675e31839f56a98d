"""The gated delta rule and the output gates on the native library: against fp64, and bit for bit against themselves."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cpu.attention_cases import Piece, make_shape
from cpu.delta_cases import (
    F32,
    DeltaInputs,
    assert_delta_right,
    delta_in_fp64,
    delta_shape,
    make_blocks,
    make_delta_batch,
    make_inputs,
    run_delta,
)
from cpu.fenced import fenced
from cpu.guarded import Guarded
from edge_transformer._native import available_instruction_sets
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.errors import UnsupportedModelError
from edge_transformer.ops.backend import DeltaShape
from edge_transformer.ops.batch import Batch, StateCheckpoint
from edge_transformer.ops.contracts import CONTRACTS
from edge_transformer.ops.reference.backend import ReferenceBackend
from edge_transformer.ops.tensor import tensor_of

SHAPES = {
    "plain": delta_shape(),
    "tiled, odd": delta_shape(3, 9, key_dim=8, value_dim=12, conv_width=3, tiled=True),
    "grouped, odd": delta_shape(3, 6, key_dim=7, value_dim=33, conv_width=5),
    "equal": delta_shape(5, 5, key_dim=20, value_dim=8, conv_width=2),
    "wide": delta_shape(1, 2, key_dim=128, value_dim=128),
    "widest": delta_shape(1, 1, key_dim=256, value_dim=256, conv_width=8),
    "one": delta_shape(1, 1, key_dim=1, value_dim=1, conv_width=2),
}
MIXED = [
    Piece(0, 0, 130),
    Piece(1, 37, 1),
    Piece(2, 64, 70),
    Piece(3, 63, 2),
    Piece(4, 5, decode=True),
    Piece(5, 0, decode=True),
    Piece(4, 6, decode=True),
    Piece(4, 7, decode=True),
]


def make_backend(shape: DeltaShape, threads: int = 2, isa: str | None = None) -> CpuBackend:
    backend = CpuBackend(threads, isa)
    backend.reserve(256, 32, (), (shape,))
    return backend


def rows_of(inputs: DeltaInputs, rows: slice) -> DeltaInputs:
    return replace(inputs, qkv=inputs.qkv[rows], z=inputs.z[rows], a=inputs.a[rows], b=inputs.b[rows])


@pytest.mark.parametrize("isa", available_instruction_sets())
@pytest.mark.parametrize("forgetful", [0.0, 4.0], ids=["lasting", "forgetful"])
@pytest.mark.parametrize("name", SHAPES)
def test_close_to_fp64(name: str, forgetful: float, isa: str) -> None:
    rng = np.random.default_rng()
    shape = SHAPES[name]
    inputs = make_inputs(shape, sum(piece.rows for piece in MIXED), rng, forgetful)
    before = make_blocks(shape, 6, rng)
    blocks = before.copy()
    batch = make_delta_batch(MIXED, blocks)
    got = run_delta(make_backend(shape, isa=isa), shape, inputs, batch)
    assert_delta_right(got, blocks, shape, delta_in_fp64(shape, inputs, batch, before))


def test_a_long_prompt_stays_close_to_fp64() -> None:
    """1 000 rows in one span: errors of the state do not pile up beyond the contract."""
    rng = np.random.default_rng()
    shape = SHAPES["wide"]
    inputs, before = make_inputs(shape, 1000, rng, -3.0), make_blocks(shape, 1, rng)
    blocks = before.copy()
    batch = make_delta_batch([Piece(0, 24, 1000)], blocks)
    got = run_delta(make_backend(shape), shape, inputs, batch)
    assert_delta_right(got, blocks, shape, delta_in_fp64(shape, inputs, batch, before))


@pytest.mark.parametrize("isa", available_instruction_sets())
@pytest.mark.parametrize("name", ["plain", "tiled, odd", "wide"])
def test_chunks_mates_and_threads_change_no_bit(name: str, isa: str) -> None:
    """Chunks that end on borders of 64, in passes of their own or with another sequence, with any number of threads."""
    rng = np.random.default_rng()
    shape = SHAPES[name]
    inputs, blocks = make_inputs(shape, 200, rng), make_blocks(shape, 2, rng)
    whole_blocks, cut_blocks = blocks.copy(), blocks.copy()
    whole = run_delta(make_backend(shape, 1, isa), shape, inputs, make_delta_batch([Piece(0, 0, 200)], whole_blocks))
    backend = make_backend(shape, 3, isa)
    parts = []
    for start, stop, mate in ((0, 64, 0), (64, 192, 9), (192, 200, 70)):
        pieces = [Piece(0, start, stop - start)] + ([Piece(1, 11, mate)] if mate else [])
        chunk = rows_of(inputs, slice(start, stop))
        others = make_inputs(shape, mate, rng)
        chunk = replace(
            chunk,
            **{key: np.concatenate([getattr(chunk, key), getattr(others, key)]) for key in ("qkv", "z", "a", "b")},
        )
        out = run_delta(backend, shape, chunk, make_delta_batch(pieces, cut_blocks))
        parts.append(out[: stop - start])
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    np.testing.assert_array_equal(cut_blocks[0], whole_blocks[0])


def with_checkpoints(batch: Batch, shape: DeltaShape, wanted: list[tuple[int, int]]) -> tuple[Batch, F32]:
    """The batch with copies at (sequence, position), and where they go: poisoned blocks."""
    copies = np.full((len(wanted), shape.block_bytes // 4), np.nan, np.float32)
    made = [
        StateCheckpoint(sequence, position, np.array([copies[index].ctypes.data], np.int64))
        for index, (sequence, position) in enumerate(wanted)
    ]
    return replace(batch, state_checkpoints=tuple(made)), copies


@pytest.mark.parametrize("executor", ["reference", *available_instruction_sets()])
@pytest.mark.parametrize("name", ["plain", "tiled, odd", "grouped, odd", "wide"])
def test_copies_on_the_way_change_no_bit_and_are_the_state_there(name: str, executor: str) -> None:
    """Each sequence at borders of its own, one with two copies, one where its rows end, one with none."""
    rng = np.random.default_rng()
    shape = SHAPES[name]
    pieces = [*MIXED, Piece(6, 0, 64)]
    pieces.sort(key=lambda piece: piece.decode)
    inputs, before = make_inputs(shape, sum(piece.rows for piece in pieces), rng), make_blocks(shape, 7, rng)
    backend = ReferenceBackend() if executor == "reference" else make_backend(shape, isa=executor)
    plain, cut = before.copy(), before.copy()
    expected = run_delta(backend, shape, inputs, make_delta_batch(pieces, plain))
    wanted = [(3, 64), (0, 64), (6, 64), (2, 128), (0, 128)]
    batch, copies = with_checkpoints(make_delta_batch(pieces, cut), shape, wanted)
    np.testing.assert_array_equal(run_delta(backend, shape, inputs, batch), expected)
    np.testing.assert_array_equal(cut, plain)
    for copy, (sequence, position) in zip(copies, wanted, strict=True):
        span = next(span for span in batch.prompt_spans if span.sequence == sequence)
        count = position - span.position
        part = rows_of(inputs, slice(span.row_start, span.row_start + count))
        alone = before[sequence : sequence + 1].copy()
        run_delta(backend, shape, part, make_delta_batch([Piece(0, span.position, count)], alone))
        np.testing.assert_array_equal(copy, alone[0])


def test_checkpoints_that_do_not_fit_are_refused() -> None:
    rng = np.random.default_rng()
    shape = SHAPES["plain"]
    pieces, blocks = [Piece(0, 0, 130), Piece(1, 5, decode=True)], make_blocks(shape, 2, rng)
    inputs, backend = make_inputs(shape, 131, rng), make_backend(shape)
    for wanted in ([(0, 63)], [(0, 0)], [(0, 192)], [(0, 128), (0, 64)], [(0, 64), (0, 64)], [(1, 64)], [(7, 64)]):
        batch, _ = with_checkpoints(make_delta_batch(pieces, blocks), shape, wanted)
        with pytest.raises(ValueError, match="checkpoint"):
            run_delta(backend, shape, inputs, batch)
    for addresses in (np.zeros(1, np.int64), np.zeros(0, np.int64)):
        batch = make_delta_batch(pieces, blocks)
        batch = replace(batch, state_checkpoints=(StateCheckpoint(0, 64, addresses),))
        with pytest.raises(ValueError, match="no memory for layer 0"):
            run_delta(backend, shape, inputs, batch)


@pytest.mark.parametrize("rows", [1, 5, 64, 90, 128])
def test_the_end_of_a_prompt_does_not_change_what_is_before(rows: int) -> None:
    rng = np.random.default_rng()
    shape = SHAPES["wide"]
    inputs, blocks = make_inputs(shape, 150, rng), make_blocks(shape, 1, rng)
    backend = make_backend(shape)
    whole = run_delta(backend, shape, inputs, make_delta_batch([Piece(0, 0, 150)], blocks))
    start = run_delta(backend, shape, rows_of(inputs, slice(rows)), make_delta_batch([Piece(0, 0, rows)], blocks))
    np.testing.assert_array_equal(start, whole[:rows])


def test_decode_rows_of_a_pass_are_steps_in_order() -> None:
    """Several decode rows of one sequence, among others of other sequences, are those of passes of their own."""
    rng = np.random.default_rng()
    shape = SHAPES["tiled, odd"]
    order = [0, 1, 1, 0, 2, 1]
    at = [7, 0, 1, 8, 30, 2]
    pieces = [Piece(sequence, position, decode=True) for sequence, position in zip(order, at, strict=True)]
    inputs, blocks = make_inputs(shape, len(order), rng), make_blocks(shape, 3, rng)
    together, alone = blocks.copy(), blocks.copy()
    got = run_delta(make_backend(shape), shape, inputs, make_delta_batch(pieces, together))
    backend = make_backend(shape, 1)
    for row, piece in enumerate(pieces):
        single = run_delta(backend, shape, rows_of(inputs, slice(row, row + 1)), make_delta_batch([piece], alone))
        np.testing.assert_array_equal(single[0], got[row])
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize("decode", [False, True])
def test_a_block_is_not_read_at_position_0(decode: bool) -> None:
    rng = np.random.default_rng()
    shape = SHAPES["tiled, odd"]
    inputs, zeros = make_inputs(shape, 1, rng), make_blocks(shape, 1, rng)
    used = ~np.isnan(zeros)
    zeros[used] = 0
    poisoned = np.full_like(zeros, np.nan)
    backend = make_backend(shape)
    clean = run_delta(backend, shape, inputs, make_delta_batch([Piece(0, 0, decode=decode)], zeros))
    got = run_delta(backend, shape, inputs, make_delta_batch([Piece(0, 0, decode=decode)], poisoned))
    np.testing.assert_array_equal(got, clean)
    np.testing.assert_array_equal(poisoned, zeros)


@pytest.mark.parametrize("isa", available_instruction_sets())
@pytest.mark.parametrize("name", ["tiled, odd", "grouped, odd", "equal", "one"])
def test_nothing_outside_is_touched(name: str, isa: str) -> None:
    """Every array ends, then begins, at a page that nobody may touch."""
    rng = np.random.default_rng()
    shape = SHAPES[name]
    pieces = [Piece(0, 3, 67), Piece(1, 9, decode=True)]
    inputs = make_inputs(shape, 68, rng)
    backend = make_backend(shape, 2, isa)
    before = make_blocks(shape, 2, rng)
    blocks = before.copy()
    expected = run_delta(backend, shape, inputs, make_delta_batch(pieces, blocks))
    for at_end in (True, False):
        arrays = {key: fenced(value, at_end) for key, value in vars(inputs).items()}
        fenced_blocks = fenced(before, at_end).view(np.float32)
        out = Guarded(68, shape.value_heads * shape.value_dim)
        backend.gated_delta(
            *(tensor_of(value) for value in arrays.values()), shape, out.tensor, make_delta_batch(pieces, fenced_blocks)
        )
        out.check()
        np.testing.assert_array_equal(out.array, expected)


def test_what_cannot_be_computed_is_refused() -> None:
    for shape in (
        delta_shape(3, 4),
        delta_shape(key_dim=257),
        delta_shape(value_dim=0),
        delta_shape(conv_width=1),
        delta_shape(conv_width=9),
    ):
        with pytest.raises(UnsupportedModelError, match="gated-delta layers on the CPU"):
            CpuBackend(1).reserve(8, 32, (), (shape,))


def test_a_batch_without_blocks_is_refused() -> None:
    rng = np.random.default_rng(0)
    shape = SHAPES["plain"]
    inputs, blocks = make_inputs(shape, 1, rng), make_blocks(shape, 1, rng)
    batch = make_delta_batch([Piece(0, 0)], blocks)
    backend = make_backend(shape)
    for tables in ((), (np.empty(0, np.int64),), (np.zeros(1, np.int64),)):
        with pytest.raises(ValueError, match="block"):
            run_delta(backend, shape, inputs, replace(batch, state_tables=tables))
    both = make_blocks(shape, 2, rng)
    two = make_delta_batch([Piece(0, 0), Piece(1, 0)], both)
    with pytest.raises(ValueError, match="fewer entries"):
        run_delta(backend, shape, make_inputs(shape, 2, rng), replace(two, state_tables=batch.state_tables))


def test_tensors_of_other_shapes_are_refused() -> None:
    rng = np.random.default_rng(0)
    shape = SHAPES["plain"]
    inputs, blocks = make_inputs(shape, 2, rng), make_blocks(shape, 1, rng)
    backend = make_backend(shape)
    for name in vars(inputs):
        wrong = replace(inputs, **{name: np.zeros((1, 3) if getattr(inputs, name).ndim == 2 else 3, np.float32)})
        with pytest.raises(ValueError, match="needed: f32"):
            run_delta(backend, shape, wrong, make_delta_batch([Piece(0, 0, 2)], blocks))


@pytest.mark.parametrize("isa", available_instruction_sets())
@pytest.mark.parametrize(("heads", "head_dim", "rows"), [(3, 24, 1), (4, 8, 37), (1, 256, 9)])
def test_output_gates(heads: int, head_dim: int, rows: int, isa: str) -> None:
    rng = np.random.default_rng()
    shape = make_shape(heads, 1, head_dim)
    joined = rng.standard_normal((rows, heads, 2, head_dim), dtype=np.float32) * np.float32(9)
    batch = make_delta_batch([Piece(0, 0, rows)], np.zeros((1, 64), np.float32))
    q, gate = Guarded(rows, heads * head_dim), Guarded(rows, heads * head_dim)
    backend = CpuBackend(2, isa)
    backend.split_query_gate(tensor_of(joined.reshape(rows, -1)), shape, q.tensor, gate.tensor, batch)
    q.check()
    gate.check()
    np.testing.assert_array_equal(q.array, joined[:, :, 0].reshape(rows, -1))
    np.testing.assert_array_equal(gate.array, joined[:, :, 1].reshape(rows, -1))
    before = q.array.astype(np.float64)
    backend.apply_gate(q.tensor, gate.tensor, batch)
    q.check()
    exact = before / (1 + np.exp(-gate.array.astype(np.float64)))
    assert (np.abs(q.array - exact) <= CONTRACTS["apply_gate"].eps * np.abs(before)).all()


@pytest.mark.parametrize("isa", available_instruction_sets())
def test_random_shapes(isa: str) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    for _ in range(12):
        key_heads, each = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        shape = delta_shape(
            key_heads,
            key_heads * each,
            key_dim=int(rng.integers(1, 70)),
            value_dim=int(rng.integers(1, 70)),
            conv_width=int(rng.integers(2, 9)),
            tiled=bool(rng.integers(2)),
        )
        pieces = [Piece(0, int(rng.integers(0, 200)), int(rng.integers(1, 150)))]
        pieces += [Piece(1, int(rng.integers(0, 3)) + i, decode=True) for i in range(int(rng.integers(0, 2)))]
        inputs = make_inputs(shape, sum(piece.rows for piece in pieces), rng, float(rng.normal()))
        before = make_blocks(shape, 2, rng)
        blocks = before.copy()
        batch = make_delta_batch(pieces, blocks)
        got = run_delta(make_backend(shape, int(rng.integers(1, 4)), isa), shape, inputs, batch)
        try:
            assert_delta_right(got, blocks, shape, delta_in_fp64(shape, inputs, batch, before))
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {shape} {pieces}: {error}") from error


def test_many_steps_stay_close_to_fp64() -> None:
    """1 000 decode rows of a head that forgets slowly: errors of the state do not pile up beyond the contract."""
    rng = np.random.default_rng()
    shape = delta_shape(1, 1, key_dim=64, value_dim=64)
    inputs, before = make_inputs(shape, 1000, rng, -3.0), make_blocks(shape, 1, rng)
    blocks = before.copy()
    batch = make_delta_batch([Piece(0, 5 + i, decode=True) for i in range(1000)], blocks)
    got = run_delta(make_backend(shape), shape, inputs, batch)
    assert_delta_right(got, blocks, shape, delta_in_fp64(shape, inputs, batch, before))
