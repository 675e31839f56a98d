"""Stages of gpu_figures.py on the Qwen3.5-9B shape: 24 gated-delta layers and 8 of full attention."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from bus_gaps import traced_decode
from figures import Figure, at_least, at_most, stated
from gpu_measure import Opened, bus_rate, decode_limit, decode_rate, open_model, past_of, prefill_rate, random_tokens
from gpu_session import (
    AMPLE,
    DEPTH,
    LONG_DEPTH,
    RESIDENT,
    SMALL,
    Session,
    decode_beside,
    host_prefill_beside,
    placed,
    prefill_beside,
)
from quantization_error import Tally, log_softmax

from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence
from edge_transformer.placement.plan import HeadPlace, Wishes

SHAPE = "qwen35-9b"
LONGEST = 262144
LEAST = Wishes(SMALL, resident_layers=0, slots=2, kv_offload=True)

COMPARED = 1024
"""Positions at which models are compared."""

SOME_LAYERS = 10

PROBE_PROMPT, PROBE_TOKENS = 600, 6
"""Prompt tokens, three whole chunk borders and a rest of one, and decoded ones of the comparison of bits."""

NEAR_TIE = 1e-3

Logits = npt.NDArray[np.float32]


# ---- everything in host memory, half a gigabyte on the GPU


def streamed(session: Session) -> Iterator[Figure]:
    """int8 and int4, two slots, KV cache in host memory, an arena of 512 MiB: decode, prefill of 512, their ratio."""
    rates = {}
    for choice in ("int8", "int4"):
        path = session.model(SHAPE, choice)
        bus = bus_rate()
        with open_model(path, LEAST, LONGEST, session.threads) as opened:
            arena = opened.arena_bytes / 2**20
            yield at_most(f"{choice}, streamed: arena, context {LONGEST}", arena, 512, "MiB", _ledger(opened))
            terms = f"passes of {opened.engine.max_rows} rows, {placed(opened.plan)}"
            yield stated(f"{choice}, streamed: prefill of 512", prefill_rate(opened.engine, 512), "tok/s", terms)
            sequence = past_of(opened.engine, DEPTH)
            rates[choice] = yield from _decode(opened, f"{choice}, streamed", sequence, bus, 8)
            wishes = replace(LEAST, head=opened.plan.head)  # chosen by measured rates, which may differ next time
        arenas = []
        for context in (LONGEST, 4096):
            with open_model(path, wishes, context, session.threads) as opened:
                arenas.append(opened.arena_bytes)
        yield at_most(f"{choice}, streamed: arena at {LONGEST} less arena at 4096", arenas[0] - arenas[1], 0, "B")
    yield stated("streamed: decode of int4 over int8", rates["int4"] / rates["int8"], "x", "bytes of layers allow 1.99")


def streamed_row(session: Session) -> Iterator[Figure]:
    """int8 with a scale per row, as `streamed`: the 6.95 GB of layers that 7.9 tok/s are reckoned from."""
    path, bus = session.model(SHAPE, "int8-row"), bus_rate()
    with open_model(path, LEAST, LONGEST, session.threads) as opened:
        yield at_most("int8-row, streamed: arena", opened.arena_bytes / 2**20, 512, "MiB", placed(opened.plan))
        yield stated("int8-row, streamed: prefill of 512", prefill_rate(opened.engine, 512), "tok/s")
        yield from _decode(opened, "int8-row, streamed", past_of(opened.engine, DEPTH), bus, 8)


def long_context(session: Session) -> Iterator[Figure]:
    """int8 at a depth of 32 768, KV cache in host memory: all streamed within 512 MiB, then all resident."""
    path, bus = session.model(SHAPE, "int8"), bus_rate()
    for what, wishes in (
        ("streamed", LEAST),
        ("resident", Wishes(AMPLE, resident_layers=-1, kv_offload=True, head=HeadPlace.GPU)),
    ):
        name = f"int8, {what}, KV offload, depth {LONG_DEPTH}"
        with open_model(path, wishes, LONGEST, session.threads) as opened:
            sequence = past_of(opened.engine, LONG_DEPTH)
            if what == "streamed":
                yield at_most(f"{name}: arena", opened.arena_bytes / 2**20, 512, "MiB", placed(opened.plan))
                yield at_most(f"{name}: KV cache in host memory", opened.kv_bytes(1), 32768, "B a token")
                started = time.perf_counter()
                opened.engine.prefill(sequence, random_tokens(opened.engine, 512))
                took = time.perf_counter() - started
                yield stated(f"{name}: a prompt chunk of 512", took * 1e3, "ms")
            yield from _decode(opened, name, sequence, bus, 6, asked=what == "streamed")


def host_prefill(session: Session) -> Iterator[Figure]:
    """Prefill of 512 with all weights in host memory, beside llama.cpp with no layer on the GPU; the same files."""
    for file_format in ("Q8_0", "Q4_0"):
        path = session.model(SHAPE, file_format)
        with open_model(path, LEAST, 4096, session.threads) as opened:
            rate, terms = prefill_rate(opened.engine, 512), placed(opened.plan)
        what = f"{SHAPE} {file_format}, all weights on the host: prefill of 512"
        yield from host_prefill_beside(session, what, rate, path, terms)


def trace(session: Session) -> Iterator[Figure]:
    """How busy the bus is while int8 decodes, streamed within 512 MiB; where it stood still."""
    path = session.model(SHAPE, "int8")
    for head in (HeadPlace.STREAMED, HeadPlace.SPLIT, HeadPlace.CPU):
        file = None if session.traces is None else session.traces / f"9b-lm_head-{head}.json"
        decoded = traced_decode(path, replace(LEAST, head=head), session.threads, DEPTH, 8, file)
        what, busy = f"int8, streamed, lm_head: {head}", decoded.summary.bus_share * 100
        if head is not HeadPlace.CPU:
            yield at_least(f"{what}: bus busy", busy, 95, "%", decoded.text)
        else:
            yield stated(f"{what}: bus busy", busy, "%", decoded.text)
        yield stated(f"{what}: decode, traced", decoded.rate, "tok/s")


def plain(session: Session) -> Iterator[Figure]:
    """The sm_75 path forced, int4: stated."""
    path, bus = session.model(SHAPE, "int4"), bus_rate()
    with open_model(path, RESIDENT, 2048, session.threads, plain=True) as opened:
        yield stated("sm_75 path, int4 resident: prefill of 512", prefill_rate(opened.engine, 512), "tok/s")
        rate = decode_rate(opened.engine, past_of(opened.engine, DEPTH), 24)
        yield stated("sm_75 path, int4 resident: decode", rate, "tok/s")
    with open_model(path, LEAST, 2048, session.threads, plain=True) as opened:
        yield stated("sm_75 path, int4 streamed: prefill of 512", prefill_rate(opened.engine, 512), "tok/s")
        yield from _decode(opened, "sm_75 path, int4 streamed", past_of(opened.engine, DEPTH), bus, 8, asked=False)


# ---- everything on the GPU


def resident_q8_0(session: Session) -> Iterator[Figure]:
    """Q8_0, all resident: decode, and prefill of 4096 in full accuracy and fast."""
    yield from _resident(session, "Q8_0")


def resident_q4_0(session: Session) -> Iterator[Figure]:
    """Q4_0, all resident: decode, and prefill of 4096 in full accuracy and fast."""
    yield from _resident(session, "Q4_0")


def resident_own(session: Session) -> Iterator[Figure]:
    """int8 and int4 of `ete quantize`, all resident: decode and prefill of 4096, stated."""
    for choice in ("int8", "int4"):
        with open_model(session.model(SHAPE, choice), RESIDENT, 4096 + DEPTH, session.threads) as opened:
            yield stated(f"{choice}, resident: prefill of 4096", prefill_rate(opened.engine, 4096), "tok/s")
            sequence = past_of(opened.engine, DEPTH)
            yield stated(f"{choice}, resident: decode", decode_rate(opened.engine, sequence, 64), "tok/s")


def _resident(session: Session, file_format: str) -> Iterator[Figure]:
    yield from decode_beside(session, SHAPE, file_format, (DEPTH,), least=1.0)
    yield from prefill_beside(session, session.model(SHAPE, file_format), f"{SHAPE} {file_format} resident: ", 4096)


# ---- what is right


def quantization(session: Session) -> Iterator[Figure]:
    """int8 and int4 against the bf16 weights they were made of, all run here, over 1024 positions."""
    started = time.perf_counter()
    folders = {"bf16": session.model(SHAPE, "hf")}
    for choice in ("int8", "int4"):
        folders[choice] = session.quantized(SHAPE, choice)
    yield stated("bf16 written, int8 and int4 quantized", time.perf_counter() - started, "s")
    expected: list[npt.NDArray[np.float32]] = []
    for name, path in folders.items():
        tally = Tally()
        with open_model(path, RESIDENT, COMPARED, session.threads) as opened:
            for number, block in enumerate(_teacher_forced(opened.engine)):
                if name == "bf16":
                    expected.append(block)
                else:
                    tally.add(log_softmax(expected[number]), log_softmax(block), [None] * len(block))
        if name == "bf16":
            yield stated("bf16: standard deviation of the logits", float(np.std(expected[0])), "")
            continue
        terms = f"{tally.positions} positions; the largest of one {tally.largest:.1e}"
        yield stated(f"{name} against bf16: mean KL", tally.divergence / tally.positions, "nats", terms)
        yield stated(f"{name} against bf16: top-1 agreement", tally.agreed / tally.positions * 100, "%")
        yield stated(f"{name} against bf16: largest bf16 margin at a disagreement", tally.margin, "nats")


def _teacher_forced(engine: Engine) -> Iterator[Logits]:
    """Logits of COMPARED positions, some rows at a time."""
    ids, sequence = random_tokens(engine, COMPARED), engine.new_sequence()
    while (done := len(sequence)) < len(ids):
        count = engine.chunk_length(done, len(ids) - done)
        result = engine.step([Chunk(sequence, ids[done : done + count], "prompt", "all")])
        if result is None:
            raise AssertionError("a pass was given up")
        for _, logits in result.blocks():
            yield logits
    sequence.close()


def placements(session: Session) -> Iterator[Figure]:
    """int8: logits of a prompt and of some decoded tokens, bit for bit the same wherever weights and KV cache lie."""
    path = session.model(SHAPE, "int8")
    first: list[Logits] = []
    for what, wishes in (
        ("all resident", RESIDENT),
        ("all streamed", Wishes(AMPLE, 0, slots=2, kv_offload=False, head=HeadPlace.GPU)),
        (
            f"{SOME_LAYERS} resident, 3 slots, KV offload",
            Wishes(AMPLE, SOME_LAYERS, slots=3, kv_offload=True, head=HeadPlace.GPU),
        ),
        ("lm_head streamed", Wishes(AMPLE, -1, slots=2, kv_offload=False, head=HeadPlace.STREAMED)),
        ("512 MiB, lm_head streamed", Wishes(SMALL, 0, slots=2, kv_offload=True, head=HeadPlace.STREAMED)),
        ("512 MiB, lm_head split", Wishes(SMALL, 0, slots=2, kv_offload=True, head=HeadPlace.SPLIT)),
        ("512 MiB, lm_head on the CPU", Wishes(SMALL, 0, slots=2, kv_offload=True, head=HeadPlace.CPU)),
    ):
        with open_model(path, wishes, 4096, session.threads) as opened:
            probes = {"": _probe(opened.engine, opened.engine.max_rows)}
            if wishes is RESIDENT:
                probes[", chunks of 64"] = _probe(opened.engine, 64)
            terms = f"arena {opened.plan.arena_bytes / 2**20:.0f} MiB"
        first = first or probes[""]
        for how, probe in probes.items():
            if wishes.head in (HeadPlace.SPLIT, HeadPlace.CPU):
                yield at_most(f"{what}: likeliest tokens that differ", _other_ids(first, probe), 0, "", terms)
                yield at_most(f"{what}: difference of logits", _difference(first, probe), 1e-5, "of the largest")
            else:
                others = sum(not np.array_equal(a, b) for a, b in zip(first, probe, strict=True))
                text = f"of {len(first)}, bits compared; {terms}"
                yield at_most(f"{what}{how}: positions whose logits differ", others, 0, "", text)


def _probe(engine: Engine, chunk: int) -> list[Logits]:
    """Logits of the last token of a prompt, fed in chunks, and of tokens decoded after it."""
    ids, sequence = random_tokens(engine, PROBE_PROMPT + PROBE_TOKENS), engine.new_sequence()
    prompt, decoded = ids[:PROBE_PROMPT], ids[PROBE_PROMPT:]
    logits = []
    chunks = [Chunk(sequence, prompt[at : at + chunk], "prompt", "last") for at in range(0, len(prompt), chunk)]
    chunks += [Chunk(sequence, [token], "decode", "last") for token in decoded]
    for part in chunks:
        result = engine.step([part])
        if result is None:
            raise AssertionError("a pass was given up")
        logits.append(result.logits()[0])
    sequence.close()
    return logits[-1 - len(decoded) :]


def _difference(first: list[Logits], other: list[Logits]) -> float:
    """The largest, over max(1, largest |logit|)."""
    largest = max(float(np.abs(logits).max()) for logits in first)
    return max(float(np.abs(a - b).max()) for a, b in zip(first, other, strict=True)) / max(1.0, largest)


def _other_ids(first: list[Logits], other: list[Logits]) -> int:
    """Positions with another likeliest token, near ties apart."""
    return sum(int(a[a.argmax()] - a[b.argmax()] > NEAR_TIE) for a, b in zip(first, other, strict=True))


# ---- parts


def _decode(
    opened: Opened, what: str, sequence: Sequence, bus: float, tokens: int, asked: bool = True
) -> Generator[Figure, None, float]:
    """Decode on from `sequence`, and its share of what the buses allow; gives the rate."""
    depth = len(sequence)
    rate, limit = decode_rate(opened.engine, sequence, tokens), decode_limit(opened, depth, bus)
    yield stated(f"{what}: decode", rate, "tok/s", limit.terms)
    share, terms = rate * limit.seconds * 100, f"limit {1 / limit.seconds:.2f} tok/s"
    if asked:
        yield at_least(f"{what}: of the limit", share, 95, "%", terms)
    else:
        yield stated(f"{what}: of the limit", share, "%", terms)
    return rate


def _ledger(opened: Opened) -> str:
    """The plan, line by line."""
    lines = [f"{label} {nbytes / 2**20:.1f}" for label, nbytes in opened.plan.ledger if nbytes]
    return f"MiB: {', '.join(lines)}; {placed(opened.plan)}"
