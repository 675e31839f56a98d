"""Matrix products and embedding rows on the native library, straight from the planes of the weights.

Tolerances are in ops.contracts. Row r of a product depends on row r of x and its kind alone, bit for bit: prompt rows
take the GEMM, decode rows the GEMV. Scratch: `linear_workspace(rows, cols)`, reserved in the pool at load. Bytes moved:
the planes once per 512 prompt rows and once per 8 decode rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edge_transformer import _native
from edge_transformer.formats.weight import Weight, WeightFormat
from edge_transformer.ops.tensor import DType, Tensor

ACTIVATIONS = ("silu", "gelu_tanh")
_F32 = DType.F32
_FORMAT_INDEX = {weight_format: index for index, weight_format in enumerate(WeightFormat)}


def linear_workspace(rows: int, cols: int) -> tuple[int, int]:
    """(shared bytes, bytes per thread) of pool scratch for an op over `rows` rows of at most `cols` input columns."""
    return _native.linear_workspace(rows, cols)


@dataclass(frozen=True, slots=True)
class _Bound:
    """Weights that are used together, and their native object. Holding the weights keeps their identities theirs."""

    op: _native.LinearOp
    weights: tuple[Weight, ...]
    cols: int
    rows: tuple[int, ...]
    no_biases: list[int]


class LinearOps:
    """The linear ops on one pool and one instruction set (its number from `_native.instruction_set_index`).

    The native object of each weight, or group of weights used together, is made at its first use and kept, with the
    weight, until `forget` or the end of this object. Every method raises ValueError for shapes that do not fit, and for
    tensors that are not f32.
    """

    def __init__(self, pool: _native.ThreadPool, isa: int) -> None:
        self._pool = pool
        self._isa = isa
        self._bound: dict[int | tuple[int, ...], _Bound] = {}

    def forget(self) -> None:
        """Drop all native objects and the references to weights."""
        self._bound.clear()

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
        key = tuple(map(id, weights))
        bound = self._bound.get(key) or self._bind(key, *weights)
        if x.dtype is not _F32 or x.shape[1] != bound.cols or not 0 <= prompt_rows <= rows <= x.shape[0]:
            raise _input_error(x, bound, prompt_rows, rows)
        for out, cols in zip(outs, bound.rows, strict=True):
            if out.dtype is not _F32 or out.shape[1] != cols or out.shape[0] < rows:
                raise _output_error(out, cols, rows)
        bound.op.group(x.address, [out.address for out in outs], _addresses(biases, bound), prompt_rows, rows)

    def linear_add(
        self, weight: Weight, bias: Tensor | None, x: Tensor, residual: Tensor, prompt_rows: int, rows: int
    ) -> None:
        """residual += x @ weight.T + bias for the first `rows` rows; residual f32 [>= rows, weight rows]."""
        bound = self._bound.get(id(weight)) or self._bind(id(weight), weight)
        if x.dtype is not _F32 or x.shape[1] != bound.cols or not 0 <= prompt_rows <= rows <= x.shape[0]:
            raise _input_error(x, bound, prompt_rows, rows)
        if residual.dtype is not _F32 or residual.shape[1] != bound.rows[0] or residual.shape[0] < rows:
            raise _output_error(residual, bound.rows[0], rows)
        bias_address = 0 if bias is None else _addresses((bias,), bound)[0]
        bound.op.add(x.address, residual.address, bias_address, prompt_rows, rows)

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
        key = (id(gate), id(up))
        bound = self._bound.get(key) or self._bind(key, gate, up)
        if bound.rows[0] != bound.rows[1]:
            raise ValueError(f"gate has {bound.rows[0]} rows, up {bound.rows[1]}; they must be as many")
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation is {activation!r}; there are {', '.join(ACTIVATIONS)}")
        if x.dtype is not _F32 or x.shape[1] != bound.cols or not 0 <= prompt_rows <= rows <= x.shape[0]:
            raise _input_error(x, bound, prompt_rows, rows)
        if out.dtype is not _F32 or out.shape[1] != bound.rows[0] or out.shape[0] < rows:
            raise _output_error(out, bound.rows[0], rows)
        first, second = _addresses((gate_bias, up_bias), bound)
        bound.op.gated(x.address, out.address, first, second, activation == "gelu_tanh", prompt_rows, rows)

    def lm_head(self, weight: Weight, x: Tensor, rows: int, softcap: float | None, out: Tensor) -> None:
        """out = softcap(x @ weight.T) for the first `rows` rows, always as decode rows; out f32 [>= rows, V]."""
        bound = self._bound.get(id(weight)) or self._bind(id(weight), weight)
        if x.dtype is not _F32 or x.shape[1] != bound.cols or not 0 <= rows <= x.shape[0]:
            raise _input_error(x, bound, 0, rows)
        if out.dtype is not _F32 or out.shape[1] != bound.rows[0] or out.shape[0] < rows:
            raise _output_error(out, bound.rows[0], rows)
        bound.op.softcapped(x.address, out.address, softcap or 0.0, rows)

    def gather_rows(self, table: Weight, token_ids: npt.NDArray[np.int32], scale: float, out: Tensor) -> None:
        """out[r] = scale * table[token_ids[r]]; token_ids int32 [rows]. ValueError for an id outside the table."""
        bound = self._bound.get(id(table)) or self._bind(id(table), table)
        if token_ids.dtype != np.int32 or token_ids.ndim != 1 or not token_ids.flags.c_contiguous:
            raise ValueError(
                f"token ids are {token_ids.dtype} {token_ids.shape}; needed: contiguous int32 of one dimension"
            )
        rows = len(token_ids)
        if out.dtype is not _F32 or out.shape[1] != bound.cols or out.shape[0] < rows:
            raise _output_error(out, bound.cols, rows)
        bound.op.gather(token_ids.ctypes.data, out.address, scale, rows)

    def _bind(self, key: int | tuple[int, ...], *weights: Weight) -> _Bound:
        cols = {weight.layout.cols for weight in weights}
        if len(cols) != 1:
            raise ValueError(f"weights of one group have one number of columns, got {sorted(cols)}")
        op = _native.LinearOp(self._pool, self._isa, [_view(weight) for weight in weights])
        rows = tuple(weight.layout.rows for weight in weights)
        bound = _Bound(op, weights, cols.pop(), rows, [0] * len(weights))
        self._bound[key] = bound
        return bound


def _view(weight: Weight) -> _native.WeightView:
    layout = weight.layout
    offsets = [plane.offset for plane in layout.planes]
    pitches = [plane.row_pitch for plane in layout.planes]
    index = _FORMAT_INDEX[layout.format]
    return _native.WeightView(index, layout.rows, layout.cols, weight.address, offsets, pitches)


def _addresses(biases: Sequence[Tensor | None], bound: _Bound) -> list[int]:
    """Addresses of the biases of the bound weights, 0 where there is none."""
    if not any(biases):
        return bound.no_biases
    for bias, rows in zip(biases, bound.rows, strict=True):
        if bias is not None and (bias.dtype is not _F32 or bias.shape != (rows,)):
            raise ValueError(f"bias is {bias.dtype} {bias.shape}; the weight has {rows} rows, needed: f32")
    return [0 if bias is None else bias.address for bias in biases]


def _input_error(x: Tensor, bound: _Bound, prompt_rows: int, rows: int) -> ValueError:
    return ValueError(
        f"x is {x.dtype} {x.shape}; needed: f32, {bound.cols} columns, 0 <= {prompt_rows} prompt rows <= {rows} rows"
    )


def _output_error(out: Tensor, cols: int, rows: int) -> ValueError:
    return ValueError(f"output is {out.dtype} {out.shape}; needed: f32, at least {rows} rows of {cols}")
