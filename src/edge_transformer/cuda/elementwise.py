"""Norms, rope with KV append, and what surrounds lm_head, on a GPU. Contracts: ops/contracts.py.

Every method queues launches on `stream` and returns. Tensors and weights have device addresses. ValueError for shapes
that do not fit.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_transformer.cuda.launch_rows import LaunchRows
from edge_transformer.cuda.runtime import Gpu, Kernel, KernelSource, Stream
from edge_transformer.ops.backend import AttentionShape
from edge_transformer.ops.tensor import DType, Tensor

MAX_HEAD_DIM = 256
_WARP = 32


def add_norm_source() -> KernelSource:
    return KernelSource("norm.cu", "add_norm", 512, early_start=True)


def rope_append_source(kv_dtype: DType) -> KernelSource:
    defines = (("ETE_KV_BF16", str(int(kv_dtype is DType.BF16))),)
    return KernelSource("rope_append.cu", "rope_append", 128, defines, early_start=True)


def select_rows_source() -> KernelSource:
    return KernelSource("logits.cu", "select_rows", 256, early_start=True)


def argmax_source() -> KernelSource:
    return KernelSource("logits.cu", "argmax", 1024, early_start=True)


def gate_sources() -> list[KernelSource]:
    """split_query_gate and apply_gate."""
    return [KernelSource("gate.cu", entry, 256, early_start=True) for entry in ("split_query_gate", "apply_gate")]


def all_sources() -> list[KernelSource]:
    """Every kernel of this file that a model may need."""
    common = [add_norm_source(), select_rows_source(), argmax_source(), *gate_sources()]
    return [*common, *map(rope_append_source, (DType.F32, DType.BF16))]


class ElementwiseOps:
    """The elementwise ops of one GPU. Kernels are loaded at their first use, unless `sources` were prepared before."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._kernels: dict[KernelSource, Kernel] = {}

    def sources(self, kv_dtype: DType) -> list[KernelSource]:
        """The kernels that any model with KV tiles of this type needs, to be compiled before a pass."""
        return [add_norm_source(), select_rows_source(), argmax_source(), rope_append_source(kv_dtype)]

    def add_norm(
        self,
        residual: Tensor,
        delta: Tensor | None,
        delta_norm: Tensor | None,
        weight: Tensor,
        eps: float,
        out: Tensor,
        rows: LaunchRows,
        stream: Stream,
    ) -> None:
        """residual += delta_norm ? rmsnorm(delta) * delta_norm : delta; out = rmsnorm(residual) * weight."""
        (cols,) = weight.shape
        live = rows.prompt + rows.decode
        for tensor in (residual, out, *(() if delta is None else (delta,))):
            _check(tensor, live, cols)
        if delta_norm is not None and delta_norm.shape != (cols,):
            raise ValueError(f"delta_norm is {delta_norm.shape}; needed: ({cols},)")
        self._gpu.launch(
            self._kernel(add_norm_source()),
            (live, 1, 1),
            0,
            stream,
            (
                residual.address,
                _address(delta),
                _address(delta_norm),
                weight.address,
                np.float32(eps),
                out.address,
                rows.counts,
                np.int32(cols),
            ),
        )

    def qk_norm_rope_append(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        eps: float,
        shape: AttentionShape,
        cosines: int,
        sines: int,
        positions: int,
        row_sequence: int,
        tile_table: int,
        tiles: int,
        tile_writes: Sequence[tuple[int, int]],
        rows: LaunchRows,
        stream: Stream,
    ) -> None:
        """q in place, k and v into their tiles. Device addresses: cosines, sines f32 [rows, rotary / 2] (0: no rope),
        positions, row_sequence int32 [rows], tile_table int64 [sequences, tiles]. tile_writes: (address, bytes) of the
        tiles that may be written.
        """
        live, head_dim = rows.prompt + rows.decode, shape.head_dim
        if head_dim > MAX_HEAD_DIM:
            raise ValueError(f"head_dim is {head_dim}; at most {MAX_HEAD_DIM}")
        _check(q, live, shape.heads * head_dim)
        _check(k, live, shape.kv_heads * head_dim)
        _check(v, live, shape.kv_heads * head_dim)
        for norm in (q_norm, k_norm):
            if norm is not None and norm.shape != (head_dim,):
                raise ValueError(f"q_norm or k_norm is {norm.shape}; needed: ({head_dim},)")
        source = rope_append_source(shape.kv_dtype)
        warps = source.threads // _WARP
        self._gpu.launch(
            self._kernel(source),
            (live, -(-(shape.heads + 2 * shape.kv_heads) // warps), 1),
            0,
            stream,
            (
                q.address,
                k.address,
                v.address,
                _address(q_norm),
                _address(k_norm),
                np.float32(eps),
                cosines,
                sines,
                positions,
                row_sequence,
                tile_table,
                np.int32(tiles),
                rows.counts,
                np.int32(shape.heads),
                np.int32(shape.kv_heads),
                np.int32(head_dim),
                np.int32(0 if shape.rope is None else shape.rotary_dim),
            ),
            writes=tile_writes,
        )

    def select_rows(self, x: Tensor, indices: int, out: Tensor, rows: LaunchRows, stream: Stream) -> None:
        """out[i] = x[indices[i]] for the logit rows; indices: address of int32 [logit rows]."""
        cols = x.shape[1]
        _check(out, rows.logits, cols)
        self._gpu.launch(
            self._kernel(select_rows_source()),
            (rows.logits, 1, 1),
            0,
            stream,
            (x.address, indices, out.address, rows.counts, np.int32(cols)),
        )

    def argmax(self, logits: Tensor, ids: int, rows: LaunchRows, stream: Stream) -> None:
        """ids[i] = first index of the largest of logits[i]; -1 where one is NaN or infinite. ids: address of int32,
        device memory or page-locked.
        """
        _check(logits, rows.logits, logits.shape[1])
        self._gpu.launch(
            self._kernel(argmax_source()),
            (rows.logits, 1, 1),
            0,
            stream,
            (logits.address, ids, rows.counts, np.int32(logits.shape[1])),
        )

    def split_query_gate(
        self, joined: Tensor, shape: AttentionShape, q: Tensor, gate: Tensor, rows: LaunchRows, stream: Stream
    ) -> None:
        """joined [., heads][2][head_dim] to q and gate [., heads][head_dim]."""
        live, query = rows.prompt + rows.decode, shape.heads * shape.head_dim
        if shape.head_dim % 4:
            raise ValueError(f"head_dim is {shape.head_dim}; needed: a multiple of 4")
        _check(joined, live, 2 * query)
        _check(q, live, query)
        _check(gate, live, query)
        split, _ = gate_sources()
        self._gpu.launch(
            self._kernel(split),
            (-(-2 * query // (4 * split.threads)), live, 1),
            0,
            stream,
            (joined.address, q.address, gate.address, rows.counts, np.int32(shape.heads), np.int32(shape.head_dim)),
        )

    def apply_gate(self, x: Tensor, gate: Tensor, rows: LaunchRows, stream: Stream) -> None:
        """x *= sigmoid(gate)."""
        live, cols = rows.prompt + rows.decode, x.shape[1]
        if cols % 4:
            raise ValueError(f"rows of {cols} numbers; needed: a multiple of 4")
        _check(x, live, cols)
        _check(gate, live, cols)
        _, apply = gate_sources()
        self._gpu.launch(
            self._kernel(apply),
            (-(-cols // (4 * apply.threads)), live, 1),
            0,
            stream,
            (x.address, gate.address, rows.counts, np.int32(cols)),
        )

    def _kernel(self, source: KernelSource) -> Kernel:
        kernel = self._kernels.get(source)
        if kernel is None:
            kernel = self._kernels[source] = self._gpu.kernel(source)
        return kernel


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.address


def _check(tensor: Tensor, rows: int, cols: int) -> None:
    if tensor.shape[1] != cols or tensor.shape[0] < rows:
        raise ValueError(f"a tensor is {tensor.shape}; needed: at least {rows} rows of {cols}")
