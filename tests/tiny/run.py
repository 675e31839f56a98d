"""Tiny models through the engine: prompts fed in different ways, the logits of every position collected."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.config import ModelConfig
from edge_transformer.models.read import read_model
from edge_transformer.ops.backend import Backend
from edge_transformer.ops.reference.backend import ReferenceBackend
from edge_transformer.ops.tensor import DType

Kind = Literal["prompt", "decode"]
Pass = list[tuple[int, int, Kind]]
"""What a pass takes: (prompt, number of its next tokens, kind of their rows)."""

ONE_TOKEN_AT_MOST = 72  # so many tokens one by one, the ones before them as a prompt
ODD_CHUNKS = (1, 7, 13, 2, 5, 64, 3)


def make_backend(name: str, threads: int = 1) -> Backend:
    """`name`: reference, cpu, or an instruction set of the CPU backend."""
    if name == "reference":
        return ReferenceBackend()
    return CpuBackend(threads, isa=None if name == "cpu" else name)


def open_engine(path: Path, backend: str = "reference", config: ModelConfig | None = None, threads: int = 1) -> Engine:
    """An engine with an f32 KV cache; `config` replaces what the checkpoint says, to try what a mistake would do."""
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    if config is not None:
        spec = replace(spec, config=config)
    weights = HostWeights(checkpoint, spec)
    return Engine(checkpoint, spec, make_backend(backend, threads), weights, DType.F32, max_rows=1024)


def one_piece(lengths: list[int]) -> Iterator[Pass]:
    for index, length in enumerate(lengths):
        yield [(index, length, "prompt")]


def token_by_token(lengths: list[int]) -> Iterator[Pass]:
    for index, length in enumerate(lengths):
        first = max(length - ONE_TOKEN_AT_MOST, 0)
        if first:
            yield [(index, first, "prompt")]
        for _ in range(length - first):
            yield [(index, 1, "decode")]


def odd_chunks(lengths: list[int]) -> Iterator[Pass]:
    for index, length in enumerate(lengths):
        done = turn = 0
        while done < length:
            count = min(ODD_CHUNKS[turn % len(ODD_CHUNKS)], length - done)
            yield [(index, count, "prompt")]
            done, turn = done + count, turn + 1


def interleaved(lengths: list[int]) -> Iterator[Pass]:
    """Both prompts in the same passes: one in chunks of 11, the other in chunks of 7 and decode rows by turns."""
    done, turn = [0, 0], 0
    while done[0] < lengths[0] or done[1] < lengths[1]:
        other: tuple[int, Kind] = (7, "prompt") if turn % 2 == 0 else (1, "decode")
        step: Pass = []
        for index, (count, kind) in enumerate(((11, "prompt"), other)):
            count = min(count, lengths[index] - done[index])
            if count:
                step.append((index, count, kind))  # type: ignore[arg-type]
                done[index] += count
        turn += 1
        yield step


def border_chunks(lengths: list[int]) -> Iterator[Pass]:
    """Prompts in chunks that end on multiples of 64."""
    for index, length in enumerate(lengths):
        done = turn = 0
        while done < length:
            count = min((64, 128)[turn % 2], length - done)
            yield [(index, count, "prompt")]
            done, turn = done + count, turn + 1


def border_mates(lengths: list[int]) -> Iterator[Pass]:
    """Both prompts in the same passes, in chunks of 64 and of 128."""
    done = [0, 0]
    while done[0] < lengths[0] or done[1] < lengths[1]:
        counts = [min((64, 128)[index], lengths[index] - done[index]) for index in range(2)]
        yield [(index, count, "prompt") for index, count in enumerate(counts) if count]
        done = [before + count for before, count in zip(done, counts, strict=True)]


SCHEDULES = {
    "one_piece": one_piece,
    "token_by_token": token_by_token,
    "odd_chunks": odd_chunks,
    "interleaved": interleaved,
}
"""Ways of feeding that change the logits by rounding at most."""

BORDER_SCHEDULES = {"border_chunks": border_chunks, "border_mates": border_mates}
"""Ways of feeding whose prompt chunks end on multiples of 64."""


def run(engine: Engine, prompts: list[list[int]], schedule: str) -> list[npt.NDArray[np.float32]]:
    """Logits [len(prompt), V] of each prompt."""
    sequences = [engine.new_sequence() for _ in prompts]
    collected = [np.full((len(prompt), engine.config.vocab_size), np.nan, np.float32) for prompt in prompts]
    for step in (SCHEDULES | BORDER_SCHEDULES)[schedule]([len(prompt) for prompt in prompts]):
        starts = [len(sequences[index]) for index, _, _ in step]
        chunks = [
            Chunk(sequences[index], prompts[index][start : start + count], kind, "all")
            for (index, count, kind), start in zip(step, starts, strict=True)
        ]
        result = engine.step(chunks)
        assert result is not None
        for (chunk, token), row in zip(result.rows, result.logits(), strict=True):
            collected[step[chunk][0]][starts[chunk] + token] = row
    for sequence in sequences:
        sequence.close()
    return collected
