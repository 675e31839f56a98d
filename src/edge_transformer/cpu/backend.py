"""CpuBackend: the Backend protocol on the native library. One native call per op; the arithmetic is in native/.

Python's part of an op is a few microseconds, so addresses of a pass's arrays are taken once per pass, and the native
object of a layer's attention is made once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edge_transformer import _native
from edge_transformer.cpu.limits import check_attention, check_delta
from edge_transformer.cpu.linear import LinearOps, linear_workspace
from edge_transformer.cpu.settings import cpu_settings
from edge_transformer.errors import CapacityError
from edge_transformer.formats.weight import Weight
from edge_transformer.memory import HostMemory
from edge_transformer.ops.backend import AttentionShape, DeltaShape
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.tensor import DType, Tensor, first_largest, host_rows

_F32 = DType.F32


class CpuBackend:
    """The ops on the processor. `pool` may be used between passes, by one thread at a time, and so may the ops.

    threads, isa: None takes what the environment says (cpu/settings.py), or the best this machine has.
    Raises UsageError for a thread count or instruction set that cannot be had, CapacityError when the system refuses to
    start that many threads.
    """

    name = "cpu"

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
        settings = cpu_settings(isa, threads)
        self.pool = _start_pool(settings.threads)
        self.isa = settings.isa
        self._isa = _native.instruction_set_index(settings.isa)
        self._linear = LinearOps(self.pool, self._isa)
        self._elementwise = _native.ElementwiseOps(self.pool, self._isa)
        # By identity, with the object itself so that it cannot be replaced by another at the same place.
        self._attentions: dict[int, tuple[AttentionShape, _native.AttentionOp]] = {}
        self._deltas: dict[int, tuple[DeltaShape, _native.DeltaOp]] = {}
        self._batch: Batch | None = None
        self._view: _native.BatchView | None = None

    def allocate(self, nbytes: int) -> tuple[int, object]:
        memory = HostMemory(nbytes, huge_pages=True, what="workspace")
        return memory.address, memory

    def reserve(
        self, rows: int, cols: int, shapes: Sequence[AttentionShape], deltas: Sequence[DeltaShape] = ()
    ) -> None:
        """Scratch in the pool; the native objects of `shapes` and `deltas`.

        Raises UnsupportedModelError for heads that the kernels do not handle, CapacityError when memory is refused.
        """
        for shape in shapes:
            check_attention(shape)
        for delta in deltas:
            check_delta(delta)
        try:
            self.pool.reserve(*linear_workspace(rows, cols))
            for shape in shapes:
                self.pool.reserve(*_native.attention_workspace(shape.heads, shape.head_dim))
                self._attention(shape)
            for delta in deltas:
                self.pool.reserve(0, _native.delta_workspace(delta.key_dim, delta.value_dim))
                self._delta(delta)
        except MemoryError as error:
            raise CapacityError(
                f"the system refused the scratch memory of {self.pool.threads} threads for passes of {rows} rows; use "
                "fewer threads (--threads)"
            ) from error

    def gather_rows(self, table: Weight, batch: Batch, scale: float, out: Tensor) -> None:
        self._linear.gather_rows(table, batch.token_ids, scale, out)

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
        rows, (cols,) = self._view_of(batch).rows, weight.shape
        _check(residual, rows, cols)
        _check(out, rows, cols)
        if delta is not None:
            _check(delta, rows, cols)
            if delta_norm is not None and (delta_norm.dtype is not _F32 or delta_norm.shape != (cols,)):
                raise ValueError(f"delta_norm is {delta_norm.dtype} {delta_norm.shape}; needed: f32 ({cols},)")
        if weight.dtype is not _F32:
            raise ValueError(f"the weight of a norm is {weight.dtype} {weight.shape}; needed: f32")
        self._elementwise.add_norm(
            residual.address, _address(delta), _address(delta_norm), weight.address, eps, out.address, rows, cols
        )

    def linear_group(
        self,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        x: Tensor,
        outs: Sequence[Tensor],
        batch: Batch,
    ) -> None:
        view = self._view_of(batch)
        self._linear.linear_group(weights, biases, x, outs, view.prompt_rows, view.rows)

    def linear_add(self, weight: Weight, bias: Tensor | None, x: Tensor, residual: Tensor, batch: Batch) -> None:
        view = self._view_of(batch)
        self._linear.linear_add(weight, bias, x, residual, view.prompt_rows, view.rows)

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
        view = self._view_of(batch)
        _check(q, view.rows, shape.heads * shape.head_dim)
        _check(k, view.rows, shape.kv_heads * shape.head_dim)
        _check(v, view.rows, shape.kv_heads * shape.head_dim)
        for norm in (q_norm, k_norm):
            if norm is not None and (norm.dtype is not _F32 or norm.shape != (shape.head_dim,)):
                raise ValueError(f"q_norm or k_norm is {norm.dtype} {norm.shape}; needed: f32 ({shape.head_dim},)")
        self._attention(shape).append(view, q.address, k.address, v.address, _address(q_norm), _address(k_norm), eps)

    def attention(self, q: Tensor, shape: AttentionShape, out: Tensor, batch: Batch) -> None:
        view = self._view_of(batch)
        cols = shape.heads * shape.head_dim
        _check(q, view.rows, cols)
        _check(out, view.rows, cols)
        self._attention(shape).attend(view, q.address, out.address)

    def split_query_gate(self, joined: Tensor, shape: AttentionShape, q: Tensor, gate: Tensor, batch: Batch) -> None:
        rows, cols = self._view_of(batch).rows, shape.heads * shape.head_dim
        _check(joined, rows, 2 * cols)
        _check(q, rows, cols)
        _check(gate, rows, cols)
        self._elementwise.split_query_gate(joined.address, rows, shape.heads, shape.head_dim, q.address, gate.address)

    def apply_gate(self, x: Tensor, gate: Tensor, batch: Batch) -> None:
        rows, cols = self._view_of(batch).rows, x.shape[1]
        _check(x, rows, cols)
        _check(gate, rows, cols)
        self._elementwise.apply_gate(x.address, gate.address, rows, cols)

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
        view = self._view_of(batch)
        inner = shape.value_heads * shape.value_dim
        _check(qkv, view.rows, shape.channels)
        for tensor, cols in ((z, inner), (a, shape.value_heads), (b, shape.value_heads), (out, inner)):
            _check(tensor, view.rows, cols)
        _check(conv, shape.channels, shape.conv_width)
        for name, vector, size in (
            ("decay", decay, shape.value_heads),
            ("dt_bias", dt_bias, shape.value_heads),
            ("norm", norm, shape.value_dim),
        ):
            if vector.dtype is not _F32 or vector.shape != (size,):
                raise ValueError(f"{name} is {vector.dtype} {vector.shape}; needed: f32 ({size},)")
        self._delta(shape).run(
            view,
            qkv.address,
            z.address,
            a.address,
            b.address,
            conv.address,
            decay.address,
            dt_bias.address,
            norm.address,
            out.address,
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
        view = self._view_of(batch)
        self._linear.gated_mlp(gate, up, gate_bias, up_bias, activation, x, out, view.prompt_rows, view.rows)

    def lm_head(self, weight: Weight, x: Tensor, rows: int, softcap: float | None, out: Tensor) -> None:
        self._linear.lm_head(weight, x, rows, softcap, out)

    def select_rows(self, x: Tensor, rows: Tensor, count: int, out: Tensor) -> None:
        x_rows, cols = x.shape
        _check(x, 0, cols)
        _check(out, count, cols)
        if rows.dtype is not DType.I32 or count > rows.shape[0]:
            raise ValueError(f"{count} rows were asked for; they are named in {rows.dtype} {rows.shape}, needed: i32")
        self._elementwise.select_rows(x.address, x_rows, cols, rows.address, count, out.address)

    def read(self, tensor: Tensor, rows: int) -> npt.NDArray[np.float32]:
        return host_rows(tensor, rows)

    def argmax(self, tensor: Tensor, rows: int) -> npt.NDArray[np.int32]:
        return first_largest(host_rows(tensor, rows))

    def write(self, tensor: Tensor, values: npt.NDArray[np.float32]) -> None:
        host_rows(tensor, len(values))[:] = values

    def give_up(self) -> None:
        """Nothing is queued."""

    def close(self) -> None:
        """Drop all references to weights and batches. The threads end with the last reference to `pool`."""
        self._linear.forget()
        self._batch = self._view = None

    def _view_of(self, batch: Batch) -> _native.BatchView:
        """The native view of a batch, made at its first op and kept, with the batch, until the next one."""
        if batch is not self._batch or self._view is None:
            spans = [(s.row_start, s.row_count, s.position, s.sequence) for s in batch.prompt_spans]
            self._view = _native.BatchView(
                batch.prompt_rows,
                batch.positions,
                batch.row_sequence,
                spans,
                batch.rope_cos,
                batch.rope_sin,
                batch.tile_tables,
                batch.state_tables,
                [(copy.sequence, copy.position, copy.addresses) for copy in batch.state_checkpoints],
            )
            self._batch = batch
        return self._view

    def _attention(self, shape: AttentionShape) -> _native.AttentionOp:
        known = self._attentions.get(id(shape))
        if known is None:
            op = _native.AttentionOp(
                self.pool,
                self._isa,
                shape.layer,
                shape.heads,
                shape.kv_heads,
                shape.head_dim,
                shape.rotary_dim,
                -1 if shape.rope is None else shape.rope,
                shape.scale,
                shape.softcap or 0.0,
                shape.window or 0,
                shape.kv_dtype == DType.BF16,
            )
            self._attentions[id(shape)] = known = (shape, op)
        return known[1]

    def _delta(self, shape: DeltaShape) -> _native.DeltaOp:
        known = self._deltas.get(id(shape))
        if known is None:
            op = _native.DeltaOp(
                self.pool,
                self._isa,
                shape.layer,
                shape.key_heads,
                shape.value_heads,
                shape.key_dim,
                shape.value_dim,
                shape.conv_width,
                shape.tiled,
                shape.norm_eps,
            )
            self._deltas[id(shape)] = known = (shape, op)
        return known[1]


def _start_pool(threads: int) -> _native.ThreadPool:
    try:
        return _native.ThreadPool(threads)
    except RuntimeError as error:  # the library's std::system_error
        raise CapacityError(
            f"the system refused to start {threads} threads ({error}); use fewer (--threads)"
        ) from error


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.address


def _check(tensor: Tensor, rows: int, cols: int) -> None:
    if tensor.dtype is not _F32 or tensor.shape[1] != cols or tensor.shape[0] < rows:
        raise ValueError(f"a tensor is {tensor.dtype} {tensor.shape}; needed: f32, at least {rows} rows of {cols}")
