"""Prompts through an engine, in one of several ways."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from edge_transformer.engine.chunk import CHUNK_BORDER, Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence as EngineSequence
from edge_transformer.hub.progress import Progress
from edge_transformer.verify.record import Record


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a sequence; the last `decoded` of them take the decode kernels."""

    tokens: list[int]
    decoded: int


@dataclass(frozen=True, slots=True)
class Way:
    """Prompt rows, and decode rows, of a sequence in a pass; sequences in a pass."""

    chunk: int = 512
    decode_rows: int = 1
    together: int = 1


def feed(engine: Engine, prompts: Sequence[Prompt], way: Way, progress: Progress, name: str) -> list[Record]:
    """The logits of every position of each prompt. Shorter ones, fed beside a longer one, decode beside its chunks."""
    sequences = [engine.new_sequence() for _ in prompts]
    try:
        return _feed(engine, sequences, prompts, way, progress, name)
    finally:
        for sequence in sequences:
            sequence.close()


def _feed(
    engine: Engine,
    sequences: Sequence[EngineSequence],
    prompts: Sequence[Prompt],
    way: Way,
    progress: Progress,
    name: str,
) -> list[Record]:
    records = [Record(prompt.tokens, engine.config.vocab_size) for prompt in prompts]
    total = sum(len(prompt.tokens) for prompt in prompts)
    while waiting := [i for i, prompt in enumerate(prompts) if len(sequences[i]) < len(prompt.tokens)]:
        turn = waiting[: way.together]
        most = engine.max_rows // len(turn)
        most = most // CHUNK_BORDER * CHUNK_BORDER or most
        chunks = [_next_chunk(sequences[i], prompts[i], way, most) for i in turn]
        step(engine, chunks, [records[i] for i in turn])
        progress(name, sum(map(len, sequences)), total)
    return records


def step(engine: Engine, chunks: Sequence[Chunk], records: Sequence[Record]) -> None:
    """One pass; the logits of every row go into the chunk's record."""
    starts = [len(chunk.sequence) for chunk in chunks]
    result = engine.step(chunks)
    if result is None:
        raise RuntimeError("a pass that nobody cancelled was given up")
    for rows, logits in result.blocks():
        for (chunk, token), row in zip(rows, logits, strict=True):
            records[chunk].add(starts[chunk] + token, row)


def _next_chunk(sequence: EngineSequence, prompt: Prompt, way: Way, most: int) -> Chunk:
    start, split = len(sequence), len(prompt.tokens) - prompt.decoded
    kind: Literal["prompt", "decode"] = "prompt" if start < split else "decode"
    end = min(start + min(way.chunk, most), split) if kind == "prompt" else start + way.decode_rows
    return Chunk(sequence, prompt.tokens[start:end], kind, "all")
