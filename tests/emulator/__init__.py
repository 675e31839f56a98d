"""A GPU for tests without one: the product's kernel sources compiled by g++, streams and events as queues.

    gpu = EmulatedGpu(seed=1, order="both")
    arrays = DeviceArrays(gpu)
    x, out = arrays.put(x_host, "x"), arrays.empty((rows, cols), np.float32, "out")
    kernel = gpu.kernel(KernelSource("norm.cu", "rms_norm", 128, (("ETE_COLS", "64"),)))
    gpu.launch(kernel, (rows, 1, 1), 0, arrays.stream, (x, out, np.int32(rows)))
    result = arrays.get(out)  # waits, then a numpy array

What it finds that a GPU may hide: see the first paragraphs of gpu.py (order of work) and emulator.hpp (threads).
"""

from emulator.arrays import DeviceArrays
from emulator.clocks import RaceError
from emulator.gpu import EmulatedGpu

__all__ = ["DeviceArrays", "EmulatedGpu", "RaceError"]
