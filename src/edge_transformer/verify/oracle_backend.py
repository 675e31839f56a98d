"""The numpy oracle for models that do not fit in memory in fp32: it keeps no more than a segment's matrices."""

from __future__ import annotations

import numpy as np

from edge_transformer.formats.dequantize import dequantize
from edge_transformer.formats.weight import Weight
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.reference.activation import softcap as cap_logits
from edge_transformer.ops.reference.backend import ReferenceBackend
from edge_transformer.ops.tensor import Tensor, host_rows

HEAD_ROWS = 8192
"""Rows of the output projection that are in fp32 at a time."""


class FrugalReference(ReferenceBackend):
    """ReferenceBackend, but for the embedding and the output projection, of which it reads the rows it needs."""

    def forget(self) -> None:
        """Give back the matrices that were read."""
        self._values.clear()

    def gather_rows(self, table: Weight, batch: Batch, scale: float, out: Tensor) -> None:
        rows = dequantize(table, batch.token_ids.astype(np.int64))
        host_rows(out, batch.rows)[:] = np.float32(scale) * rows

    def lm_head(self, weight: Weight, x: Tensor, rows: int, softcap: float | None, out: Tensor) -> None:
        hidden, logits = host_rows(x, rows), host_rows(out, rows)
        for start in range(0, weight.layout.rows, HEAD_ROWS):
            block = np.arange(start, min(start + HEAD_ROWS, weight.layout.rows), dtype=np.int64)
            logits[:, start : start + len(block)] = cap_logits(hidden @ dequantize(weight, block).T, softcap)
