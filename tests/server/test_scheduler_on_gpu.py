"""The scheduler over the emulated GPU: batches of several sequences, streamed weights, KV caches on either side."""

from __future__ import annotations

from pathlib import Path

import pytest

from cuda.opened import BUDGET, MODES
from edge_transformer import GenerationConfig
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.request import Limits
from edge_transformer.engine.scheduler import Scheduler
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.text.load import load_text
from emulator import EmulatedGpu
from server.tiny_server import submit, write_chat_model

ROWS = 80
PROMPTS = [list(range(5, 75)), list(range(40, 45)), list(range(5, 40)), [7]]
PROMPTS += [[number, number + 1] for number in range(10, 17)]


def answer_alone(engine: Engine, prompt: list[int], count: int) -> list[int]:
    sequence = engine.new_sequence()
    logits = engine.prefill(sequence, prompt)
    ids: list[int] = []
    while True:
        assert logits is not None
        ids.append(int(logits.argmax()))
        if len(ids) == count:
            sequence.close()
            return ids
        result = engine.step([Chunk(sequence, ids[-1:], "decode", "last")])
        assert result is not None
        logits = result.logits()[0]


@pytest.mark.parametrize(("mode", "family", "sequences"), [
    ("all resident", "llama", 3),
    ("all resident", "qwen3_5", 3),
    ("all streamed, KV cache on the host", "qwen3_5", 3),
    ("all streamed, output projection too", "llama", 11),
])  # fmt: skip
def test_answers_are_those_given_alone(tmp_path: Path, mode: str, family: str, sequences: int) -> None:
    checkpoint = open_checkpoint(write_chat_model(tmp_path / family, family, context=256))
    spec = read_model(checkpoint)
    text = load_text(checkpoint)
    options = GpuOptions(MODES[mode], 256, sequences=sequences)
    weights = HostWeights(checkpoint, spec)
    engine, _ = open_gpu_engine(
        EmulatedGpu(3, capability=(7, 5)), checkpoint, spec, weights, CpuBackend(1), DType.F32, options, max_rows=ROWS
    )
    prompts = PROMPTS[: sequences + 1]
    expected = [answer_alone(engine, prompt, 5) for prompt in prompts]
    scheduler = Scheduler(engine, text.tokenizer, text.end_token_ids, 256, Limits(sequences, pass_tokens=64), BUDGET)
    config = GenerationConfig(max_tokens=5, ignore_eos=True)
    heard = [submit(scheduler, prompt, config)[1] for prompt in prompts]
    assert [answer.wait(120).ids() for answer in heard] == expected
    assert scheduler.statistics.batch_sequences.sum > scheduler.statistics.passes
    for cached in (0, 64):  # the first time others may have taken its memory
        _, again = submit(scheduler, PROMPTS[0], config)
        assert again.wait(120).ids() == expected[0]
        assert again.cached >= cached
    scheduler.stop()
    assert scheduler.memory.used_bytes == 0
    engine.close()
