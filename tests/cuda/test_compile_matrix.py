"""Every GPU kernel for every architecture, without a GPU: it compiles, spills nothing, and keeps within its registers.

Takes minutes the first time; compiled kernels are kept in the user's cache by a hash of all that goes into them. NVRTC
compiles one kernel at a time in a process: `--dist load` gives each core its own.
"""

from __future__ import annotations

import pytest

from edge_transformer.cuda import attention, delta, elementwise, host_reads, linear
from edge_transformer.cuda.compiler import compile_all
from edge_transformer.cuda.cubin_cache import KernelCache
from edge_transformer.cuda.runtime import KernelSource
from edge_transformer.formats.weight import WeightFormat
from edge_transformer.hub.storage import cache_folder

pytestmark = pytest.mark.compile_matrix

ARCHITECTURES = (90, 75, 80, 120, 86, 89)  # the longest first: each process takes the next
# The source has three paths: before 80, from 80 on, from 90 on. Those that differ from another by the assembler alone
# take a part of the kernels each, not the same ones, to keep the whole within minutes; so does the oldest.
SPARSE = {75: (0, 2), 80: (1, 4), 86: (3, 12), 89: (5, 12), 120: (2, 6)}
CACHE = KernelCache(cache_folder() / "compile-matrix")
REGISTER_FILE = 65536  # registers of a multiprocessor, all architectures
STATIC_SHARED_LIMIT = 48 << 10


def all_sources(capability: tuple[int, int]) -> list[KernelSource]:
    formats = list(WeightFormat)
    sources = [
        *elementwise.all_sources(),
        *linear.all_sources(formats, capability),
        *attention.all_sources(capability),
        *delta.all_sources(),
        *host_reads.host_reads_sources(),
    ]
    return list(dict.fromkeys(sources))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel(arch: int) -> None:
    first, step = SPARSE.get(arch, (0, 1))
    sources = all_sources((arch // 10, arch % 10))[first::step]
    assert len(sources) > 20
    problems = []
    for kernel in compile_all(sources, arch, cache=CACHE):
        source, used = kernel.source, kernel.resources
        name = f"{source.file}: {source.entry} {dict(source.defines)}"
        assert used is not None, name
        assert kernel.code[:4] == b"\x7fELF", name
        assert source.entry.encode() + b"\0" in kernel.code, f"{name}: no such symbol"
        if used.spill_store_bytes or used.spill_load_bytes:
            problems.append(f"{name}: spills {used.spill_store_bytes} bytes")
        # A block has to fit a multiprocessor, and two of up to 512 threads each should.
        budget = min(255, REGISTER_FILE // max(source.threads, 256))
        if used.registers > budget:
            problems.append(f"{name}: {used.registers} registers, {budget} are its budget")
        if used.shared_bytes > STATIC_SHARED_LIMIT:
            problems.append(f"{name}: {used.shared_bytes} bytes of static shared memory")
    assert not problems, "\n".join(problems)
