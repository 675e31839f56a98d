"""What the stages of gpu_figures.py share: the session with its models, and figures that several of them take."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from figures import Figure, beside, stated
from gpu_measure import decode_rate, open_model, prefill_rate
from llama_bench import PeerResult, peer_rate
from random_model import QUANTIZATIONS, model_name, write_model

from edge_transformer.engine.quantize import quantize_model
from edge_transformer.errors import CapacityError
from edge_transformer.placement.plan import HeadPlace, Plan, Wishes

AMPLE = 100 << 30
SMALL = 512 << 20
RESIDENT = Wishes(AMPLE, resident_layers=-1, kv_offload=False, head=HeadPlace.GPU)
TOKENS = 64
DEPTH = 512
LONG_DEPTH = 32768


@dataclass(frozen=True, slots=True)
class Session:
    """A stage's surroundings. models: folder where models are made and found again. peer: llama-bench, None to leave it
    out. traces: where timelines go, None to keep none. real: files of real models by the name of their golden answers.
    """

    models: Path
    threads: int
    peer: Path | None = None
    traces: Path | None = None
    real: dict[str, Path] = field(default_factory=dict)
    _used: set[Path] = field(default_factory=set)

    def model(self, shape: str, file_format: str) -> Path:
        """A random model, made where it is not there yet. Where there is no room, models that this stage has not used
        make it.
        """
        path = self.models / model_name(shape, file_format)
        return self._made(path, lambda: write_model(path, shape, file_format, self.threads))

    def quantized(self, shape: str, choice: str) -> Path:
        """The model in bf16, quantized as `ete quantize` does it: what may be compared with it."""
        source = self.model(shape, "hf")
        path = self.models / f"{shape}-{choice}-of-hf"
        return self._made(path, lambda: quantize_model(source, path, QUANTIZATIONS[choice], self.threads).path)

    def peer_result(self, model: Path, *options: str) -> PeerResult | None:
        """The best of llama-bench's tests, None without it."""
        return None if self.peer is None else peer_rate(self.peer, model, "-t", str(self.threads), *options)

    def _made(self, path: Path, make: Callable[[], Path]) -> Path:
        self._used.add(path)
        if path.exists():
            return path
        try:
            return make()
        except (OSError, CapacityError):
            others = [other for other in self.models.iterdir() if other not in self._used]
            if not others:
                raise
            for other in others:
                shutil.rmtree(other) if other.is_dir() else other.unlink()
            return make()


Stage = Callable[[Session], Iterator[Figure]]


def head_choice(plan: Plan) -> str:
    """Where a plan puts the output projection, and by what."""
    if plan.rates is None:
        return f"lm_head: {plan.head}"
    bus, host = plan.rates.bus / 1e9, plan.rates.host_head / 1e9
    return f"lm_head: {plan.head}, chosen by the bus's {bus:.1f} GB/s and the CPU's {host:.1f} GB/s"


def placed(plan: Plan) -> str:
    """Slots, output projection and KV cache of a plan."""
    return f"{plan.slots} slots of {plan.slot_bytes / 1e6:.1f} MB, {head_choice(plan)}, KV cache: {plan.kv}"


def beside_peer(
    what: str, rate: float, peer: PeerResult | None, least: float, terms: str = "", unit: str = "tok/s"
) -> list[Figure]:
    """Our rate and llama.cpp's, of which at least `least` is asked."""
    options = f"llama.cpp {peer.options}" if peer is not None else ""
    rate_there = peer.rate if peer is not None else None
    return beside(what, rate, rate_there, least, unit, "; ".join(filter(None, (terms, options))))


def decode_beside(
    session: Session, shape: str, file_format: str, depths: tuple[int, ...], least: float
) -> Iterator[Figure]:
    """Decode of a resident model at some depths, beside llama.cpp's."""
    path = session.model(shape, file_format)
    rates = {}
    with open_model(path, RESIDENT, max(depths) + 1024, session.threads) as opened:
        terms = f"arena {opened.plan.arena_bytes / 2**20:.0f} MiB, opened in {opened.load_seconds:.1f} s"
        for depth in depths:
            sequence = opened.engine.new_sequence()
            opened.engine.prefill(sequence, [index % 1000 for index in range(depth)])
            rates[depth] = decode_rate(opened.engine, sequence, TOKENS)
            sampled = decode_rate(opened.engine, sequence, TOKENS, read_logits=True)
            yield stated(f"{shape} {file_format} resident: decode at depth {depth}, logits read", sampled, "tok/s")
            sequence.close()
    for depth, rate in rates.items():
        options = ("-ngl", "99", "-p", "0", "-n", str(TOKENS), "-d", str(depth), "-r", "3")
        peer = session.peer_result(path, *options)
        yield from beside_peer(f"{shape} {file_format} resident: decode at depth {depth}", rate, peer, least, terms)


def prefill_beside(session: Session, path: Path, what: str, prompt: int) -> Iterator[Figure]:
    """Prefill of a resident model beside llama.cpp's, in full accuracy and fast, the two shares that are asked."""
    peer = session.peer_result(path, "-ngl", "99", "-p", str(prompt), "-n", "0", "-r", "3")
    for how, fast, least in (("full accuracy", False, 0.3), ("--fast-prefill", True, 0.7)):
        with open_model(path, RESIDENT, prompt, session.threads, fast_prefill=fast) as opened:
            rate = prefill_rate(opened.engine, prompt)
            terms = f"passes of {opened.engine.max_rows} rows"
        yield from beside_peer(f"{what}prefill of {prompt}, {how}", rate, peer, least, terms)


def host_prefill_beside(session: Session, what: str, rate: float, path: Path, terms: str = "") -> Iterator[Figure]:
    """Prefill of 512 with all weights in host memory, beside llama.cpp with no layer on the GPU, which then computes
    there what is large enough: its file mapped, as it does unless told otherwise, and read into memory that it
    page-locks. Of the first 4 x are asked; of the second that would be more than the bus allows.
    """
    for load, how, least in (("mmap", "mapped", 4.0), ("none", "page-locked", 1.0)):
        peer = session.peer_result(path, "-ngl", "0", "-p", "512", "-n", "0", "-r", "2", "-lm", load)
        yield from beside_peer(f"{what}, beside a {how} file", rate, peer, least, terms)
