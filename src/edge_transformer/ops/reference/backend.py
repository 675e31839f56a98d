"""ReferenceBackend: the Backend protocol on the numpy functions of this package: the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import numpy.typing as npt

from edge_transformer.formats.dequantize import dequantize
from edge_transformer.formats.weight import Weight, WeightLayout
from edge_transformer.memory import HostMemory
from edge_transformer.ops.backend import AttentionShape, DeltaShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS, Batch
from edge_transformer.ops.reference.activation import ACTIVATIONS, sigmoid
from edge_transformer.ops.reference.activation import softcap as cap_logits
from edge_transformer.ops.reference.attention import attend
from edge_transformer.ops.reference.gated_delta import DeltaParameters, gated_delta
from edge_transformer.ops.reference.kv_tiles import tile_view, write_position
from edge_transformer.ops.reference.norm import rmsnorm
from edge_transformer.ops.reference.rope import rotate
from edge_transformer.ops.tensor import Tensor, first_largest, host_rows

Floats = npt.NDArray[np.float32]


class ReferenceBackend:
    """Every op in numpy fp32. Keeps each weight it has met in fp32, so memory grows to four bytes a parameter."""

    name = "reference"

    def __init__(self) -> None:
        # The weight stays beside its values: while it is held, no other weight can take its address.
        self._values: dict[tuple[int, WeightLayout], tuple[Weight, Floats]] = {}

    def allocate(self, nbytes: int) -> tuple[int, object]:
        memory = HostMemory(nbytes, what="workspace")
        return memory.address, memory

    def reserve(
        self, rows: int, cols: int, shapes: Sequence[AttentionShape], deltas: Sequence[DeltaShape] = ()
    ) -> None:
        """Nothing: numpy allocates as it goes."""

    def gather_rows(self, table: Weight, batch: Batch, scale: float, out: Tensor) -> None:
        _floats(out)[: batch.rows] = np.float32(scale) * self._matrix(table)[batch.token_ids]

    def add_norm(
        self,
        residual: Tensor,
        delta: Tensor | None,
        delta_norm: Tensor | None,
        weight: Tensor,
        eps: float,
        out: Tensor,
        batch: Batch,
    ) -> None:
        rows = batch.rows
        stream = _floats(residual)[:rows]
        if delta is not None:
            change = _floats(delta)[:rows]
            stream += change if delta_norm is None else rmsnorm(change, _floats(delta_norm), eps)
        _floats(out)[:rows] = rmsnorm(stream, _floats(weight), eps)

    def linear_group(
        self,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        x: Tensor,
        outs: Sequence[Tensor],
        batch: Batch,
    ) -> None:
        for weight, bias, out in zip(weights, biases, outs, strict=True):
            _floats(out)[: batch.rows] = self._linear(weight, bias, _floats(x)[: batch.rows])

    def linear_add(self, weight: Weight, bias: Tensor | None, x: Tensor, residual: Tensor, batch: Batch) -> None:
        _floats(residual)[: batch.rows] += self._linear(weight, bias, _floats(x)[: batch.rows])

    def qk_norm_rope_append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        shape: AttentionShape,
        batch: Batch,
    ) -> None:
        rows = batch.rows
        queries = _floats(q)[:rows].reshape(rows, shape.heads, shape.head_dim)
        keys = _floats(k)[:rows].reshape(rows, shape.kv_heads, shape.head_dim)
        values = _floats(v)[:rows].reshape(rows, shape.kv_heads, shape.head_dim)
        turned_queries = queries if q_norm is None else rmsnorm(queries, _floats(q_norm), eps)
        turned_keys = keys if k_norm is None else rmsnorm(keys, _floats(k_norm), eps)
        if shape.rope is not None:
            cos, sin = batch.rope_cos[shape.rope], batch.rope_sin[shape.rope]
            turned_queries = rotate(turned_queries, cos, sin)
            turned_keys = rotate(turned_keys, cos, sin)
        queries[:] = turned_queries
        tables = batch.tile_tables[shape.layer]
        for row in range(rows):
            tile_index, slot = divmod(int(batch.positions[row]), KV_TILE_POSITIONS)
            tile = tile_view(int(tables[batch.row_sequence[row], tile_index]), shape)
            write_position(tile, slot, turned_keys[row], values[row])

    def attention(self, q: Tensor, shape: AttentionShape, out: Tensor, batch: Batch) -> None:
        rows = batch.rows
        queries = _floats(q)[:rows].reshape(rows, shape.heads, shape.head_dim)
        _floats(out)[:rows] = attend(queries, shape, batch).reshape(rows, -1)

    def split_query_gate(self, joined: Tensor, shape: AttentionShape, q: Tensor, gate: Tensor, batch: Batch) -> None:
        rows = batch.rows
        heads = _floats(joined)[:rows].reshape(rows, shape.heads, 2, shape.head_dim)
        _floats(q)[:rows] = heads[:, :, 0].reshape(rows, -1)
        _floats(gate)[:rows] = heads[:, :, 1].reshape(rows, -1)

    def apply_gate(self, x: Tensor, gate: Tensor, batch: Batch) -> None:
        _floats(x)[: batch.rows] *= sigmoid(_floats(gate)[: batch.rows])

    def gated_delta(
        self,
        qkv: Tensor,
        z: Tensor,
        a: Tensor,
        b: Tensor,
        conv: Tensor,
        decay: Tensor,
        dt_bias: Tensor,
        norm: Tensor,
        shape: DeltaShape,
        out: Tensor,
        batch: Batch,
    ) -> None:
        rows = batch.rows
        parameters = DeltaParameters(_floats(conv), _floats(decay), _floats(dt_bias), _floats(norm))
        _floats(out)[:rows] = gated_delta(
            _floats(qkv)[:rows], _floats(z)[:rows], _floats(a)[:rows], _floats(b)[:rows], parameters, shape, batch
        )

    def gated_mlp(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: str,
        x: Tensor,
        out: Tensor,
        batch: Batch,
    ) -> None:
        rows = _floats(x)[: batch.rows]
        gated = ACTIVATIONS[activation](self._linear(gate, gate_bias, rows))
        _floats(out)[: batch.rows] = gated * self._linear(up, up_bias, rows)

    def lm_head(self, weight: Weight, x: Tensor, rows: int, softcap: float | None, out: Tensor) -> None:
        _floats(out)[:rows] = cap_logits(self._linear(weight, None, _floats(x)[:rows]), softcap)

    def select_rows(self, x: Tensor, rows: Tensor, count: int, out: Tensor) -> None:
        _floats(out)[:count] = _floats(x)[rows.numpy()[:count]]

    def read(self, tensor: Tensor, rows: int) -> Floats:
        return host_rows(tensor, rows)

    def argmax(self, tensor: Tensor, rows: int) -> npt.NDArray[np.int32]:
        return first_largest(host_rows(tensor, rows))

    def write(self, tensor: Tensor, values: Floats) -> None:
        host_rows(tensor, len(values))[:] = values

    def give_up(self) -> None:
        """Nothing is queued."""

    def close(self) -> None:
        self._values.clear()

    def _linear(self, weight: Weight, bias: Tensor | None, x: Floats) -> Floats:
        product: Floats = x @ self._matrix(weight).T
        return product if bias is None else product + _floats(bias)

    def _matrix(self, weight: Weight) -> Floats:
        key = (weight.address, weight.layout)
        if key not in self._values:
            self._values[key] = (weight, dequantize(weight))
        return self._values[key][1]


def _floats(tensor: Tensor) -> Floats:
    return cast("Floats", tensor.numpy())
