"""Stages of gpu_figures.py on Llama shapes: ceilings, 1.04 B in bf16, 8 B in Q8_0 and Q4_0."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

from bus_gaps import traced_decode
from figures import Figure, at_least, at_most, stated
from gpu_measure import (
    bus_rate,
    copy_rates,
    decode_limit,
    decode_rate,
    host_head_rates,
    open_model,
    past_of,
    prefill_rate,
)
from gpu_session import (
    AMPLE,
    DEPTH,
    LONG_DEPTH,
    RESIDENT,
    SMALL,
    Session,
    decode_beside,
    head_choice,
    host_prefill_beside,
    placed,
    prefill_beside,
)

from edge_transformer.engine.core import Engine
from edge_transformer.placement.plan import HeadPlace, Wishes

# ---- ceilings


def ceilings(session: Session) -> Iterator[Figure]:
    """The bus, the GPU's memory, and the CPU reading an output projection, alone and beside copies."""
    for name, rate in copy_rates().items():
        yield stated(f"copy {name}", rate / 1e9, "GB/s")
    wishes = Wishes(AMPLE, resident_layers=0, head=HeadPlace.CPU)
    with open_model(session.model("1b", "hf"), wishes, 1024, session.threads) as opened:
        rates = host_head_rates(opened)
    terms = f"{session.threads} threads; beside copies {rates.beside_copies / 1e9:.1f} GB/s, "
    terms += f"the bus then {rates.bus_meanwhile / 1e9:.1f} GB/s"
    yield stated("1b lm_head in bf16 read by the CPU", rates.alone / 1e9, "GB/s", terms)


# ---- 1.04 B Llama shape, bf16


def small_resident(session: Session) -> Iterator[Figure]:
    """1b in bf16, all resident: decode at two depths, prefill in full accuracy and fast."""
    yield from decode_beside(session, "1b", "BF16", (DEPTH, 8192), least=1.0)
    yield from prefill_beside(session, session.model("1b", "BF16"), "", 8192)


def small_two_slots(session: Session) -> Iterator[Figure]:
    """1b in bf16, two slots: lm_head streamed, on the CPU, and where the planner puts it."""
    path = session.model("1b", "hf")
    bus = bus_rate()
    for what, place in (
        ("streamed", HeadPlace.STREAMED),
        ("on the CPU", HeadPlace.CPU),
        ("as planned", None),
    ):
        # A resident head would leave no bytes to stream, but is not within the asked memory.
        budget = AMPLE if place is not None else 260_000_000
        wishes = Wishes(budget, resident_layers=0, slots=2, kv_offload=False, head=place)
        with open_model(path, wishes, 1024, session.threads) as opened:
            sequence = past_of(opened.engine, DEPTH)
            rate = decode_rate(opened.engine, sequence, 24)
            limit = decode_limit(opened, DEPTH, bus)
            chosen = "" if place is not None else head_choice(opened.plan)
            yield at_most(
                f"two slots, lm_head {what}: weights on the GPU", opened.weight_bytes / 1e6, 110, "MB", chosen
            )
            yield stated(f"two slots, lm_head {what}: decode", rate, "tok/s", limit.terms)
            yield at_least(
                f"two slots, lm_head {what}: of the limit", rate * limit.seconds * 100, 95, "%",
                f"limit {1 / limit.seconds:.2f} tok/s",
            )  # fmt: skip


def small_two_slots_offload(session: Session) -> Iterator[Figure]:
    """1b in bf16, two slots and the KV cache in host memory: the arena at 4 K and at 128 K of context."""
    path = session.model("1b", "hf")
    bus = bus_rate()
    arenas = []
    for context in (4096, 131072):
        wishes = Wishes(150_000_000, resident_layers=0, slots=2, kv_offload=True)
        with open_model(path, wishes, context, session.threads) as opened:
            depth = context - 1024
            sequence = past_of(opened.engine, depth)
            prompt = opened.engine.max_rows
            started = time.perf_counter()
            opened.engine.prefill(sequence, list(range(prompt)))
            chunk = time.perf_counter() - started
            rate = decode_rate(opened.engine, sequence, 6)
            limit = decode_limit(opened, depth + prompt, bus)
            arenas.append(opened.arena_bytes)
            terms = f"allocated once; a prompt chunk of {prompt} took {chunk * 1e3:.0f} ms, {head_choice(opened.plan)}"
            yield at_most(
                f"two slots, KV offload, context {context}: arena", opened.arena_bytes / 1e6, 150, "MB", terms
            )
            yield stated(f"two slots, KV offload, context {context}: decode", rate, "tok/s", limit.terms)
            yield stated(f"two slots, KV offload, context {context}: of the limit", rate * limit.seconds * 100, "%")
    yield at_most("two slots, KV offload: arena at 128 K less arena at 4 K", arenas[1] - arenas[0], 0, "B")


def small_offload(session: Session) -> Iterator[Figure]:
    """1b in bf16, weights resident, the KV cache in host memory, depth 32 768."""
    yield from _offload(session, session.model("1b", "hf"))


def small_offload_peer(session: Session) -> Iterator[Figure]:
    """llama.cpp with the KV cache in host memory at the same depth; its prompt takes it long."""
    options = ("-ngl", "99", "-nkvo", "1", "-p", "0", "-n", "8", "-d", str(LONG_DEPTH), "-r", "1", "-fa", "1")
    peer = session.peer_result(session.model("1b", "BF16"), *options)
    if peer is not None:
        yield stated(f"KV offload, depth {LONG_DEPTH}: llama.cpp", peer.rate, "tok/s", f"-nkvo 1, {peer.options}")


# ---- Llama 3 8B


def large_q8_0(session: Session) -> Iterator[Figure]:
    """8b in Q8_0, all resident, decode."""
    yield from decode_beside(session, "8b", "Q8_0", (DEPTH,), least=1.0)


def large_q4_0(session: Session) -> Iterator[Figure]:
    """8b in Q4_0, all resident, decode."""
    yield from decode_beside(session, "8b", "Q4_0", (DEPTH,), least=1.0)


def large_q8_0_streamed(session: Session) -> Iterator[Figure]:
    """8b in Q8_0, all weights in host memory, an arena of 512 MiB."""
    yield from _large_streamed(session, "Q8_0")


def large_q4_0_streamed(session: Session) -> Iterator[Figure]:
    """8b in Q4_0, all weights in host memory, an arena of 512 MiB."""
    yield from _large_streamed(session, "Q4_0")


def _large_streamed(session: Session, file_format: str) -> Iterator[Figure]:
    path = session.model("8b", file_format)
    bus = bus_rate()
    with open_model(path, Wishes(SMALL, resident_layers=0), 2048, session.threads) as opened:
        yield at_most(f"{file_format}, streamed: arena", opened.arena_bytes / 2**20, 512, "MiB", placed(opened.plan))
        prefill = prefill_rate(opened.engine, 512)
        sequence = past_of(opened.engine, DEPTH)
        rate = decode_rate(opened.engine, sequence, 8)
        limit = decode_limit(opened, DEPTH, bus)
        yield stated(f"{file_format}, streamed: decode", rate, "tok/s", limit.terms)
        terms = f"limit {1 / limit.seconds:.2f} tok/s"
        yield at_least(f"{file_format}, streamed: of the limit", rate * limit.seconds * 100, 95, "%", terms)
    yield from host_prefill_beside(session, f"{file_format}, all weights on the host: prefill of 512", prefill, path)


# ---- cards without tensor cores, and the timeline


def plain_small(session: Session) -> Iterator[Figure]:
    """The sm_75 path forced, 1b in bf16: stated."""
    path = session.model("1b", "hf")
    with open_model(path, RESIDENT, 8192, session.threads, plain=True) as opened:
        yield stated("sm_75 path, 1b: prefill of 2048", prefill_rate(opened.engine, 2048), "tok/s")
        yield from _plain_decode("1b resident", opened.engine)
    bus = bus_rate()
    wishes = Wishes(AMPLE, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.STREAMED)
    with open_model(path, wishes, 8192, session.threads, plain=True) as opened:
        sequence = past_of(opened.engine, DEPTH)
        rate, limit = decode_rate(opened.engine, sequence, 12), decode_limit(opened, DEPTH, bus)
        yield stated("sm_75 path, 1b all streamed: decode", rate, "tok/s", limit.terms)
        yield stated("sm_75 path, 1b all streamed: of the limit", rate * limit.seconds * 100, "%")
    yield from _offload(session, path, plain=True)


def plain_large(session: Session) -> Iterator[Figure]:
    """The sm_75 path forced, 8b in Q4_0: stated."""
    path = session.model("8b", "Q4_0")
    with open_model(path, RESIDENT, 2048, session.threads, plain=True) as opened:
        yield stated("sm_75 path, 8b Q4_0: prefill of 512", prefill_rate(opened.engine, 512), "tok/s")
        yield from _plain_decode("8b Q4_0 resident", opened.engine)
    bus = bus_rate()
    with open_model(path, Wishes(SMALL, resident_layers=0), 2048, session.threads, plain=True) as opened:
        sequence = past_of(opened.engine, DEPTH)
        rate, limit = decode_rate(opened.engine, sequence, 8), decode_limit(opened, DEPTH, bus)
        yield stated("sm_75 path, 8b Q4_0 streamed: decode", rate, "tok/s", limit.terms)
        yield stated("sm_75 path, 8b Q4_0 streamed: prefill of 512", prefill_rate(opened.engine, 512), "tok/s")


def trace(session: Session) -> Iterator[Figure]:
    """How busy the bus is while 1b decodes, layers streamed; where it stood still."""
    path, bus = session.model("1b", "hf"), bus_rate()
    for what, place, offload in (
        ("layers streamed", HeadPlace.GPU, False),
        ("all streamed", HeadPlace.STREAMED, False),
        ("all streamed, KV offload", HeadPlace.STREAMED, True),
        ("layers streamed, lm_head split", HeadPlace.SPLIT, False),
        ("layers streamed, lm_head on the CPU", HeadPlace.CPU, False),
    ):
        wishes = Wishes(AMPLE, resident_layers=0, slots=2, kv_offload=offload, head=place)
        file = None if session.traces is None else session.traces / f"{what.replace(', ', '-').replace(' ', '_')}.json"
        decoded = traced_decode(path, wishes, session.threads, DEPTH, 24, file)
        busy, terms = decoded.summary.bus_share * 100, decoded.text
        if place is HeadPlace.CPU:
            yield stated(f"trace, {what}: bus busy", busy, "%", terms)
        else:
            yield at_least(f"trace, {what}: bus busy", busy, 95, "%", terms)
        yield stated(f"trace, {what}: decode, traced", decoded.rate, "tok/s")
        with open_model(path, wishes, 1024, session.threads) as opened:
            rate = decode_rate(opened.engine, past_of(opened.engine, DEPTH), 24)
        bytes_per_token = decoded.summary.bus_bytes / decoded.summary.passes
        yield stated(f"trace, {what}: decode, not traced", rate, "tok/s")
        yield stated(
            f"trace, {what}: bytes over the bus, not traced", rate * bytes_per_token / bus * 100, "% of its rate"
        )


# ---- parts


def _offload(session: Session, path: Path, plain: bool = False) -> Iterator[Figure]:
    bus = bus_rate()
    wishes = Wishes(AMPLE, resident_layers=-1, kv_offload=True, head=HeadPlace.GPU)
    with open_model(path, wishes, LONG_DEPTH + 1024, session.threads, plain=plain) as opened:
        sequence = past_of(opened.engine, LONG_DEPTH)
        rate, limit = decode_rate(opened.engine, sequence, 16), decode_limit(opened, LONG_DEPTH, bus)
        what = f"{'sm_75 path, ' if plain else ''}KV offload, weights resident, depth {LONG_DEPTH}: decode"
        terms = f"limit {1 / limit.seconds:.1f} tok/s: {limit.terms}"
        yield stated(what, rate, "tok/s", terms) if plain else at_least(what, rate, 45, "tok/s", terms)


def _plain_decode(what: str, engine: Engine) -> Iterator[Figure]:
    sequence = past_of(engine, DEPTH)
    yield stated(f"sm_75 path, {what}: decode at depth {DEPTH}", decode_rate(engine, sequence, 24), "tok/s")
    sequence.close()
