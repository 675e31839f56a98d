"""Placements of a model, and ways of feeding it, none of which may change a bit: for a real GPU and an emulated one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.errors import CapacityError
from edge_transformer.placement.plan import HeadPlace, Wishes

Logits = npt.NDArray[np.float32]
Opened = TypeVar("Opened")

NEAR_TIE = 1e-3

ALL_RESIDENT = Wishes(1 << 30, resident_layers=-1, kv_offload=False, head=HeadPlace.GPU)
LEAST = Wishes(1 << 30, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.CPU)


@dataclass(frozen=True, slots=True)
class Placement:
    """`least`: within the smallest budget that the planner says would do. locked: the host page-locks mapped memory."""

    wishes: Wishes
    least: bool = False
    locked: bool = True

    @property
    def exact(self) -> bool:
        """Whether its bits are those of all others; the CPU's part of an output projection sums in another order."""
        return self.wishes.head not in (HeadPlace.SPLIT, HeadPlace.CPU)

    def __str__(self) -> str:
        wishes = self.wishes
        parts = [f"{wishes.resident_layers} resident", f"{wishes.slots} slots", f"lm_head {wishes.head}"]
        parts += ["KV on the host"] * bool(wishes.kv_offload) + ["least budget"] * self.least
        return ", ".join(parts + ["page-locking refused"] * (not self.locked))


def placements(layers: int, budget: int) -> list[Placement]:
    """Layers resident (-1, 0, 1, 2, all by number) x slots x KV cache x output projection x ample or least budget; the
    host refuses page-locking in every third of them.
    """
    found: list[Placement] = []
    for resident in dict.fromkeys((-1, 0, 1, 2, layers)):
        for kv_offload in (False, True):
            for head in HeadPlace:
                streams = resident not in (-1, layers) or head in (HeadPlace.STREAMED, HeadPlace.SPLIT)
                for slots in (2, 3) if streams else (2,):
                    for least in (False, True):
                        wishes = Wishes(budget, resident, slots, kv_offload, head)
                        found.append(Placement(wishes, least, locked=len(found) % 3 != 2))
    return found


def short_placements(budget: int) -> list[Placement]:
    """One of each kind of data movement: weights through slots and through a ring, KV runs, output projection."""
    return [
        Placement(Wishes(budget, 0, 2, kv_offload=False, head=HeadPlace.GPU)),
        Placement(Wishes(budget, 1, 3, kv_offload=True, head=HeadPlace.GPU), least=True),
        Placement(Wishes(budget, 0, 2, kv_offload=False, head=HeadPlace.STREAMED), locked=False),
        Placement(Wishes(budget, -1, 2, kv_offload=True, head=HeadPlace.STREAMED)),
        Placement(Wishes(budget, 0, 3, kv_offload=False, head=HeadPlace.SPLIT)),
        Placement(Wishes(budget, 0, 2, kv_offload=True, head=HeadPlace.CPU), least=True),
    ]


def open_within(open_engine: Callable[[Wishes], Opened], placement: Placement) -> Opened:
    """What `open_engine` makes of the wishes, within the least budget where the placement says so."""
    wishes = placement.wishes
    return open_engine(replace(wishes, budget_bytes=least_budget(open_engine, wishes)) if placement.least else wishes)


def least_budget(open_engine: Callable[[Wishes], object], wishes: Wishes) -> int:
    """The smallest budget, as the refusal of a budget of one byte gives it."""
    try:
        open_engine(replace(wishes, budget_bytes=1))
    except CapacityError as error:
        said = re.search(r"at least ([0-9.]+) MiB of GPU memory as asked", str(error))
        if said is None:
            raise
        return int(float(said[1]) * 2**20)
    raise AssertionError("a budget of one byte was accepted")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of a sequence; the last `decoded` of them take the decode kernels."""

    tokens: list[int]
    decoded: int


@dataclass(frozen=True, slots=True)
class Way:
    """How prompts are fed: prompt rows and decode rows of a sequence in a pass, sequences in a pass. every_row: logits
    are read of prompt rows too that are not the last of their chunk.
    """

    chunk: int
    together: int = 1
    decode_rows: int = 1
    every_row: bool = True


def random_prompts(lengths: Sequence[tuple[int, int]], vocabulary: int, seed: int = 1) -> list[Prompt]:
    """`lengths`: (tokens, of them decoded)."""
    random = np.random.default_rng(seed)
    return [Prompt(random.integers(0, vocabulary, length).tolist(), decoded) for length, decoded in lengths]


def feed(engine: Engine, prompts: Sequence[Prompt], way: Way) -> list[Logits]:
    """Logits [tokens, V] of each prompt, NaN in rows that were not read. Shorter prompts, fed beside a longer one,
    decode beside its prompt chunks.
    """
    sequences = [engine.new_sequence() for _ in prompts]
    logits = [np.full((len(p.tokens), engine.config.vocab_size), np.nan, np.float32) for p in prompts]
    while waiting := [i for i, prompt in enumerate(prompts) if len(sequences[i]) < len(prompt.tokens)]:
        turn = waiting[: way.together]
        starts = [len(sequences[i]) for i in turn]
        parts = [_next_part(prompts[i], start, way) for i, start in zip(turn, starts, strict=True)]
        chunks = [
            Chunk(sequences[i], tokens, kind, "all" if way.every_row or kind == "decode" else "last")
            for i, (tokens, kind) in zip(turn, parts, strict=True)
        ]
        result = engine.step(chunks)
        assert result is not None
        for (chunk, token), row in zip(result.rows, result.logits(), strict=True):
            logits[turn[chunk]][starts[chunk] + token] = row
    for sequence in sequences:
        sequence.close()
    return logits


def _next_part(prompt: Prompt, start: int, way: Way) -> tuple[list[int], Literal["prompt", "decode"]]:
    split = len(prompt.tokens) - prompt.decoded
    if start < split:
        return prompt.tokens[start : min(start + way.chunk, split)], "prompt"
    return prompt.tokens[start : start + way.decode_rows], "decode"


@dataclass(slots=True)
class Findings:
    """Of the placements that were compared with the first."""

    compared: int = 0
    largest_head_error: float = 0.0
    faults: list[str] = field(default_factory=list)

    def compare(self, what: str, exact: bool, first: Sequence[Logits], logits: Sequence[Logits], bound: float) -> None:
        """Of the rows that were read: bits equal; or, where not exact, within `bound` and the likeliest token the same
        but for near ties.
        """
        self.compared += 1
        first, logits = zip(*map(_read_rows, first, logits), strict=True)
        error = relative_error(first, logits)
        if exact:
            if not all(map(np.array_equal, first, logits)):
                self.faults.append(f"{what}: other bits, {error:.1e}")
            return
        self.largest_head_error = max(self.largest_head_error, error)
        if not error <= bound:
            self.faults.append(f"{what}: {error:.1e} from all resident, allowed {bound:.0e}")
        if any(map(_other_ids, first, logits)):
            self.faults.append(f"{what}: another likeliest token where the margin is above {NEAR_TIE:.0e}")


def relative_error(expected: Sequence[Logits], got: Sequence[Logits]) -> float:
    """Largest |difference| over max(1, largest |logit|); NaN where one is."""
    largest = max(1.0, *(float(np.abs(logits).max()) for logits in expected))
    return max(float(np.abs(a - b).max()) for a, b in zip(expected, got, strict=True)) / largest


def _read_rows(first: Logits, logits: Logits) -> tuple[Logits, Logits]:
    """Of both, the rows that were read into `logits`: the last one is always; the engine refuses to read a NaN."""
    read = ~np.isnan(logits[:, 0])
    assert read[-1]
    return first[read], logits[read]


def _other_ids(expected: Logits, got: Logits) -> bool:
    two = np.partition(expected, -2, axis=1)[:, -2:]
    clear = two[:, 1] - two[:, 0] > NEAR_TIE
    return bool((expected.argmax(axis=1) != got.argmax(axis=1))[clear].any())


def rotated(ways: Sequence[Way]) -> Iterator[Way]:
    """The ways by turns, without end."""
    while True:
        yield from ways
