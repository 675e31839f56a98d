"""What tests of the ops share: arrays, weights and the counts of a pass on a Gpu, outputs that begin as poison."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.launch_rows import LaunchRows
from edge_transformer.cuda.runtime import Gpu
from edge_transformer.formats.weight import Weight
from edge_transformer.memory import bytes_at
from edge_transformer.ops.tensor import DType, Tensor
from emulator.arrays import DeviceArrays

F32 = npt.NDArray[np.float32]


class DevicePass:
    """Arrays of one test on a GPU. Every array is a block of its own, with nothing readable around it."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.arrays = DeviceArrays(gpu)
        self.stream = gpu.stream("compute")

    def rows(self, prompt: int, rows: int, logits: int = 0, spare: int = 0) -> LaunchRows:
        """`rows` rows of which `prompt` are prompt rows; launches are made for `spare` more of each kind there is."""
        counts = self.arrays.put(np.array([prompt, rows, 1, logits], np.int32), "counts")
        decode = rows - prompt
        return LaunchRows(
            prompt + spare if prompt else 0, decode + spare if decode else 0, logits + spare if logits else 0, counts
        )

    def weight(self, weight: Weight) -> Weight:
        """A weight of host memory on the device, its padding included."""
        layout = weight.layout
        data = bytes_at(weight.address, layout.nbytes).copy()
        return Weight(layout, self.arrays.put(data, f"{layout.format} weight"), None)

    def tensor(self, array: npt.NDArray[np.float32], label: str = "x") -> Tensor:
        return Tensor(self.arrays.put(array, label), array.shape, DType.F32, None)

    def output(self, shape: Sequence[int], label: str = "out") -> Tensor:
        """NaN in every place."""
        return Tensor(self.arrays.empty(tuple(shape), np.float32, label), tuple(shape), DType.F32, None)

    def read(self, tensor: Tensor) -> F32:
        return self.arrays.get(tensor.address)
