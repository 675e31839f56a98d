"""Matrix products and embedding rows on the native library, straight from the planes of the weights.

Tolerances are in ops.contracts. Row r of a product depends on row r of x and its kind alone, bit for bit: prompt rows
take the GEMM, decode rows the GEMV. Scratch: `linear_workspace(rows, cols)`, reserved in the pool at load. Bytes moved:
the planes once per 512 prompt rows and once per 8 decode rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edge_transformer import _native
from edge_transformer.formats.weight import Weight, WeightFormat
from edge_transformer.ops.tensor import Tensor

ACTIVATIONS = ("silu", "gelu_tanh")
_FORMAT_INDEX = {weight_format: index for index, weight_format in enumerate(WeightFormat)}


def linear_workspace(rows: int, cols: int) -> tuple[int, int]:
    """(shared bytes, bytes per thread) of pool scratch for an op over `rows` rows of at most `cols` input columns."""
    return _native.linear_workspace(rows, cols)


class LinearOps:
    """The linear ops on one pool and one instruction set (its number from `_native.instruction_set_index`).

    The native object of each weight, or group of weights used together, is made at its first use and kept, with the
    weight, until `forget` or the end of this object. Every method raises ValueError for shapes that do not fit.
    """

    def __init__(self, pool: _native.ThreadPool, isa: int) -> None:
        self._pool = pool
        self._isa = isa
        self._ops: dict[tuple[int, ...], tuple[_native.LinearOp, tuple[Weight, ...]]] = {}

    def forget(self) -> None:
        """Drop all native objects and the references to weights."""
        self._ops.clear()

    def linear_group(
        self,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        x: Tensor,
        outs: Sequence[Tensor],
        prompt_rows: int,
        rows: int,
    ) -> None:
        """outs[i] = x @ weights[i].T + biases[i] for the first `rows` rows; x f32 [>= rows, cols], outs[i] f32."""
        op = self._op(*weights)
        _check_rows(x, weights[0].layout.cols, prompt_rows, rows)
        for weight, out in zip(weights, outs, strict=True):
            _check_output(out, weight.layout.rows, rows)
        op.group(x.address, [out.address for out in outs], _bias_addresses(weights, biases), prompt_rows, rows, False)

    def linear_add(
        self, weight: Weight, bias: Tensor | None, x: Tensor, residual: Tensor, prompt_rows: int, rows: int
    ) -> None:
        """residual += x @ weight.T + bias for the first `rows` rows; residual f32 [>= rows, weight rows]."""
        op = self._op(weight)
        _check_rows(x, weight.layout.cols, prompt_rows, rows)
        _check_output(residual, weight.layout.rows, rows)
        op.group(x.address, [residual.address], _bias_addresses((weight,), (bias,)), prompt_rows, rows, True)

    def gated_mlp(
        self,
        gate: Weight,
        up: Weight,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        activation: str,
        x: Tensor,
        out: Tensor,
        prompt_rows: int,
        rows: int,
    ) -> None:
        """out = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias); activation "silu" or "gelu_tanh"."""
        op = self._op(gate, up)
        if gate.layout.rows != up.layout.rows:
            raise ValueError(f"gate has {gate.layout.rows} rows, up {up.layout.rows}; they must be as many")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; there are {', '.join(ACTIVATIONS)}")
        _check_rows(x, gate.layout.cols, prompt_rows, rows)
        _check_output(out, gate.layout.rows, rows)
        first, second = _bias_addresses((gate, up), (gate_bias, up_bias))
        op.gated(x.address, out.address, first, second, activation == "gelu_tanh", prompt_rows, rows)

    def lm_head(self, weight: Weight, x: Tensor, rows: int, softcap: float | None, out: Tensor) -> None:
        """out = softcap(x @ weight.T) for the first `rows` rows, always as decode rows; out f32 [>= rows, V]."""
        op = self._op(weight)
        _check_rows(x, weight.layout.cols, 0, rows)
        _check_output(out, weight.layout.rows, rows)
        op.softcapped(x.address, out.address, softcap or 0.0, rows)

    def gather_rows(self, table: Weight, token_ids: npt.NDArray[np.int32], scale: float, out: Tensor) -> None:
        """out[r] = scale * table[token_ids[r]]; token_ids int32 [rows]. ValueError for an id outside the table."""
        op = self._op(table)
        if token_ids.dtype != np.int32 or token_ids.ndim != 1 or not token_ids.flags.c_contiguous:
            raise ValueError(
                f"token ids are {token_ids.dtype} {token_ids.shape}; needed: contiguous int32 of one dimension"
            )
        rows = len(token_ids)
        _check_output(out, table.layout.cols, rows)
        op.gather(token_ids.ctypes.data, out.address, scale, rows)

    def _op(self, *weights: Weight) -> _native.LinearOp:
        key = tuple(map(id, weights))
        known = self._ops.get(key)
        if known is None:
            cols = {weight.layout.cols for weight in weights}
            if len(cols) != 1:
                raise ValueError(f"weights of one group have one number of columns, got {sorted(cols)}")
            known = _native.LinearOp(self._pool, self._isa, [_view(weight) for weight in weights]), weights
            self._ops[key] = known
        return known[0]


def _view(weight: Weight) -> _native.WeightView:
    layout = weight.layout
    offsets = [plane.offset for plane in layout.planes]
    pitches = [plane.row_pitch for plane in layout.planes]
    index = _FORMAT_INDEX[layout.format]
    return _native.WeightView(index, layout.rows, layout.cols, weight.address, offsets, pitches)


def _check_rows(x: Tensor, cols: int, prompt_rows: int, rows: int) -> None:
    if x.shape[1] != cols or not 0 <= prompt_rows <= rows <= x.shape[0]:
        raise ValueError(f"x is {x.shape}; the weight has {cols} columns, prompt rows are {prompt_rows} of {rows} rows")


def _check_output(out: Tensor, cols: int, rows: int) -> None:
    if out.shape[1] != cols or out.shape[0] < rows:
        raise ValueError(f"output is {out.shape}; needed: at least {rows} rows of {cols}")


def _bias_addresses(weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> list[int]:
    for weight, bias in zip(weights, biases, strict=True):
        if bias is not None and bias.shape != (weight.layout.rows,):
            raise ValueError(f"bias is {bias.shape}; the weight has {weight.layout.rows} rows")
    return [0 if bias is None else bias.address for bias in biases]
