"""Models with gated-delta layers on the emulated GPU: every placement gives the same bits, close to the oracle's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from cuda.opened import BUDGET, MODES, model_path, open_on_gpu, pieces, tokens_of
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence
from edge_transformer.errors import CapacityError
from edge_transformer.formats.weight import Weight
from edge_transformer.placement.plan import HeadPlace, Wishes
from emulator import EmulatedGpu
from tiny.models import MODELS, TinyModel
from tiny.run import open_engine
from tiny.weights import make_weights
from tiny.write import write_hf

HYBRIDS = [name for name in MODELS if name.startswith("qwen3_5")]
BOUND = 1e-5  # of the correctness chain, times the largest logit


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    return float(np.abs(ours - theirs).max() / max(1.0, np.abs(theirs).max()))


@pytest.mark.parametrize("name", HYBRIDS)
def test_every_mode_gives_the_same_bits(folder: Path, closing: list[Engine], name: str) -> None:
    """150 tokens: two whole pieces, the begin of a third, single steps."""
    path, tokens = model_path(folder, name), tokens_of(150, 3)
    oracle = open_engine(path, "reference")
    closing.append(oracle)
    first = None
    modes = list(MODES.items()) if name == "qwen3_5" else [*MODES.items()][::3]
    for seed, (mode, wishes) in enumerate(modes):
        opened = open_on_gpu(path, wishes, seed)
        closing.append(opened.engine)
        logits = pieces(opened.engine, tokens, 64, 5)
        if first is None:
            first = logits
            assert error(first, pieces(oracle, tokens, 64, 5)) <= BOUND
        assert np.array_equal(first, logits), mode


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_odd_heads"])
def test_other_architecture_and_an_output_projection_on_the_cpu(folder: Path, closing: list[Engine], name: str) -> None:
    path, tokens = model_path(folder, name), tokens_of(90, 4)
    oracle = open_engine(path, "reference")
    wishes = Wishes(BUDGET, resident_layers=1, slots=2, kv_offload=True, head=HeadPlace.CPU)
    opened = open_on_gpu(path, wishes, 1, capability=(8, 0))
    closing += [oracle, opened.engine]
    assert error(pieces(opened.engine, tokens, 64, 2), pieces(oracle, tokens, 64, 2)) <= BOUND


def feed(engine: Engine, chunks: list[Chunk]) -> np.ndarray:
    result = engine.step(chunks)
    assert result is not None
    return result.logits()


@pytest.mark.parametrize("mode", ["all resident", "all streamed, KV cache on the host"])
def test_batch_mates_and_several_decode_rows_change_no_bit(folder: Path, closing: list[Engine], mode: str) -> None:
    engine = open_on_gpu(model_path(folder, "qwen3_5"), MODES[mode], seed=2).engine
    closing.append(engine)
    tokens, others = tokens_of(40, 5), tokens_of(30, 6)
    alone = pieces(engine, tokens, 64, 6)
    sequence, mate = engine.new_sequence(), engine.new_sequence()
    got = [feed(engine, [Chunk(sequence, tokens[:34], "prompt", "all"), Chunk(mate, others[:20], "prompt")])]
    got.append(feed(engine, [Chunk(sequence, tokens[34:35], "decode", "all"), Chunk(mate, others[20:28], "prompt")]))
    got.append(feed(engine, [Chunk(mate, others[28:29], "decode"), Chunk(sequence, tokens[35:38], "decode", "all")]))
    got.append(feed(engine, [Chunk(sequence, tokens[38:], "decode", "all")]))
    assert np.array_equal(np.concatenate(got), alone)


def test_sequences_use_places_again_that_held_other_numbers(folder: Path, closing: list[Engine]) -> None:
    """Nobody clears the state of a sequence that begins."""
    engine = open_on_gpu(model_path(folder, "qwen3_5"), MODES["all resident"], seed=3).engine
    closing.append(engine)
    tokens = tokens_of(20, 7)
    first = pieces(engine, tokens, 64, 3)
    pieces(engine, tokens_of(25, 8), 64, 1)
    assert np.array_equal(pieces(engine, tokens, 64, 3), first)
    oracle = open_engine(model_path(folder, "qwen3_5"), "reference")
    closing.append(oracle)
    assert error(pieces(engine, tokens, 64, len(tokens)), pieces(oracle, tokens, 64, 0)) <= BOUND


def test_saved_forked_and_cut_sequences_go_on_with_the_same_bits(
    folder: Path, closing: list[Engine], tmp_path: Path
) -> None:
    engine = open_on_gpu(model_path(folder, "qwen3_5"), MODES["all resident"], seed=4).engine
    closing.append(engine)
    tokens = tokens_of(100, 9)
    expected = pieces(engine, tokens, 64, 4)
    sequence = engine.new_sequence()
    feed(engine, [Chunk(sequence, tokens[:64], "prompt", "last")])
    sequence.checkpoint()
    feed(engine, [Chunk(sequence, tokens[64:96], "prompt", "last")])
    sequence.save(tmp_path / "state")
    fork = sequence.fork()
    assert np.array_equal(feed(engine, [Chunk(fork, tokens[96:97], "decode", "all")])[0], expected[96])
    assert np.array_equal(feed(engine, [Chunk(sequence, tokens[96:97], "decode", "all")])[0], expected[96])
    fork.close()
    loaded = Sequence.load(tmp_path / "state", engine.state_shape)
    assert np.array_equal(feed(engine, [Chunk(loaded, tokens[96:97], "decode", "all")])[0], expected[96])
    loaded.close()
    assert sequence.truncate(80) == 64
    got = feed(engine, [Chunk(sequence, tokens[64:96], "prompt", "all")])
    assert np.array_equal(got, expected[64:96])
    sequence.close()


def test_room_for_the_sequences_that_were_asked(folder: Path, closing: list[Engine]) -> None:
    opened = open_on_gpu(model_path(folder, "qwen3_5"), MODES["KV cache on the host"], seed=5)
    engine = opened.engine
    closing.append(engine)
    shape = engine.state_shape.recurrent
    assert shape is not None
    assert dict(opened.plan.ledger)["recurrent state"] == 2 * shape.nbytes
    held = [engine.new_sequence() for _ in range(2)]
    feed(engine, [Chunk(sequence, [1], "decode", "last") for sequence in held])
    third = engine.new_sequence()
    with pytest.raises(CapacityError, match="room for 2 sequences"):
        engine.step([Chunk(third, [1], "decode", "last")])
    held[0].close()
    feed(engine, [Chunk(third, [1], "decode", "last")])


@pytest.mark.parametrize("refused", [False, True])
def test_a_prompt_crosses_the_bus_once_and_leaves_a_checkpoint_on_the_way(
    folder: Path, closing: list[Engine], refused: bool
) -> None:
    """500 tokens, streamed: one pass, the bits of two passes cut at the border, and of a pass without a checkpoint."""
    path, tokens = model_path(folder, "qwen3_5"), tokens_of(500, 11)
    gpu = EmulatedGpu(7, refuse_registration=refused)
    engine = open_on_gpu(path, MODES["all streamed, KV cache on the host"], gpu=gpu, rows=512).engine
    closing.append(engine)
    acquired: list[tuple[int, str]] = []
    original = engine._weights.acquire

    def acquire(layer: int, segment: str) -> Mapping[str, Weight]:
        acquired.append((layer, segment))
        return original(layer, segment)

    engine._weights.acquire = acquire  # type: ignore[method-assign]
    sequence = engine.new_sequence()
    logits = engine.prefill(sequence, tokens)
    assert len(acquired) == len(set(acquired)) > engine.config.num_layers
    assert sequence.recurrent is not None
    assert sequence.recurrent.positions == [448]
    cut = engine.new_sequence()
    feed(engine, [Chunk(cut, tokens[:448], "prompt", "last")])
    assert cut.recurrent is not None
    assert np.array_equal(sequence.recurrent.checkpoints[448], cut.recurrent.read())
    assert cut.recurrent.positions == []
    assert np.array_equal(feed(engine, [Chunk(cut, tokens[448:], "prompt", "last")])[0], logits)
    assert np.array_equal(sequence.recurrent.read(), cut.recurrent.read())
    cut.close()
    assert sequence.reuse(460) == 448
    assert np.array_equal(engine.prefill(sequence, tokens[448:]), logits)
    sequence.close()


@pytest.mark.parametrize("mode", ["all resident", "all streamed, output projection too"])
def test_two_prompts_in_one_pass_leave_checkpoints_at_their_own_borders(
    folder: Path, closing: list[Engine], mode: str
) -> None:
    engine = open_on_gpu(model_path(folder, "qwen3_5"), MODES[mode], seed=8, sequences=3, rows=256).engine
    closing.append(engine)
    prompts = [tokens_of(140, 12), tokens_of(75, 13)]
    alone = [engine.new_sequence() for _ in prompts]
    expected = [
        feed(engine, [Chunk(sequence, prompt, "prompt", "last")])
        for sequence, prompt in zip(alone, prompts, strict=True)
    ]
    for sequence in alone:
        sequence.close()
    sequences = [engine.new_sequence() for _ in prompts]
    chunks = [Chunk(s, p, "prompt", "last", len(p) // 64 * 64) for s, p in zip(sequences, prompts, strict=True)]
    asked = iter([False, False])
    assert engine.step(chunks, lambda: next(asked, True)) is None
    assert [s.recurrent.positions for s in sequences if s.recurrent] == [[], []]
    assert np.array_equal(feed(engine, chunks), np.concatenate(expected))
    assert [s.recurrent.positions for s in sequences if s.recurrent] == [[128], [64]]
    for sequence, prompt, wanted in zip(sequences, prompts, expected, strict=True):
        border = sequence.truncate(len(prompt) - 1)
        assert border == len(prompt) // 64 * 64
        assert np.array_equal(feed(engine, [Chunk(sequence, prompt[border:], "prompt", "last")]), wanted)
        sequence.close()


def test_no_layer_with_attention(folder: Path, closing: list[Engine]) -> None:
    config = MODELS["qwen3_5"].config | {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}
    model = TinyModel("recurrent_alone", config, {})
    path, tokens = write_hf(folder / model.name, config, make_weights(model)), tokens_of(90, 14)
    oracle = open_engine(path, "reference")
    closing.append(oracle)
    expected = pieces(oracle, tokens, 64, 5)
    first = None
    for mode in ("all resident", "all streamed, KV cache on the host"):
        engine = open_on_gpu(path, MODES[mode], seed=9).engine
        closing.append(engine)
        logits = pieces(engine, tokens, 64, 5)
        first = logits if first is None else first
        assert np.array_equal(logits, first)
        assert error(logits, expected) <= BOUND


@pytest.mark.parametrize("refused", [False, True])
def test_copies_of_state_stay_what_they_are(folder: Path, closing: list[Engine], refused: bool) -> None:
    """Their memory is used again only when nobody holds them, and outlives the GPU; also where locking is refused."""
    gpu = EmulatedGpu(6, refuse_registration=refused)
    engine = open_on_gpu(model_path(folder, "qwen3_5"), MODES["all resident"], gpu=gpu).engine
    closing.append(engine)
    sequence = engine.new_sequence()
    copies = []
    for length in (3, 1, 2):
        feed(engine, [Chunk(sequence, tokens_of(length, length), "prompt", "last")])
        assert sequence.recurrent is not None
        copies.append(sequence.recurrent.read())
    kept = [copy.copy() for copy in copies]
    part, place = copies[1][:100], copies[1].ctypes.data
    del copies[1]
    feed(engine, [Chunk(sequence, [1], "decode", "last")])
    copies.append(sequence.recurrent.read())
    assert np.array_equal(part, kept[1][:100])
    del part
    kept.append(copies[-1].copy())
    newest = sequence.recurrent.read()
    assert np.array_equal(newest, kept[-1])
    if not refused:
        assert newest.ctypes.data == place
    engine.close()
    for copy, expected in zip(copies, [kept[0], *kept[2:]], strict=True):
        assert np.array_equal(copy, expected)
