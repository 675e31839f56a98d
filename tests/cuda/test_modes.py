"""The whole engine on the emulated GPU: every residency mode gives the same bits; a wait that is left out is found.

Queues run in a random order by seed, memory is poisoned while it is free or being filled, the order of work is checked.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edge_transformer.engine.gpu as engine_on_gpu
from cuda.opened import BUDGET, MODES, ForgetfulGpu, model_path, open_on_gpu, pieces, tokens_of
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.errors import NumericError
from edge_transformer.ops.tensor import DType
from edge_transformer.placement import plan as plan_module
from edge_transformer.placement.plan import HeadPlace, Rates, Wishes
from emulator import RaceError
from tiny.models import MODELS
from tiny.run import open_engine, run
from tiny.weights import beyond_half_precision, make_weights, prompts
from tiny.write import write_hf


@pytest.mark.parametrize("capability", [(7, 5), (8, 0)], ids=["sm_75", "sm_80"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_every_mode_gives_the_same_bits(
    folder: Path, closing: list[Engine], name: str, capability: tuple[int, int]
) -> None:
    tokens = tokens_of(50)
    results = {}
    for seed, (mode, wishes) in enumerate(MODES.items()):
        opened = open_on_gpu(model_path(folder, name), wishes, seed, capability)
        closing.append(opened.engine)
        results[mode] = pieces(opened.engine, tokens, (64, 17)[seed % 2], 3)
    first = results["all resident"]
    for mode, logits in results.items():
        assert np.array_equal(first, logits), mode


@pytest.mark.parametrize("resident", [-1, 0])
@pytest.mark.parametrize(("host_head", "streamed_rows"), [(1e12, 32), (1e9, 96), (1e3, 128)])
def test_a_split_output_projection_has_rows_from_both_sides(
    folder: Path,
    closing: list[Engine],
    monkeypatch: pytest.MonkeyPatch,
    resident: int,
    host_head: float,
    streamed_rows: int,
) -> None:
    """131 rows, the first ones in blocks of 32. Their bits are those of a resident one; the others are the CPU's,
    whichever other rows the pass has.
    """
    monkeypatch.setattr(plan_module, "HEAD_ROW_STEP", 32)
    monkeypatch.setattr(plan_module, "HEAD_BLOCK_BYTES", 1)
    monkeypatch.setattr(plan_module, "BORDER_SECONDS", 0)
    monkeypatch.setattr(engine_on_gpu, "measured_rates", lambda *_: Rates(1e9, host_head))
    tokens = tokens_of(30, 12)
    whole = open_on_gpu(model_path(folder, "llama"), MODES["all resident"])
    wishes = Wishes(BUDGET, resident_layers=resident, slots=2, head=HeadPlace.SPLIT)
    split = open_on_gpu(model_path(folder, "llama"), wishes, seed=6, measure=True)
    closing += [whole.engine, split.engine]
    if resident == -1:
        assert (split.plan.head_streamed_rows, split.plan.head_block_rows) == (streamed_rows, 32)
    rows = split.plan.head_streamed_rows
    expected, got = pieces(whole.engine, tokens, 7, 2), pieces(split.engine, tokens, 7, 2)
    assert np.array_equal(expected[:, :rows], got[:, :rows])
    error = np.abs(expected - got).max() / max(1.0, np.abs(expected).max())
    assert 0 < error <= 1e-5
    assert np.array_equal(got, pieces(split.engine, tokens, 64, 2))


@pytest.mark.parametrize("mode", ["output projection streamed alone", "all streamed, output projection too"])
def test_output_projection_in_many_blocks_of_every_layout(
    folder: Path, closing: list[Engine], monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    """131 rows in blocks of 32, with several logit blocks in a pass, and layers met where blocks were expected."""
    monkeypatch.setattr(plan_module, "HEAD_ROW_STEP", 32)
    monkeypatch.setattr(plan_module, "HEAD_BLOCK_BYTES", 1)
    tokens = tokens_of(30, 12)
    resident = open_on_gpu(model_path(folder, "llama"), MODES["all resident"])
    streamed = open_on_gpu(model_path(folder, "llama"), MODES[mode], seed=6)
    closing += [resident.engine, streamed.engine]
    if mode == "output projection streamed alone":
        assert streamed.plan.head_block_rows == 32
    for chunk in (64, 7):
        assert np.array_equal(pieces(resident.engine, tokens, chunk, 2), pieces(streamed.engine, tokens, chunk, 2))
    for engine in (resident.engine, streamed.engine):
        sequence = engine.new_sequence()
        for start in (0, 10, 20):  # no logits are asked: the blocks fetched ahead are dropped
            engine.step([Chunk(sequence, tokens[start : start + 10], "prompt")])
        result = engine.step([Chunk(sequence, [5], "decode", "last")])
        assert result is not None
        if engine is resident.engine:
            expected = result.logits()
    assert np.array_equal(result.logits(), expected)


@pytest.mark.parametrize("name", ["llama", "mistral_window", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_families_are_close_to_the_oracle(folder: Path, closing: list[Engine], name: str) -> None:
    """Bound of the correctness chain: 1e-5 of the largest logit."""
    if name not in MODELS:
        name = next(model for model in MODELS if model.startswith(name.split("_")[0]))
    opened = open_on_gpu(model_path(folder, name), MODES["all streamed, KV cache on the host"])
    oracle = open_engine(model_path(folder, name), "reference")
    closing += [opened.engine, oracle]
    for ours, theirs in zip(
        run(opened.engine, [p[:40] for p in prompts(MODELS[name])], "interleaved"),
        run(oracle, [p[:40] for p in prompts(MODELS[name])], "one_piece"),
        strict=True,
    ):
        assert np.abs(ours - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
@pytest.mark.parametrize("capability", [(7, 5), (8, 0)], ids=["sm_75", "sm_80"])
@pytest.mark.parametrize("name", ["llama_biases", "qwen3_5"])
def test_numbers_beyond_the_range_of_half_precision_change_no_bit(
    tmp_path: Path, closing: list[Engine], name: str, capability: tuple[int, int], kv_dtype: DType
) -> None:
    weights, tokens = make_weights(MODELS[name]), tokens_of(40, 6)
    config = MODELS[name].config | {"rms_norm_eps": 1e-15}
    logits = []
    for seed, tensors in enumerate((weights, beyond_half_precision(weights))):
        path = write_hf(tmp_path / str(seed), config, tensors, "BF16")
        wishes = MODES["all streamed, KV cache on the host"]
        opened = open_on_gpu(path, wishes, seed, capability, kv_dtype=kv_dtype)
        closing.append(opened.engine)
        logits.append(pieces(opened.engine, tokens, 64, 3))
    assert np.array_equal(*logits)


def test_offload_over_several_tiles(folder: Path, closing: list[Engine]) -> None:
    """560 positions: a full tile and a part; with and without a window."""
    for name in ("llama", "gemma2"):
        tokens = tokens_of(560, 1)
        resident = open_on_gpu(model_path(folder, name), MODES["all resident"])
        offloaded = open_on_gpu(model_path(folder, name), MODES["KV cache on the host"], seed=3)
        closing += [resident.engine, offloaded.engine]
        assert np.array_equal(pieces(resident.engine, tokens, 64, 2), pieces(offloaded.engine, tokens, 64, 2))


def test_output_projection_on_the_cpu_is_close(folder: Path, closing: list[Engine]) -> None:
    tokens = tokens_of(30, 2)
    wishes = Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.CPU)
    on_cpu = open_on_gpu(model_path(folder, "gemma2"), wishes)
    on_gpu = open_on_gpu(model_path(folder, "gemma2"), MODES["all resident"])
    closing += [on_cpu.engine, on_gpu.engine]
    ours, theirs = pieces(on_cpu.engine, tokens, 64, 2), pieces(on_gpu.engine, tokens, 64, 2)
    assert np.abs(ours - theirs).max() <= 1e-5 * max(1.0, np.abs(theirs).max())


@pytest.mark.parametrize("mode", ["all resident", "output projection streamed alone"])
def test_logits_kept_over_a_pass_that_asks_for_fewer(folder: Path, closing: list[Engine], mode: str) -> None:
    """13 rows in blocks of 8 and 5; the pass between has one. The likeliest tokens are those of the logits."""
    opened = open_on_gpu(model_path(folder, "llama"), MODES[mode], seed=9)
    closing.append(opened.engine)
    sequence, other = opened.engine.new_sequence(), opened.engine.new_sequence()
    result = opened.engine.step([Chunk(sequence, tokens_of(13, 5), "prompt", "all")])
    assert result is not None
    expected = result.logits()
    assert result.likeliest() == expected.argmax(axis=1).tolist()
    result.keep()
    between = opened.engine.step([Chunk(other, [3], "decode", "last")])
    assert between is not None
    assert between.likeliest() == between.logits().argmax(axis=1).tolist()
    assert np.array_equal(result.logits(), expected)
    assert result.likeliest() == expected.argmax(axis=1).tolist()


def test_arena_does_not_grow_with_the_context(folder: Path, closing: list[Engine]) -> None:
    wishes = MODES["all streamed, KV cache on the host"]
    sizes = set()
    for context in (64, 1024):
        opened = open_on_gpu(model_path(folder, "llama"), wishes, context=context)
        closing.append(opened.engine)
        sizes.add(opened.arena_bytes)
    assert len(sizes) == 1


def test_a_cancelled_pass_leaves_the_slots_usable(folder: Path, closing: list[Engine]) -> None:
    opened = open_on_gpu(model_path(folder, "llama"), MODES["streamed by layers"], seed=5)
    closing.append(opened.engine)
    tokens = tokens_of(20, 3)
    expected = pieces(opened.engine, tokens, 64, 1)
    sequence = opened.engine.new_sequence()
    for stop_at in (0, 1, 2):
        answers = iter([False] * stop_at + [True])
        assert opened.engine.step([Chunk(sequence, tokens, "prompt")], answers.__next__) is None
    assert np.array_equal(pieces(opened.engine, tokens, 64, 1), expected)


def test_decode_passes_of_a_kind_replay_one_graph(folder: Path, closing: list[Engine]) -> None:
    """The first decode pass is recorded, the others launch no kernel one by one (but lm_head's)."""
    opened = open_on_gpu(model_path(folder, "llama"), MODES["all resident"])
    closing.append(opened.engine)
    sequence = opened.engine.new_sequence()
    captures: list[str] = []
    opened.gpu.begin_capture, begin = (
        lambda stream: (captures.append(stream.name), begin(stream)),
        opened.gpu.begin_capture,
    )
    for tokens, kind in (
        (tokens_of(20), "prompt"),
        ([1], "decode"),
        ([2], "decode"),
        ([3], "decode"),
        ([4, 5], "decode"),
    ):
        result = opened.engine.step([Chunk(sequence, tokens, kind, "last")])  # type: ignore[arg-type]
        assert result is not None
        result.logits()
    assert captures == ["compute", "compute"]  # one for single rows, one for two


def test_a_graph_serves_as_many_rows_as_it_was_made_for(folder: Path, closing: list[Engine]) -> None:
    """Recorded with three rows of four, with five of eight; replayed with all of them, and with fewer. Where weights
    are streamed there are no graphs.
    """
    logits = []
    for mode in ("all resident", "streamed by layers"):
        opened = open_on_gpu(model_path(folder, "llama"), MODES[mode], seed=7)
        closing.append(opened.engine)
        sequence = opened.engine.new_sequence()
        results = []
        for number, count in enumerate((11, 3, 4, 5, 8, 6, 3)):
            kind = "decode" if number else "prompt"
            result = opened.engine.step([Chunk(sequence, tokens_of(count, number), kind, "last")])  # type: ignore[arg-type]
            assert result is not None
            results.append(result.logits())
        logits.append(np.concatenate(results))
    assert np.array_equal(*logits)


@pytest.mark.parametrize("forgotten", ["weight copies", "compute", "KV copies"])
@pytest.mark.parametrize("check_order", [True, False], ids=["by order", "by value"])
def test_a_wait_left_out_is_found(folder: Path, forgotten: str, check_order: bool) -> None:
    """Both dependencies of a slot, and those of the KV buffers, are needed: without one, some order gives an error or
    other bits. Tiles are copied once a later one is appended to.
    """
    tokens = tokens_of(515 if forgotten == "KV copies" else 24, 4)
    wishes = MODES["all streamed, KV cache on the host"]
    expected = pieces(open_on_gpu(model_path(folder, "llama"), wishes).engine, tokens, 64, 2)
    for seed in range(20):
        gpu = ForgetfulGpu(seed, check_order=check_order)
        gpu.forgotten = forgotten
        try:
            logits = pieces(open_on_gpu(model_path(folder, "llama"), wishes, gpu=gpu).engine, tokens, 64, 2)
        except (RaceError, NumericError):
            return
        if not np.array_equal(logits, expected):
            return
    pytest.fail(f"20 random orders without the waits of stream {forgotten!r} went unnoticed")
