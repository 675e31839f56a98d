"""What one of several processes does with a cache they share: found by its name where a process is started afresh."""

from __future__ import annotations

from pathlib import Path

from edge_transformer.cuda.cubin_cache import KernelCache


def write_and_read(folder: Path) -> int:
    cache, wrong = KernelCache(folder), 0
    for i in range(200):
        content = bytes([i]) * 50_000
        cache.put("kernel", str(i % 3), content[: 1000 * (i % 3 + 1)])
        got = cache.get("kernel", str(i % 3))
        wrong += got is None or len(got) != 1000 * (i % 3 + 1) or len(set(got)) != 1
    return wrong
