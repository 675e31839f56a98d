"""Weight planes to float32, in numpy: the oracle's reading of every format, bit for bit as GGUF defines it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from edge_transformer.formats.weight import Weight


def dequantize(weight: Weight) -> npt.NDArray[np.float32]:
    """The values of a weight as a fresh float32 array [rows, cols]."""
    raise NotImplementedError
