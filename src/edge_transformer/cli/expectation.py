"""What a big model will feel like, said before it answers: nobody should wonder whether the program hangs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from edge_transformer.cli.console import size

if TYPE_CHECKING:
    from edge_transformer import LLM
    from edge_transformer.placement.plan import Plan

# Below this a token takes well under a second on any machine, and measuring would delay the first one.
WORTH_SAYING = 2 << 30
WORTH_SAYING_SECONDS = 0.05  # of a token on the bus of a GPU
PROBE_BYTES = 32 << 20


def expectation(llm: LLM) -> str | None:
    """A line on the rate to expect; None for a model small enough not to need one, and on a GPU where nothing is
    streamed or the bus was not measured.
    """
    memory = llm.memory
    available = available_memory() + memory["weights_rearranged"]  # those are already in memory
    if llm.plan is not None:
        return _over_the_bus(llm.plan, available)
    weights = memory["weights_mapped"] + memory["weights_rearranged"]
    if weights < WORTH_SAYING:
        return None
    if weights > available:
        return _from_the_disk(weights, available)
    rate = read_rate()
    return (
        f"expect about {rate / weights:.2g} tok/s or more: every token reads {size(weights)} of weights, and one "
        f"thread reads {rate / 1e9:.0f} GB/s here"
    )


def _over_the_bus(plan: Plan, available: int) -> str | None:
    streamed = plan.streamed_bytes
    if plan.ring is not None and streamed > available:  # weights that are not page-locked can be dropped from memory
        return _from_the_disk(streamed, available)
    if plan.rates is None or streamed < WORTH_SAYING_SECONDS * plan.rates.bus:
        return None
    return (
        f"expect up to {plan.rates.bus / streamed:.2g} tok/s for one answer: every token moves {size(streamed)} of "
        f"weights over the bus, at {plan.rates.bus / 1e9:.1f} GB/s"
    )


def _from_the_disk(weights: int, available: int) -> str:
    return (
        f"{size(weights)} of weights do not fit in {size(available)} of memory: about {size(weights - available)} "
        "are read from the disk again for every token, so expect seconds to minutes for each"
    )


def available_memory() -> int:
    """As memory.available_memory, which is imported when it is asked for: it brings numpy along."""
    from edge_transformer import memory

    return memory.available_memory()


def read_rate() -> float:
    """Bytes per second at which one thread sums memory that is in no cache."""
    import numpy as np

    numbers = np.ones(PROBE_BYTES // 4, np.float32)
    started = time.perf_counter()
    numbers.sum()
    return PROBE_BYTES / (time.perf_counter() - started)
