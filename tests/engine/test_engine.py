"""The engine on the CPU: row invariance bit for bit, sequences that fork, truncate and come back, faults that are
named.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence
from edge_transformer.errors import CapacityError, ContextLengthError, FileChangedError, NumericError, UsageError
from edge_transformer.ops.tensor import DType
from engine.tiny_engine import append, in_chunks, long_context_model, open_cpu_engine, random_tokens, write_model
from tiny.models import MODELS
from tiny.weights import make_weights
from tiny.write import write_hf

# llama: plain; gemma2: both softcaps, alternating windows, post-norms; gemma3: q/k norm and two ropes
FAMILIES = {"llama": None, "gemma2": 600, "gemma3": 300}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {name: write_model(folder, long_context_model(name, window)) for name, window in FAMILIES.items()}


@pytest.fixture(scope="module", params=list(FAMILIES))
def engine(request: pytest.FixtureRequest, models: dict[str, Path]) -> Iterator[Engine]:
    engine = open_cpu_engine(models[request.param])
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def llama(models: dict[str, Path]) -> Iterator[Engine]:
    engine = open_cpu_engine(models["llama"])
    yield engine
    engine.close()


def test_chunk_sizes_change_no_bit(engine: Engine) -> None:
    tokens = random_tokens(1100)
    whole = in_chunks(engine, tokens, 512)
    for rows in (64, 128, 37):
        assert np.array_equal(whole, in_chunks(engine, tokens, rows)), f"chunks of {rows}"


@pytest.mark.parametrize("kv_dtype", [DType.F32, DType.BF16])
def test_thread_counts_change_no_bit(models: dict[str, Path], kv_dtype: DType) -> None:
    tokens = random_tokens(600, 1)
    results = []
    for threads in (1, 2, 3):
        engine = open_cpu_engine(models["gemma2"], threads, kv_dtype)
        sequence = engine.new_sequence()
        results.append([append(engine, sequence, tokens[:512]), append(engine, sequence, tokens[512:599])])
        results[-1].append(append(engine, sequence, tokens[599:], "decode"))
        sequence.close()
        engine.close()
    for other in results[1:]:
        for ours, theirs in zip(results[0], other, strict=True):
            assert np.array_equal(ours, theirs)


def test_batch_mates_change_no_bit(engine: Engine) -> None:
    """Three sequences, decode rows and prompt chunks in the same passes, against each of them alone."""
    prompts = [random_tokens(530, 2), random_tokens(7, 3), random_tokens(64, 4)]
    continuations = [random_tokens(12, 5), random_tokens(12, 6), random_tokens(12, 7)]
    alone = []
    for prompt, continuation in zip(prompts, continuations, strict=True):
        sequence = engine.new_sequence()
        for start in range(0, len(prompt), 500):
            append(engine, sequence, prompt[start : start + 500])
        alone.append(np.concatenate([append(engine, sequence, [token], "decode") for token in continuation]))
        sequence.close()
    sequences = [engine.new_sequence() for _ in prompts]
    pending = [list(prompt) for prompt in prompts]
    together: list[list[np.ndarray]] = [[] for _ in prompts]
    random = np.random.default_rng(8)
    while any(len(rows) < 12 for rows in together):
        chunks, owners = [], []
        for index, sequence in enumerate(sequences):
            if pending[index]:
                count = int(random.integers(1, 120))
                chunks.append(Chunk(sequence, pending[index][:count], "prompt", "none"))
                pending[index] = pending[index][count:]
            elif len(together[index]) < 12:
                chunks.append(Chunk(sequence, [continuations[index][len(together[index])]], "decode", "last"))
            else:
                continue
            owners.append(index)
        result = engine.step(chunks)
        assert result is not None
        for (chunk, _), logits in zip(result.rows, result.logits() if result.rows else [], strict=True):
            together[owners[chunk]].append(logits)
    for ours, theirs in zip(together, alone, strict=True):
        assert np.array_equal(np.stack(ours), theirs)
    for sequence in sequences:
        sequence.close()


def test_one_pass_with_several_decode_rows_of_one_sequence(llama: Engine) -> None:
    """Decode rows that follow each other in one pass equal the same tokens fed one a pass (drafts will need it)."""
    prompt, tokens = random_tokens(100, 9), random_tokens(11, 10)
    one, many = llama.new_sequence(), llama.new_sequence()
    append(llama, one, prompt)
    append(llama, many, prompt)
    singly = np.concatenate([append(llama, one, [token], "decode") for token in tokens])
    assert np.array_equal(append(llama, many, tokens, "decode"), singly)
    one.close()
    many.close()


@pytest.mark.parametrize("length", [1, 511, 512, 700])
def test_forks_continue_as_if_alone(engine: Engine, length: int) -> None:
    prompt, first, second = random_tokens(length, 11), random_tokens(30, 12), random_tokens(30, 13)
    original = engine.new_sequence()
    for start in range(0, length, 512):
        append(engine, original, prompt[start : start + 512])
    fork = original.fork()
    ours = [append(engine, original, first), append(engine, fork, second)]
    for logits, continuation in zip(ours, (first, second), strict=True):
        fresh = in_chunks(engine, prompt + continuation, 512)[length:]
        assert np.array_equal(logits, fresh)
    original.close()
    assert np.array_equal(append(engine, fork, first[:3]), in_chunks(engine, prompt + second + first[:3], 512)[-3:])
    fork.close()


def test_truncated_sequence_continues_as_if_never_longer(engine: Engine) -> None:
    tokens, other = random_tokens(900, 14), random_tokens(20, 15)
    sequence = engine.new_sequence()
    for start in range(0, 900, 300):
        append(engine, sequence, tokens[start : start + 300])
    kept = sequence.truncate(870)
    assert kept == 870
    assert np.array_equal(append(engine, sequence, other), in_chunks(engine, tokens[:870] + other, 512)[870:])
    sequence.close()


def test_saved_sequence_continues_in_another_engine(models: dict[str, Path], engine: Engine, tmp_path: Path) -> None:
    tokens, more = random_tokens(700, 16), random_tokens(9, 17)
    sequence = engine.new_sequence()
    append(engine, sequence, tokens[:512])
    append(engine, sequence, tokens[512:])
    sequence.save(tmp_path / "state")
    expected = append(engine, sequence, more)
    loaded = Sequence.load(tmp_path / "state", engine.state_shape)
    assert np.array_equal(append(engine, loaded, more), expected)
    loaded.close()
    sequence.close()


def test_bf16_cache_differs_from_f32_cache_by_rounding_only(models: dict[str, Path]) -> None:
    tokens = random_tokens(200, 18)
    f32, bf16 = (open_cpu_engine(models["llama"], kv_dtype=dtype) for dtype in (DType.F32, DType.BF16))
    exact, rounded = in_chunks(f32, tokens, 512), in_chunks(bf16, tokens, 512)
    difference = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 1e-5 < difference < 5e-2
    f32.close()
    bf16.close()


def test_prefill_cuts_chunks_at_absolute_borders(llama: Engine) -> None:
    assert llama.chunk_length(0, 600) == 512
    assert llama.chunk_length(10, 600) == 502
    assert llama.chunk_length(10, 512) == 512
    assert llama.chunk_length(70, 600) == 506


def test_cancelled_pass_changes_nothing(llama: Engine) -> None:
    sequence = llama.new_sequence()
    tokens = random_tokens(40, 19)
    append(llama, sequence, tokens[:20])
    calls: list[int] = []

    def at_the_second_layer() -> bool:
        calls.append(1)
        return len(calls) == 2

    assert llama.step([Chunk(sequence, tokens[20:], "prompt", "last")], at_the_second_layer) is None
    assert len(calls) == 2
    assert sequence.tokens == tokens[:20]
    assert np.array_equal(append(llama, sequence, tokens[20:]), in_chunks(llama, tokens, 512)[20:])
    sequence.close()


def test_misuse_is_named(llama: Engine) -> None:
    sequence = llama.new_sequence()
    with pytest.raises(UsageError, match="at least one token"):
        llama.step([])
    with pytest.raises(UsageError, match="at least one token"):
        llama.step([Chunk(sequence, [], "prompt")])
    with pytest.raises(UsageError, match="two chunks"):
        llama.step([Chunk(sequence, [1], "prompt"), Chunk(sequence, [2], "decode")])
    with pytest.raises(UsageError, match=r"token 131 .*0\.\.130"):
        llama.step([Chunk(sequence, [131], "prompt")])
    with pytest.raises(UsageError, match="token -1"):
        llama.step([Chunk(sequence, [-1], "prompt")])
    with pytest.raises(CapacityError, match="513 rows"):
        llama.step([Chunk(sequence, [1] * 513, "prompt")])
    assert len(sequence) == 0


def test_logits_of_an_earlier_pass_are_not_given_out(llama: Engine) -> None:
    """They lie where the later pass has put its own."""
    first, second = llama.new_sequence(), llama.new_sequence()
    tokens = random_tokens(20, 20)
    expected = in_chunks(llama, tokens, 512)
    stale = llama.step([Chunk(first, tokens, "prompt", "all")])
    append(llama, second, tokens[::-1])
    assert stale is not None
    with pytest.raises(UsageError, match="until the next pass"):
        stale.logits()
    first.truncate(0)
    kept = llama.step([Chunk(first, tokens, "prompt", "all")])
    assert kept is not None
    kept.keep()
    append(llama, second, tokens[::-1])
    assert np.array_equal(kept.logits(), expected)
    first.close()
    second.close()


def test_likeliest_tokens_are_those_of_the_logits(tmp_path: Path) -> None:
    """Also of equal ones the lowest: every row of the output projection is there twice."""
    weights = make_weights(MODELS["llama"])
    weights["lm_head.weight"][70:130] = weights["lm_head.weight"][5:65]
    engine = open_cpu_engine(write_hf(tmp_path / "model", MODELS["llama"].config, weights))
    sequence = engine.new_sequence()
    result = engine.step([Chunk(sequence, random_tokens(21), "prompt", "all")])
    assert result is not None
    expected = result.logits().argmax(axis=1).tolist()
    assert result.likeliest() == expected
    result.keep()
    engine.step([Chunk(sequence, [1], "decode", "last")])
    assert result.likeliest() == expected
    assert not any(70 <= token < 130 for token in expected)
    sequence.close()
    engine.close()


def test_closed_engine_makes_no_pass(models: dict[str, Path]) -> None:
    engine = open_cpu_engine(models["llama"])
    sequence = engine.new_sequence()
    result = engine.step([Chunk(sequence, [1, 2], "prompt", "last")])
    engine.close()
    assert result is not None
    with pytest.raises(UsageError, match="has been closed"):
        result.logits()
    with pytest.raises(UsageError, match="has been closed"):
        engine.step([Chunk(sequence, [3], "decode")])


def test_context_is_not_exceeded(models: dict[str, Path]) -> None:
    engine = open_cpu_engine(models["llama"])
    sequence = engine.new_sequence()
    for start in range(0, 4096, 512):
        result = engine.step([Chunk(sequence, random_tokens(512, start), "prompt")])
        assert result is not None
    with pytest.raises(ContextLengthError, match="4097 tokens exceed the context of 4096"):
        engine.step([Chunk(sequence, [1], "decode")])
    assert len(sequence) == 4096
    sequence.close()
    engine.close()


@pytest.mark.parametrize(
    ("tensor", "where"),
    [
        ("model.embed_tokens.weight", "token embeddings"),
        ("model.layers.1.self_attn.o_proj.weight", r"layer 1 \(mixer\)"),
        ("model.layers.2.mlp.down_proj.weight", r"layer 2 \(down\)"),
        ("lm_head.weight", "lm_head"),
    ],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_values_that_are_not_finite_are_located(tmp_path: Path, tensor: str, where: str, value: float) -> None:
    weights = make_weights(MODELS["llama"])
    weights[tensor][5, 3] = value
    engine = open_cpu_engine(write_hf(tmp_path / "model", MODELS["llama"].config, weights))
    sequence = engine.new_sequence()
    with pytest.raises(NumericError, match=where):
        append(engine, sequence, [5, 6, 7])
    result = engine.step([Chunk(sequence, [5], "decode", "last")])
    assert result is not None
    with pytest.raises(NumericError, match=where):
        result.likeliest()
    sequence.close()
    engine.close()


def test_file_that_changes_under_the_mapping_is_an_error(tmp_path: Path) -> None:
    path = write_model(tmp_path, MODELS["llama"])
    engine = open_cpu_engine(path)
    sequence = engine.new_sequence()
    append(engine, sequence, [1, 2, 3])
    file = path / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    with pytest.raises(FileChangedError, match=r"model\.safetensors"):
        append(engine, sequence, [4])
    assert sequence.tokens == [1, 2, 3]
    sequence.close()
    engine.close()
