"""Finding the driver: the Python package, the library it loads, versions that fit. Each thing missing has its message.

With compiler.py the only importer of `cuda.*`.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from edge_transformer.errors import ON_THE_CPU, GpuError


@functools.cache
def load_driver() -> Any:
    """The module `cuda.bindings.driver`, initialised. Raises GpuError that says what to install or update."""
    try:
        import cuda.bindings
        from cuda.bindings import driver
    except ImportError as error:
        if not _library_is_there():  # without it the packages are of no use
            raise GpuError(
                f"no NVIDIA driver was found, nor the packages for NVIDIA GPUs ({error}): install the driver "
                "(nvidia-smi shows whether it works), then pip install 'edge-transformer-engine[cuda]'; or "
                f"{ON_THE_CPU}"
            ) from error
        raise GpuError(
            f"the packages for NVIDIA GPUs are not installed ({error}): pip install 'edge-transformer-engine[cuda]' "
            "(driver 580 or later), or [cuda12] (driver 525 or later)"
        ) from error
    try:
        (status,) = driver.cuInit(0)
        version_status, version = driver.cuDriverGetVersion()
    except RuntimeError as error:  # the library is not on this machine, or lacks a function
        raise GpuError(
            f"no NVIDIA driver was found: install it (nvidia-smi shows whether it works), or {ON_THE_CPU}"
        ) from error
    results = driver.CUresult
    needed = int(cuda.bindings.__version__.split(".")[0])
    if version_status == results.CUDA_SUCCESS and version // 1000 < needed:
        raise GpuError(
            f"the NVIDIA driver supports CUDA {version // 1000}.{version % 1000 // 10}, the installed packages need "
            f"{needed}.0: update the driver (580 or later for CUDA 13), or pip install "
            "'edge-transformer-engine[cuda12]'"
        )
    if status == results.CUDA_ERROR_NO_DEVICE:
        raise GpuError(
            "this machine has a driver but no NVIDIA GPU that it may use (CUDA_VISIBLE_DEVICES can hide them)"
        )
    if status != results.CUDA_SUCCESS:
        raise GpuError(f"cuInit(0): {status.name}: the NVIDIA driver does not work; nvidia-smi tells more")
    return driver


def _library_is_there() -> bool:
    """Whether a driver is installed, working or not."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
