"""What the environment says about the CPU executor, read in one place.

ETE_CPU_ISA   instruction set of the kernels: plain, avx2 or avx512 (default: the fastest this machine has)
ETE_THREADS   threads of the pool (default: what affinity and the control group allow)
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from edge_transformer import _native
from edge_transformer.cpu.threads import MAX_THREADS, usable_processors
from edge_transformer.errors import UsageError


@dataclass(frozen=True, slots=True)
class CpuSettings:
    """`isa` is one of `_native.available_instruction_sets()`; `threads` >= 1."""

    isa: str
    threads: int


def cpu_settings(
    isa: str | None = None, threads: int | None = None, environment: Mapping[str, str] = os.environ
) -> CpuSettings:
    """Settings of this machine: the arguments win over the environment, the environment over what the machine allows.

    Raises UsageError for an instruction set that this machine or build lacks, or a thread count outside 1..MAX_THREADS.
    """
    return CpuSettings(_choose_isa(isa, environment), _choose_threads(threads, environment))


def _choose_isa(isa: str | None, environment: Mapping[str, str]) -> str:
    available = _native.available_instruction_sets()
    if isa is not None:
        source, asked = "instruction set", isa
    elif environment.get("ETE_CPU_ISA"):
        source, asked = "ETE_CPU_ISA", environment["ETE_CPU_ISA"]
    else:
        return available[-1]
    if asked not in available:
        raise UsageError(f"{source} is {asked!r}; this machine and build have {', '.join(available)}")
    return asked


def _choose_threads(threads: int | None, environment: Mapping[str, str]) -> int:
    value: object
    if threads is not None:
        source, value = "threads", threads
    elif environment.get("ETE_THREADS"):
        source, value = "ETE_THREADS", environment["ETE_THREADS"]
    else:
        return min(usable_processors(), MAX_THREADS)
    try:
        asked = int(str(value))
    except ValueError:
        asked = 0
    if not 1 <= asked <= MAX_THREADS:
        raise UsageError(f"{source} is {value!r}; give a whole number from 1 to {MAX_THREADS}")
    return asked
