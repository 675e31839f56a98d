"""Decode throughput of the scheduler at several numbers of concurrent requests: one pass over the weights serves all.

    python benchmarks/server_concurrency.py                              the demo model on the CPU
    python benchmarks/server_concurrency.py --model FILE --threads 2     another one
    python benchmarks/server_concurrency.py --shape qwen35-9b --format int8
                        a random model of this shape on a GPU, its weights streamed through two slots within 512 MiB
                        besides the recurrent state of the sequences

Requests have random prompts; the rate counts tokens from the time at which the last request has its first one until
the first request ends, so that all decode together. `--drawn` draws tokens (temperature 1) instead of taking the
likeliest. `--long-prompt N` lets a prompt of N tokens arrive while 4 others decode, and says what that does to them.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from edge_transformer import LLM, GenerationConfig
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.answer import Piece
from edge_transformer.engine.core import Engine
from edge_transformer.engine.request import Limits, Request
from edge_transformer.engine.scheduler import Scheduler
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.forward import delta_shapes
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType

ARENA_BYTES = 512 << 20
KV_BYTES = 8 << 30
CONTEXT = 8192
PROMPT_TOKENS = 64


@dataclass
class Heard:
    """When each token of a request came."""

    times: list[float] = field(default_factory=list)
    first: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None

    def progress(self, done: int, cached: int, total: int) -> None:
        """Nothing is made of it."""

    def piece(self, choice: int, piece: Piece) -> None:
        self.times.append(time.perf_counter())
        self.first.set()
        if piece.finish_reason is not None:
            self.done.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self.first.set()
        self.done.set()

    def wait(self, event: threading.Event) -> None:
        event.wait()
        if self.error is not None:
            raise self.error


@dataclass
class Opened:
    """What runs. moved_bytes: weights over the bus each pass, where a GPU streams them."""

    engine: Engine
    scheduler: Scheduler
    moved_bytes: int
    what: str


@contextmanager
def open_on_cpu(model: str, threads: int | None, sequences: int, pass_tokens: int) -> Iterator[Opened]:
    """A model on the CPU."""
    with LLM(model, threads=threads) as llm:
        limits = Limits(sequences=sequences, pass_tokens=pass_tokens)
        scheduler = Scheduler(llm.engine, llm.tokenizer, llm.end_token_ids, llm.context_length, limits, KV_BYTES)
        yield Opened(llm.engine, scheduler, 0, f"{Path(llm.path).name} on the CPU")
        scheduler.stop()


@contextmanager
def open_streamed(shape: str, file_format: str, threads: int, sequences: int, pass_tokens: int) -> Iterator[Opened]:
    """A random model on a GPU, all layers streamed, KV caches in host memory."""
    from random_model import model_name, write_model

    from edge_transformer.cuda.driver import CudaGpu
    from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
    from edge_transformer.placement.plan import Wishes

    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = write_model(Path(folder) / model_name(shape, file_format), shape, file_format, threads)
        checkpoint = open_checkpoint(path)
        spec = read_model(checkpoint)
        states = sequences * sum(delta.block_bytes for delta in delta_shapes(spec.config))
        wishes = Wishes(ARENA_BYTES + states, resident_layers=0, slots=2, kv_offload=True)
        options = GpuOptions(wishes, CONTEXT, sequences=sequences, measure=True)
        host_weights = HostWeights(checkpoint, spec, threads)
        gpu, host = CudaGpu(), CpuBackend(threads)
        engine, plan = open_gpu_engine(gpu, checkpoint, spec, host_weights, host, DType.BF16, options)
        limits = Limits(sequences=sequences, pass_tokens=pass_tokens)
        scheduler = Scheduler(engine, _no_tokenizer(), (), CONTEXT, limits, KV_BYTES)
        what = (
            f"{shape} {file_format}: arena {plan.arena_bytes / 2**20:.0f} MiB, of which {states / 2**20:.0f} MiB are "
            f"recurrent state; {plan.streamed_bytes / 1e9:.2f} GB over the bus each pass, lm_head {plan.head}"
        )
        yield Opened(engine, scheduler, plan.streamed_bytes, what)
        scheduler.stop()
        engine.close()
        checkpoint.close()


def _no_tokenizer() -> Any:
    """A random model has no vocabulary: every token is a letter."""
    return SimpleNamespace(special_ids=frozenset(), strip_first_space=False, token_bytes=lambda token: b"x")


def submit(opened: Opened, prompt_tokens: int, tokens: int, drawn: bool, seed: int) -> Heard:
    heard = Heard()
    prompt = np.random.default_rng(seed).integers(0, opened.engine.config.vocab_size, prompt_tokens).tolist()
    config = GenerationConfig(max_tokens=tokens, temperature=1.0 if drawn else 0.0, ignore_eos=True)
    opened.scheduler.submit(Request(prompt, config, [seed], heard))
    return heard


def throughput(opened: Opened, streams: int, tokens: int, drawn: bool, seed: int) -> tuple[float, float]:
    """Tokens per second of all streams together, seconds of a pass."""
    requests = [submit(opened, PROMPT_TOKENS, tokens, drawn, seed + number) for number in range(streams)]
    for heard in requests:
        heard.wait(heard.first)
    begun = max(heard.times[0] for heard in requests)
    for heard in requests:
        heard.wait(heard.done)
    ended = min(heard.times[-1] for heard in requests)
    counted = [sum(begun < when <= ended for when in heard.times) for heard in requests]
    return sum(counted) / (ended - begun), (ended - begun) / max(counted)


def long_prompt(opened: Opened, length: int, drawn: bool) -> None:
    """What a long prompt does to four answers in the making."""
    others = [submit(opened, PROMPT_TOKENS, 100_000, drawn, number) for number in range(4)]
    for heard in others:
        heard.wait(heard.first)
    time.sleep(1.0)
    arrived = time.perf_counter()
    heard = submit(opened, length, 2, drawn, 99)
    heard.wait(heard.first)
    answered = heard.times[0]
    opened.scheduler.stop()
    pairs = [pair for other in others for pair in pairwise(other.times)]
    before = 1e3 * float(np.median([end - begin for begin, end in pairs if end < arrived]))
    during = [1e3 * (end - begin) for begin, end in pairs if arrived < end <= answered]
    print(
        f"prompt of {length} tokens read in {answered - arrived:.2f} s beside 4 answers, whose tokens come every "
        f"{before:.1f} ms before and every {float(np.median(during)):.1f} ms meanwhile (longest {max(during):.1f})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shape")
    parser.add_argument("--format", default="int8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--streams", default="1,4,16,32")
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--pass-tokens", type=int, default=256)
    parser.add_argument("--long-prompt", type=int)
    parser.add_argument("--drawn", action="store_true")
    options = parser.parse_args()
    streams = [int(number) for number in options.streams.split(",")]
    if options.shape:
        opening = open_streamed(options.shape, options.format, options.threads or 16, max(streams), options.pass_tokens)
    else:
        opening = open_on_cpu(options.model, options.threads, max(streams), options.pass_tokens)
    with opening as opened:
        print(opened.what)
        throughput(opened, min(4, max(streams)), 4, options.drawn, 1000)  # kernels, caches
        alone = 0.0
        for number in streams:
            rate, seconds = throughput(opened, number, options.tokens, options.drawn, 1)
            alone = alone or rate / number
            bus = f", {opened.moved_bytes / seconds / 1e9:.1f} GB/s over the bus" if opened.moved_bytes else ""
            times = f"{rate / alone:5.2f} x one; a pass {1e3 * seconds:.1f} ms{bus}"
            print(f"{number:3d} concurrent: {rate:7.1f} tok/s, {times}", flush=True)
        if options.long_prompt:
            long_prompt(opened, options.long_prompt, options.drawn)


if __name__ == "__main__":
    main()
