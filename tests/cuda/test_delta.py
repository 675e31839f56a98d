"""The gated delta rule and the output gate on an emulated GPU, against numpy fp64.

Every launch runs with its threads in ascending and in descending order (EmulatedGpu, order "both").
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cuda.delta_cases import F32, Case, Truth, make_case, make_shape, sigmoid, truth
from cuda.device_pass import DevicePass
from edge_transformer.cuda import delta
from edge_transformer.cuda.elementwise import ElementwiseOps
from edge_transformer.errors import UnsupportedModelError
from edge_transformer.ops.backend import AttentionShape, DeltaShape
from edge_transformer.ops.batch import PromptSpan
from edge_transformer.ops.contracts import CONTRACTS
from edge_transformer.ops.tensor import DType, array_at
from emulator.gpu import EmulatedGpu

ARCHITECTURES = [(7, 5), (8, 0)]
SPARE = 3  # rows that a pass does not use
SHAPES = {
    "small": make_shape(2, 4, 16, 16),
    "tiled, odd heads": make_shape(3, 9, 8, 24, 3, tiled=True),
    "wide values": make_shape(1, 3, 20, 72, 2),
    "one block of columns": make_shape(2, 2, 64, 32),
}


@dataclasses.dataclass
class Result:
    out: F32
    states: F32
    copies: F32


def compute(
    case: Case,
    capability: tuple[int, int] = (7, 5),
    order: str = "both",
    wave: int | None = None,
    stages: list[list[PromptSpan]] | None = None,
) -> Result:
    """The op on an emulated GPU; rows that are not in use and poison between blocks have to stay as they are. stages:
    of the prompt rows (None: one); after each but the last all blocks are copied.
    """
    gpu = EmulatedGpu(int(np.random.default_rng().integers(1 << 30)), order=order, capability=capability)
    at = DevicePass(gpu)
    shape, sequences = case.shape, len(case.states)
    op = delta.GatedDelta(gpu, shape, case.rows + SPARE, sequences)
    if wave is not None:
        op._wave = wave

    def padded(array: F32, label: str) -> object:
        spare = np.full((SPARE, array.shape[1]), np.nan, np.float32)
        return at.tensor(np.concatenate([array, spare]), label)

    tensors = [padded(array, label) for array, label in zip((case.qkv, case.z, case.a, case.b), "qzab", strict=True)]
    parameters = delta.DeltaParameters(
        *(at.tensor(getattr(case, name), name) for name in ("conv", "decay", "dt_bias", "norm"))
    )
    out = at.output((case.rows + SPARE, shape.value_heads * shape.value_dim))
    entries = delta.piece_entries(case.rows + SPARE, sequences)
    pieces, bounds = delta.pieces(stages or [case.spans], entries)
    starts, following = delta.decode_order(case.positions, case.row_sequence, case.prompt_rows, case.rows + SPARE)
    states = at.arrays.put(case.states, "states")
    table = states + np.arange(sequences, dtype=np.int64) * shape.block_bytes
    # A grid may be larger than the pieces there are.
    made = [delta.DeltaStage(first, count) for first, count in bounds]
    if stages is None:
        made = [dataclasses.replace(stage, count=min(entries, stage.count + 1)) for stage in made if stage.count]
    copies = gpu.allocate_host(max(1, len(made) - 1) * case.states.nbytes, "copies")
    for index, stage in enumerate(made[:-1]):
        to = copies.address + index * case.states.nbytes
        pairs = tuple((to + i * shape.block_bytes, int(block)) for i, block in enumerate(table))
        made[index] = dataclasses.replace(stage, copies=pairs)
    decode_sequences = int((starts[:, 0] >= 0).sum())
    arrays = delta.DeltaArrays(
        counts=at.arrays.put(np.array([case.prompt_rows, case.rows, sequences, 0], np.int32), "counts"),
        pieces=at.arrays.put(pieces, "pieces"),
        stages=made,
        starts=at.arrays.put(starts, "starts"),
        next=at.arrays.put(following, "next"),
        start_count=decode_sequences + 1 if decode_sequences else 0,
        states=at.arrays.put(table, "state table"),
        sequences=sequences,
        prompt_rows=case.prompt_rows + 1,
        memory=[(states, case.states.nbytes)],
    )
    nbytes = delta.workspace_bytes(shape, case.rows + SPARE, sequences)
    workspace = at.arrays.empty(nbytes, np.uint8, "workspace")
    op.run(*tensors, parameters, out, arrays, workspace, at.stream)
    got, new_states = at.read(out), at.arrays.get(states)
    assert np.isnan(got[case.rows :]).all()
    copied = array_at(copies.address, (max(1, len(made) - 1), *case.states.shape), np.float32).copy()
    at.arrays.close()
    return Result(got[: case.rows], new_states, copied)


def worst(got: F32, exact: np.ndarray, magnitude: np.ndarray) -> float:
    """Largest error over magnitude; where that is 0, numbers have to be equal."""
    difference = np.abs(got - exact)
    assert (difference[magnitude == 0] == 0).all()
    assert np.isfinite(difference[magnitude > 0]).all()
    return float((difference[magnitude > 0] / magnitude[magnitude > 0]).max())


def check(case: Case, result: Result, exact: Truth | None = None) -> None:
    exact = truth(case) if exact is None else exact
    bound = CONTRACTS["gated_delta"].eps
    used = case.shape.state_values + case.shape.channels * (case.shape.conv_width - 1)
    assert worst(result.out, exact.out, exact.out_magnitude) <= bound
    assert worst(result.states[:, :used], exact.states[:, :used], exact.state_magnitude[:, :used]) <= bound


@pytest.mark.parametrize("capability", ARCHITECTURES)
@pytest.mark.parametrize("name", list(SHAPES))
def test_prompt_pieces(name: str, capability: tuple[int, int]) -> None:
    spans = {
        "small": [(0, 1), (0, 130), (61, 5), (63, 1), (64, 64)],
        "tiled, odd heads": [(0, 2), (1, 70), (200, 3)],
        "wide values": [(0, 65), (127, 2)],
        "one block of columns": [(0, 64), (65, 66)],
    }[name]
    case = make_case(SHAPES[name], spans)
    check(case, compute(case, capability))


@pytest.mark.parametrize("name", list(SHAPES))
def test_decode_steps(name: str) -> None:
    decodes = {
        "small": [(0, 1), (1, 1), (700, 3), (2, 1), (0, 9)],
        "tiled, odd heads": [(0, 4), (1, 1), (3, 2)],
        "wide values": [(5, 2), (0, 1)],
        "one block of columns": [(64, 1)],
    }[name]
    case = make_case(SHAPES[name], [], decodes)
    check(case, compute(case))


def test_both_kinds_in_one_pass() -> None:
    case = make_case(SHAPES["small"], [(3, 70), (0, 1)], [(9, 2), (0, 3), (128, 1)], mixed=True)
    check(case, compute(case))


@pytest.mark.parametrize(("spans", "decodes"), [([(0, 129), (20, 50)], []), ([], [(0, 40), (5, 30)])])
def test_strong_and_no_decay(spans: list[tuple[int, int]], decodes: list[tuple[int, int]]) -> None:
    """exp(g) down to 1e-130 a row, between rows that forget nothing."""
    case = make_case(SHAPES["small"], spans, decodes, strong_decay=True)
    check(case, compute(case))


@pytest.mark.parametrize(("key_dim", "value_dim"), [(128, 128), (256, 128), (132, 256)])
@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_large_heads(key_dim: int, value_dim: int, capability: tuple[int, int]) -> None:
    case = make_case(make_shape(1, 2, key_dim, value_dim), [(60, 20)], [(7, 2)])
    check(case, compute(case, capability, order="random"))


def test_keys_that_repeat_do_not_amplify() -> None:
    """The same key in all rows of a piece, taken with beta near 1: the inverse of the triangle has entries near 1."""
    case = make_case(SHAPES["small"], [(0, 64)])
    case.qkv[:] = case.qkv[0] + np.float32(1e-3) * case.qkv
    case.b[:] = 8
    case.decay[:] = -1e-4
    check(case, compute(case, order="random"))


def test_rows_do_not_depend_on_what_shares_the_pass() -> None:
    """A sequence alone and among others, in one wave of pieces or several, gives the same bits."""
    spans, decodes = [(64, 130), (5, 3), (0, 64)], [(9, 2), (40, 1)]
    case = make_case(SHAPES["tiled, odd heads"], spans, decodes)
    together, in_waves = compute(case, order="random"), compute(case, order="random", wave=1)
    assert np.array_equal(together.out, in_waves.out)
    assert np.array_equal(together.states, in_waves.states, equal_nan=True)
    for index, (position, count) in enumerate([*spans, *decodes]):
        prompt = index < len(spans)
        rows = case.row_sequence == index
        alone = dataclasses.replace(
            case,
            **{name: getattr(case, name)[rows] for name in ("qkv", "z", "a", "b", "positions")},
            states=case.states[index : index + 1],
            row_sequence=np.zeros(count, np.int32),
            prompt_rows=count if prompt else 0,
            spans=(PromptSpan(0, count, position, 0),) if prompt else (),
        )
        result = compute(alone, order="random")
        assert np.array_equal(result.out, together.out[rows])
        assert np.array_equal(result.states[0], together.states[index], equal_nan=True)


def test_a_prompt_in_two_passes_gives_the_same_bits() -> None:
    """Cut at a border of 64 positions."""
    shape = SHAPES["small"]
    whole = make_case(shape, [(0, 150)])
    once = compute(whole, order="random")

    def part(first: int, stop: int, states: F32) -> Case:
        rows = slice(first, stop)
        return dataclasses.replace(
            whole,
            **{name: getattr(whole, name)[rows] for name in ("qkv", "z", "a", "b", "positions", "row_sequence")},
            states=states,
            prompt_rows=stop - first,
            spans=(PromptSpan(0, stop - first, first, 0),),
        )

    begun = compute(part(0, 64, whole.states), order="random")
    ended = compute(part(64, 150, begun.states), order="random")
    assert np.array_equal(np.concatenate([begun.out, ended.out]), once.out)
    assert np.array_equal(ended.states, once.states, equal_nan=True)


def test_copies_on_the_way_change_no_bit_and_are_the_state_there() -> None:
    """Two sequences with borders of their own, one with a second; the third has none. Copies are what a pass that ends
    there leaves.
    """
    shape = SHAPES["tiled, odd heads"]
    spans, decodes = [(0, 150), (61, 70), (5, 9)], [(9, 2)]
    case = make_case(shape, spans, decodes)
    once = compute(case, order="random")
    first, second, third = case.spans

    def part(span: PromptSpan, start: int, stop: int) -> PromptSpan:
        return PromptSpan(span.row_start + start - span.position, stop - start, start, span.sequence)

    stages = [
        [part(first, 0, 64), part(second, 61, 128), third],
        [part(first, 64, 128), part(second, 128, 131)],
        [part(first, 128, 150)],
    ]
    for capability in ARCHITECTURES:
        cut = compute(case, capability, stages=stages)
        expected = once if capability == (7, 5) else compute(case, capability, order="random")
        assert np.array_equal(cut.out, expected.out)
        assert np.array_equal(cut.states, expected.states, equal_nan=True)
    cut = compute(case, order="random", stages=stages)

    def after(index: int, count: int) -> F32:
        rows = np.flatnonzero(case.row_sequence == index)[:count]
        alone = dataclasses.replace(
            case,
            **{name: getattr(case, name)[rows] for name in ("qkv", "z", "a", "b", "positions")},
            states=case.states[index : index + 1],
            row_sequence=np.zeros(count, np.int32),
            prompt_rows=count,
            spans=(PromptSpan(0, count, spans[index][0], 0),),
        )
        return compute(alone, order="random").states[0]

    for copy, (index, count) in ((0, (0, 64)), (0, (1, 67)), (1, (0, 128)), (1, (1, 70))):
        assert np.array_equal(cut.copies[copy][index], after(index, count), equal_nan=True)


@pytest.mark.parametrize(("heads", "head_dim"), [(1, 4), (3, 20), (2, 256), (9, 128)])
def test_gate_of_attention(heads: int, head_dim: int) -> None:
    gpu = EmulatedGpu(1, order="both")
    at, ops = DevicePass(gpu), ElementwiseOps(gpu)
    rng = np.random.default_rng()
    rows, cols = 5, heads * head_dim
    joined = rng.standard_normal((rows, heads, 2, head_dim), dtype=np.float32) * 30
    padded = np.concatenate([joined.reshape(rows, -1), np.full((2, 2 * cols), np.nan, np.float32)])
    q, gate = at.output((rows + 2, cols)), at.output((rows + 2, cols))
    shape = AttentionShape(0, heads, 1, head_dim, 0, None, 1.0, None, None, DType.F32)
    live = at.rows(2, rows, spare=1)
    ops.split_query_gate(at.tensor(padded), shape, q, gate, live, at.stream)
    assert np.array_equal(at.read(q)[:rows], joined[:, :, 0].reshape(rows, cols))
    assert np.array_equal(at.read(gate)[:rows], joined[:, :, 1].reshape(rows, cols))
    assert np.isnan(at.read(q)[rows:]).all()
    assert np.isnan(at.read(gate)[rows:]).all()
    x = at.tensor(padded[:, :cols])
    ops.apply_gate(x, gate, live, at.stream)
    start = padded[:rows, :cols].astype(np.float64)
    exact = start * sigmoid(joined[:, :, 1].reshape(rows, cols).astype(np.float64))
    assert (np.abs(at.read(x)[:rows] - exact) <= CONTRACTS["apply_gate"].eps * np.abs(start)).all()
    assert np.isnan(at.read(x)[rows:]).all()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"key_dim": 260}, "key_dim that is a multiple of 4 up to 256, not 260"),
        ({"value_dim": 18}, "value_dim that is a multiple of 4 up to 256, not 18"),
        ({"conv_width": 5}, "2 to 4 values, not 5"),
        ({"conv_width": 1}, "2 to 4 values, not 1"),
        ({"value_heads": 5}, "5 value heads are no multiple of 2 key heads"),
    ],
)
def test_shapes_without_kernels_are_refused(change: dict[str, int], named: str) -> None:
    shape: DeltaShape = dataclasses.replace(SHAPES["small"], **change)
    with pytest.raises(UnsupportedModelError, match=named):
        delta.GatedDelta(EmulatedGpu(0), shape, 8, 1)


def test_pieces_end_at_absolute_borders() -> None:
    spans = [PromptSpan(0, 70, 60, 1), PromptSpan(70, 1, 0, 0)]
    table, bounds = delta.pieces([spans], 5)
    assert bounds == [(0, 4)]
    assert table[:, :6].tolist() == [
        [0, 4, 60, 1, 0, 0],
        [4, 64, 64, 1, 4, 0],
        [68, 2, 128, 1, 68, 1],
        [70, 1, 0, 0, 0, 1],
        [0, 0, 0, 0, 0, 0],
    ]
    with pytest.raises(ValueError, match="4 pieces; the list holds 3"):
        delta.pieces([spans], 3)
    with pytest.raises(ValueError, match="sequence 1 has two spans"):
        delta.pieces([[spans[0], dataclasses.replace(spans[0], row_start=70)]], 9)
    staged = [[PromptSpan(0, 4, 60, 1), spans[1]], [PromptSpan(4, 66, 64, 1)]]
    table, bounds = delta.pieces(staged, 5)
    assert bounds == [(0, 2), (2, 2)]
    assert table[:4, :6].tolist() == [
        [0, 4, 60, 1, 0, 1],
        [70, 1, 0, 0, 0, 1],
        [4, 64, 64, 1, 0, 0],
        [68, 2, 128, 1, 64, 1],
    ]


@pytest.mark.parametrize("rows", [1, 2, 3, 64, 65, 66, 127, 128, 129, 512])
def test_the_list_of_pieces_is_long_enough(rows: int) -> None:
    for sequences in range(1, min(rows, 4) + 1):
        lengths = [rows // sequences] * (sequences - 1) + [rows - rows // sequences * (sequences - 1)]
        for position in (0, 1, 62, 63):
            starts = np.cumsum([0, *lengths])
            spans = [PromptSpan(int(starts[i]), count, position, i) for i, count in enumerate(lengths)]
            delta.pieces([spans], delta.piece_entries(rows, sequences))
