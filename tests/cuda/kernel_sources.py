"""The kernels of tests/cuda/kernels as sources."""

from __future__ import annotations

from pathlib import Path

from edge_transformer.cuda.runtime import KernelSource

FOLDER = Path(__file__).parent / "kernels"


def basic(entry: str, threads: int = 128, **defines: object) -> KernelSource:
    # An absolute path stays what it is when it is joined to the product's folder of kernels.
    return KernelSource(str(FOLDER / "basic.cu"), entry, threads, tuple((k, str(v)) for k, v in defines.items()))
