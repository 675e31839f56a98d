"""Recurrent state on the CPU: sequences that fork, go back, come back from a file, and survive passes that fail."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.kv import HostTileMemory, Landing
from edge_transformer.engine.recurrent import CHECKPOINT_BORDER, RecurrentShape, RecurrentState
from edge_transformer.engine.sequence import Sequence
from edge_transformer.errors import CapacityError, FormatError, NumericError, UsageError
from edge_transformer.ops.backend import DeltaShape
from edge_transformer.ops.tensor import DType
from engine.tiny_engine import append, long_context_model, open_cpu_engine, random_tokens, write_model

Logits = npt.NDArray[np.float32]
PROMPT = 700


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("hybrid"), long_context_model("qwen3_5"))


@pytest.fixture(scope="module")
def engine(path: Path) -> Iterator[Engine]:
    engine = open_cpu_engine(path, kv_dtype=DType.F32)
    yield engine
    engine.close()


def prefilled(engine: Engine, tokens: list[int]) -> tuple[Sequence, Logits]:
    """A fresh sequence after a prompt, and the logits after its last token."""
    sequence = engine.new_sequence()
    logits = engine.prefill(sequence, tokens)
    assert logits is not None
    return sequence, logits


def decoded(engine: Engine, sequence: Sequence, tokens: list[int]) -> Logits:
    return np.concatenate([append(engine, sequence, [token], "decode") for token in tokens])


def blocks(sequence: Sequence) -> npt.NDArray[np.uint8]:
    assert sequence.recurrent is not None
    return sequence.recurrent.read()


def checkpoints(sequence: Sequence) -> list[int]:
    assert sequence.recurrent is not None
    return sorted(sequence.recurrent.checkpoints)


def test_a_prompt_leaves_checkpoints_at_its_last_border_and_every_so_many_tokens(engine: Engine) -> None:
    sequence, _ = prefilled(engine, random_tokens(1200))
    assert checkpoints(sequence) == [512, 1024, 1152]
    assert sequence.prompt_length == 1200
    decoded(engine, sequence, random_tokens(464))
    assert checkpoints(sequence) == [512, 1024, 1152, 1664]
    assert sequence.prompt_length == 1200
    sequence.close()


@pytest.mark.parametrize("length", [63, 64, 65, 127, 500, 512])
def test_a_prompt_takes_one_pass_with_or_without_checkpoints(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, length: int
) -> None:
    tokens, passes = random_tokens(length), engine._passes
    sequence, logits = prefilled(engine, tokens)
    assert engine._passes == passes + 1
    border = length // 64 * 64
    assert checkpoints(sequence) == ([border] if border else [])
    with monkeypatch.context() as patch:
        patch.setattr(RecurrentState, "expect", lambda *_: [])
        bare, expected = prefilled(engine, tokens)
    assert checkpoints(bare) == ([512] if length == 512 else [])  # due, and read when the pass has ended
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(blocks(sequence), blocks(bare))
    if border:
        ended, _ = prefilled(engine, tokens[:border])
        assert sequence.recurrent is not None
        np.testing.assert_array_equal(sequence.recurrent.checkpoints[border], blocks(ended))
        ended.close()
    sequence.close()
    bare.close()


def test_sequences_of_one_pass_have_checkpoints_at_borders_of_their_own(engine: Engine) -> None:
    """Three prompts, one of them with two checkpoints, one with none, beside decode rows."""
    prompts = [random_tokens(count, seed) for seed, count in enumerate((150, 67, 30))]
    old, _ = prefilled(engine, random_tokens(640, 9))
    mate = old.fork()
    sequences = [engine.new_sequence() for _ in prompts]
    assert mate.recurrent is not None
    chunks = [Chunk(s, p, "prompt", "last", 64) for s, p in zip(sequences, prompts, strict=True)]
    more = random_tokens(190, 10)
    fourth = old.fork()
    chunks += [Chunk(fourth, more, "prompt", "last", 768), Chunk(mate, [5], "decode", "last")]
    assert fourth.recurrent is not None
    fourth.recurrent._drop_but([])  # so that one is due at once
    result = engine.step(chunks)
    assert result is not None
    logits = result.logits()
    assert [checkpoints(s) for s in sequences] == [[64], [64], []]
    assert checkpoints(fourth) == [704, 768]
    for index, (sequence, prompt) in enumerate(zip(sequences, prompts, strict=True)):
        fresh, expected = prefilled(engine, prompt)
        np.testing.assert_array_equal(logits[index], expected)
        np.testing.assert_array_equal(blocks(sequence), blocks(fresh))
        if len(prompt) > 64:
            assert sequence.truncate(66) == 64
            np.testing.assert_array_equal(engine.prefill(sequence, prompt[64:]), expected)
        fresh.close()
    fresh, expected = prefilled(engine, old.tokens + more)
    np.testing.assert_array_equal(logits[3], expected)
    for back in (700 + 80, 700 + 20):
        at = fourth.truncate(back)
        assert at == (768 if back > 768 else 704)
        again = fourth.fork()
        np.testing.assert_array_equal(engine.prefill(again, fresh.tokens[at:]), expected)
        again.close()
    np.testing.assert_array_equal(logits[4], append(engine, old, [5], "decode")[0])
    for sequence in (old, mate, fresh, fourth, *sequences):
        sequence.close()


def test_a_long_pass_has_few_checkpoints(path: Path) -> None:
    engine = open_cpu_engine(path, kv_dtype=DType.F32, max_rows=4096)
    sequence, _ = prefilled(engine, random_tokens(3000))
    assert checkpoints(sequence) == [768, 1536, 2304, 2944]
    sequence.close()
    shape = engine.state_shape.recurrent
    assert shape is not None
    engine.state_shape.recurrent = replace(shape, budget_bytes=2 * shape.nbytes)
    sequence, _ = prefilled(engine, random_tokens(3000))
    assert len(checkpoints(sequence)) == 2
    assert checkpoints(sequence)[1] == 2944
    sequence.close()
    engine.close()


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_pass_that_is_given_up_keeps_no_checkpoint_of_its_own(engine: Engine, after: int) -> None:
    tokens = random_tokens(PROMPT)
    sequence, _ = prefilled(engine, tokens[:130])
    asked = iter([False] * after)
    chunk = Chunk(sequence, tokens[130:500], "prompt", "last", 448)
    assert engine.step([chunk], lambda: next(asked, True)) is None
    assert checkpoints(sequence) == [128]
    append(engine, sequence, [1], "decode")
    assert checkpoints(sequence) == [128]
    sequence.close()


def test_a_pass_that_cannot_begin_keeps_no_checkpoint(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host refuses the memory for the second sequence's."""
    tokens = random_tokens(100)
    sequences = [engine.new_sequence() for _ in range(2)]
    shape = engine.state_shape.recurrent
    assert shape is not None
    original, calls = shape.memory.landing, iter(range(100))

    def landing(nbytes: int) -> Landing:
        if next(calls) == 1:
            raise CapacityError("no memory")
        return original(nbytes)

    with monkeypatch.context() as patch:
        patch.setattr(shape.memory, "landing", landing, raising=False)
        with pytest.raises(CapacityError):
            engine.step([Chunk(sequence, tokens, "prompt", "last", 64) for sequence in sequences])
    fresh, expected = prefilled(engine, tokens)
    for sequence in sequences:
        append(engine, sequence, [1], "decode")
        assert checkpoints(sequence) == []
        sequence.truncate(0)
        np.testing.assert_array_equal(engine.prefill(sequence, tokens), expected)
        sequence.close()
    fresh.close()


@pytest.mark.parametrize(("length", "kept"), [(700, 700), (699, 640), (640, 640), (639, 512), (512, 512), (511, 0)])
def test_truncation_goes_back_to_the_nearest_checkpoint(engine: Engine, length: int, kept: int) -> None:
    tokens, others = random_tokens(PROMPT), random_tokens(90, seed=1)
    sequence, _ = prefilled(engine, tokens)
    assert sequence.truncate(length) == kept
    assert len(sequence) == kept
    assert all(position <= kept for position in checkpoints(sequence))
    fresh, expected = prefilled(engine, tokens[:kept] + others)
    logits = engine.prefill(sequence, others)
    if kept == PROMPT:  # goes on inside a piece: other sums
        np.testing.assert_allclose(logits, expected, atol=1e-4)
    else:
        np.testing.assert_array_equal(logits, expected)
        np.testing.assert_array_equal(blocks(sequence), blocks(fresh))
    sequence.close()
    fresh.close()


def test_reuse_restarts_where_the_bits_are_those_of_a_fresh_sequence(engine: Engine) -> None:
    tokens, others = random_tokens(PROMPT), random_tokens(70, seed=1)
    sequence, _ = prefilled(engine, tokens)
    assert sequence.fork().reuse(690) == 640
    assert sequence.reuse(PROMPT) == 640
    fresh, expected = prefilled(engine, tokens + others)
    np.testing.assert_array_equal(engine.prefill(sequence, tokens[640:] + others), expected)
    np.testing.assert_array_equal(blocks(sequence), blocks(fresh))
    decoded(engine, sequence, random_tokens(5))
    assert sequence.reuse(len(sequence)) == PROMPT + 75
    assert sequence.reuse(PROMPT + 72) == 768
    sequence.close()
    fresh.close()


def test_a_prompt_that_goes_on_from_an_answer_can_be_taken_back(engine: Engine) -> None:
    tokens, answer, question = random_tokens(100), random_tokens(9, seed=1), random_tokens(50, seed=2)
    sequence, _ = prefilled(engine, tokens)
    decoded(engine, sequence, answer)
    before = blocks(sequence)
    first = engine.prefill(sequence, question)
    assert checkpoints(sequence) == [64, 109, 128]
    assert sequence.reuse(115) == 109
    np.testing.assert_array_equal(blocks(sequence), before)
    np.testing.assert_array_equal(engine.prefill(sequence, question), first)
    sequence.close()


def test_forks_go_their_own_ways(engine: Engine) -> None:
    tokens, left, right = random_tokens(PROMPT), random_tokens(80, seed=1), random_tokens(80, seed=2)
    sequence, _ = prefilled(engine, tokens)
    fork = sequence.fork()
    ours, theirs = [], []
    for start in range(0, 80, 10):  # both in the same passes
        chunks = [
            Chunk(sequence, left[start : start + 10], "decode", "all"),
            Chunk(fork, right[start : start + 10], "decode", "all"),
        ]
        result = engine.step(chunks)
        assert result is not None
        logits = result.logits()
        ours.append(logits[:10])
        theirs.append(logits[10:])
    for continuation, got in ((left, ours), (right, theirs)):
        alone, _ = prefilled(engine, tokens)
        np.testing.assert_array_equal(decoded(engine, alone, continuation), np.concatenate(got))
        alone.close()
    assert fork.truncate(690) == 640
    assert len(sequence) == 780
    np.testing.assert_array_equal(
        engine.prefill(fork, tokens[640:]), engine.prefill(_cut(sequence.fork(), 640), tokens[640:])
    )
    sequence.close()
    fork.close()


def _cut(sequence: Sequence, length: int) -> Sequence:
    assert sequence.truncate(length) == length
    return sequence


@pytest.mark.parametrize("length", [1, 64, 130, PROMPT])
def test_a_saved_state_goes_on_to_the_same_bits(engine: Engine, tmp_path: Path, length: int) -> None:
    tokens = random_tokens(length + 40)
    sequence, _ = prefilled(engine, tokens[:length])
    decoded(engine, sequence, tokens[length : length + 10])
    sequence.save(tmp_path / "state")
    loaded = Sequence.load(tmp_path / "state", engine.state_shape)
    assert loaded.tokens == sequence.tokens
    assert loaded.prompt_length == length
    assert checkpoints(loaded) == checkpoints(sequence)
    np.testing.assert_array_equal(blocks(loaded), blocks(sequence))
    rest = tokens[length + 10 :]
    np.testing.assert_array_equal(decoded(engine, loaded, rest), decoded(engine, sequence, rest))
    assert loaded.truncate(length) == sequence.truncate(length)
    np.testing.assert_array_equal(engine.prefill(loaded, rest), engine.prefill(sequence, rest))
    sequence.close()
    loaded.close()


@pytest.mark.parametrize("name", ["recurrent", "checkpoints", "checkpoint.64"])
def test_a_damaged_state_is_refused(engine: Engine, tmp_path: Path, name: str) -> None:
    sequence, _ = prefilled(engine, random_tokens(70))
    sequence.save(tmp_path / "state")
    with np.load(tmp_path / "state") as archive:
        arrays = dict(archive)
    for damage in (arrays[name][:-1], arrays[name].astype(np.float32), np.zeros((2, 2), arrays[name].dtype), None):
        changed = {key: value for key, value in arrays.items() if key != name}
        if damage is not None and not (name == "checkpoints" and len(damage) == 0):
            changed[name] = damage
        with (tmp_path / "damaged").open("wb") as file:
            np.savez(file, **changed)  # type: ignore[arg-type]
        with pytest.raises(FormatError):
            Sequence.load(tmp_path / "damaged", engine.state_shape)
    sequence.close()


@pytest.mark.parametrize("at", [0, 64, 100, 640])
def test_a_pass_that_is_given_up_leaves_the_newest_checkpoint(engine: Engine, at: int) -> None:
    tokens = random_tokens(PROMPT)
    sequence = engine.new_sequence()
    if at:
        engine.prefill(sequence, tokens[:at])
    asked = iter([False, False, True])
    chunk = Chunk(sequence, tokens[at : at + 20], "prompt", "last")
    assert engine.step([chunk], lambda: next(asked)) is None
    assert len(sequence) == at // CHECKPOINT_BORDER * CHECKPOINT_BORDER
    fresh, expected = prefilled(engine, tokens)
    np.testing.assert_array_equal(engine.prefill(sequence, tokens[len(sequence) :]), expected)
    sequence.close()
    fresh.close()


def test_a_pass_that_fails_leaves_the_newest_checkpoint(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = random_tokens(PROMPT)
    sequence, _ = prefilled(engine, tokens[:130])
    mate, _ = prefilled(engine, tokens[:64])
    original, calls = engine._backend.linear_add, iter(range(100))

    def fail(*arguments: object) -> None:
        if next(calls) == 3:
            raise OSError("the weights are gone")
        original(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(engine._backend, "linear_add", fail)
        with pytest.raises(OSError, match="gone"):
            engine.step([Chunk(sequence, [5], "decode", "last"), Chunk(mate, tokens[64:90], "prompt")])
    assert (len(sequence), len(mate)) == (128, 64)
    for changed in (sequence, mate):
        fresh, expected = prefilled(engine, tokens)
        np.testing.assert_array_equal(engine.prefill(changed, tokens[len(changed) :]), expected)
        fresh.close()
        changed.close()


def test_numbers_that_are_not_finite_do_not_stay_in_the_state(path: Path) -> None:
    engine = open_cpu_engine(path, kv_dtype=DType.F32)
    tokens = random_tokens(80)
    sequence, expected = prefilled(engine, tokens)
    norm = engine._layers[2].vectors["delta_norm"].numpy()
    kept = norm.copy()
    norm[...] = np.nan
    with pytest.raises(NumericError, match=r"layer 2 \(delta_mixer\)"):
        append(engine, sequence, [1], "decode")
    norm[...] = kept
    assert len(sequence) == 0
    np.testing.assert_array_equal(engine.prefill(sequence, tokens), expected)
    engine.close()


def test_a_workspace_smaller_than_a_piece_is_refused(path: Path) -> None:
    with pytest.raises(UsageError, match="max_rows is 63"):
        open_cpu_engine(path, max_rows=63)


def test_small_workspaces_change_no_bit(path: Path, engine: Engine) -> None:
    tokens = random_tokens(300)
    fresh, expected = prefilled(engine, tokens)
    small = open_cpu_engine(path, kv_dtype=DType.F32, max_rows=64)
    sequence, logits = prefilled(small, tokens)
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(blocks(sequence), blocks(fresh))
    small.close()
    fresh.close()


SHAPE = RecurrentShape((DeltaShape(0, 1, 2, 8, 8, 4, False, 1e-6),), HostTileMemory())


@pytest.mark.parametrize("most", [1, 2, 5])
def test_checkpoints_stay_within_their_budget(most: int) -> None:
    """The newest is always there; the others are spread over the sequence."""
    state = RecurrentState(replace(SHAPE, budget_bytes=most * SHAPE.nbytes))
    state.prepare()
    for position in range(64, 64 * 41, 64):
        state.keep(position)
        assert position in state.checkpoints
        assert len(state.checkpoints) <= most
    kept = [0, *sorted(state.checkpoints)]
    assert max(after - before for before, after in pairwise(kept)) <= 2 * 64 * 40 / most
    assert state.held_bytes == SHAPE.nbytes * (1 + len(state.checkpoints))
    state.close()
    assert state.held_bytes == 0


def test_a_budget_below_one_state_keeps_the_newest() -> None:
    state = RecurrentState(replace(SHAPE, budget_bytes=1))
    state.prepare()
    state.keep(64)
    state.keep(128)
    assert list(state.checkpoints) == [128]
    state.close()


@pytest.mark.parametrize("round_", range(4))
def test_any_order_of_uses_leaves_the_state_of_the_tokens(engine: Engine, round_: int) -> None:
    """Sequences that share passes, fork, go back, are given up in the middle and come back from the host: afterwards
    each says what a fresh one says after the same tokens.
    """
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    rng = np.random.default_rng(seed)
    sequences = [engine.new_sequence() for _ in range(3)]
    for step in range(60):
        sequence = sequences[rng.integers(len(sequences))]
        match rng.integers(8):
            case 0 if len(sequence) < 1500:
                engine.prefill(sequence, random_tokens(int(rng.integers(1, 400)), seed=step))
            case 1 | 2:
                mates = rng.permutation(len(sequences))[: rng.integers(1, 4)]
                engine.step(
                    [Chunk(sequences[mate], random_tokens(int(rng.integers(1, 9)), step), "decode") for mate in mates]
                )
            case 3:
                sequence.truncate(int(rng.integers(0, len(sequence) + 1)))
            case 4:
                sequence.reuse(int(rng.integers(0, len(sequence) + 1)))
            case 5:
                old = sequences[0]
                sequences[0] = sequence.fork()
                if old is not sequence:
                    old.close()
            case 6:
                asked = iter([False] * int(rng.integers(0, 3)))
                chunk = Chunk(sequence, random_tokens(70, seed=step), "prompt")
                assert engine.step([chunk], lambda asked=asked: next(asked, True)) is None  # type: ignore[misc]
            case 7 if sequence.recurrent is not None:
                sequence.recurrent.release()
        sequences = list(dict.fromkeys(sequences))
    for sequence in sequences:
        fresh = engine.new_sequence()
        if sequence.tokens:
            engine.prefill(fresh, sequence.tokens)
        expected, got = append(engine, fresh, [7], "decode"), append(engine, sequence, [7], "decode")
        np.testing.assert_allclose(
            got, expected, atol=2e-5 * max(1.0, float(np.abs(expected).max())), err_msg=f"{seed}"
        )
        fresh.close()
        sequence.close()
