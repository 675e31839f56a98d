"""CudaBackend: the Backend protocol on a GPU. One wrapper per op family; here is what joins them into passes.

A pass is queued without waiting: the batch's arrays are uploaded at its first op, results come back by `read`. The
embedding's rows are gathered on the CPU, where the table lies; so is the output projection when the plan says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from edge_transformer.cuda.arena import Arena
from edge_transformer.cuda.attention import (
    Attention,
    KvRun,
    KvTable,
    PassArrays,
    workspace_bytes,
)
from edge_transformer.cuda.attention import sources as attention_sources
from edge_transformer.cuda.decode_graphs import DecodeGraphs
from edge_transformer.cuda.delta import DeltaArrays, DeltaParameters, DeltaStage, GatedDelta
from edge_transformer.cuda.delta import check_shape as check_delta_shape
from edge_transformer.cuda.delta import sources as delta_sources
from edge_transformer.cuda.delta import workspace_bytes as delta_workspace_bytes
from edge_transformer.cuda.device_batch import MAX_LOGIT_ROWS, BatchCapacity, DeviceBatch
from edge_transformer.cuda.elementwise import ElementwiseOps, gate_sources
from edge_transformer.cuda.gemm_shape import gemm_workspace_bytes
from edge_transformer.cuda.host_reads import HostReads, Rows, host_reads_sources
from edge_transformer.cuda.kv_offload import KvOffload
from edge_transformer.cuda.launch_rows import LaunchRows
from edge_transformer.cuda.linear import LinearOps
from edge_transformer.cuda.runtime import Gpu, Memory, Stream
from edge_transformer.cuda.streamed_head import StreamedHead
from edge_transformer.formats.weight import Weight, round_up
from edge_transformer.ops.backend import AttentionShape, Backend, DeltaShape
from edge_transformer.ops.batch import KV_TILE_POSITIONS, Batch
from edge_transformer.ops.tensor import ITEM_BYTES, DType, Tensor, array_at


class CudaBackend:
    """The ops on a GPU, for passes within `capacity`.

    host: does what is computed on the CPU. kv_memory: (address, bytes) of the KV cache in the arena, None when it is in
    page-locked host memory and comes in runs through buffers of `kv_buffer_bytes`. replayable: decode passes may replay
    a graph, since nothing is streamed. state_memory: (address, bytes) of the recurrent state in the arena, where the
    model has any. widest: the most columns of a layer's matrix. Used by one thread at a time.
    """

    name = "cuda"

    def __init__(
        self,
        gpu: Gpu,
        arena: Arena,
        compute: Stream,
        capacity: BatchCapacity,
        host: Backend,
        kv_memory: tuple[int, int] | None,
        kv_buffer_bytes: int = 0,
        fast_prefill: bool = False,
        replayable: bool = False,
        state_memory: tuple[int, int] | None = None,
        widest: int = 0,
    ) -> None:
        self._gpu = gpu
        self._replayable = replayable
        self._given_up = False
        self._graphs = DecodeGraphs(gpu, compute)
        self._arena = arena
        self._compute = compute
        self._capacity = capacity
        self._host = host
        self._fast = fast_prefill
        self._widest = widest
        self._kv_memory = () if kv_memory is None else (kv_memory,)
        self._state_memory = () if state_memory is None else (state_memory,)
        self._host_reads = HostReads(gpu)
        self._offload = (
            None if kv_memory is not None else KvOffload(gpu, arena, kv_buffer_bytes, compute, self._host_reads)
        )
        self._linear = LinearOps(gpu, fast_prefill)
        self._elementwise = ElementwiseOps(gpu)
        block_bytes = DeviceBatch.block_bytes(capacity)
        self._device = DeviceBatch(
            self._host_reads,
            arena.take(block_bytes, "batch arrays"),
            gpu.allocate_host(block_bytes, "batch arrays"),
            capacity,
        )
        self._batch: Batch | None = None
        self._rows = LaunchRows(0, 0, 0, 0)
        self._attentions: dict[int, tuple[AttentionShape, Attention]] = {}
        self._op_workspace = 0
        self._deltas: dict[DeltaShape, GatedDelta] = {}
        self._staging: Memory | None = None
        self._embedded: Memory | None = None
        self._likeliest: Memory | None = None

    @staticmethod
    def workspace_bytes(
        capacity: BatchCapacity,
        shapes: Sequence[AttentionShape],
        deltas: Sequence[DeltaShape],
        widest: int,
        capability: tuple[int, int],
        fast_prefill: bool,
    ) -> int:
        """Bytes of the arena that the backend itself takes: batch arrays, and what an op needs while it runs. `widest`:
        the most columns of a layer's matrix. Raises UnsupportedModelError for a layer that there are no kernels for.
        """
        for shape in deltas:
            check_delta_shape(shape)
        op_bytes = _op_workspace(capacity, shapes, deltas, widest, capability, fast_prefill)
        return round_up(DeviceBatch.block_bytes(capacity), 256) + round_up(op_bytes, 256)

    def prepare(
        self,
        weights: Iterable[Weight],
        shapes: Sequence[AttentionShape],
        deltas: Sequence[DeltaShape] = (),
        output_gate: bool = False,
    ) -> None:
        """Compile all kernels that a model of these weights and mixers needs, several at once; called once at load,
        so that no pass waits for a compiler. output_gate: of attention (ModelConfig.output_gate).
        """
        capability = self._gpu.properties.capability
        sources = self._linear.sources((weight.layout.format, weight.layout.cols) for weight in weights)
        for shape in shapes:
            sources += self._elementwise.sources(shape.kv_dtype)
            sources += attention_sources(shape, capability, self._fast)
        for delta in deltas:
            sources += delta_sources(delta)
        if output_gate:
            sources += gate_sources()
        sources += host_reads_sources()
        self._gpu.prepare(list(dict.fromkeys(sources)))

    def allocate(self, nbytes: int) -> tuple[int, object]:
        return self._arena.take(nbytes, "activations and logits"), self._arena

    def reserve(
        self, rows: int, cols: int, shapes: Sequence[AttentionShape], deltas: Sequence[DeltaShape] = ()
    ) -> None:
        """Workspaces and kernels of the mixers, staging memory for `rows` rows of `cols` columns."""
        self._host.reserve(rows, cols, ())
        capability = self._gpu.properties.capability
        op_bytes = _op_workspace(self._capacity, shapes, deltas, self._widest, capability, self._fast)
        if op_bytes:
            self._op_workspace = self._arena.take(op_bytes, "workspace of ops")
        self._linear.reserve(self._op_workspace, op_bytes)
        for shape in shapes:
            self._attention(shape)
        for delta in deltas:
            self._delta(delta)
        self._grow_staging(rows * cols * ITEM_BYTES[DType.F32])
        # Rows of the embedding have memory of their own, whose address a graph can keep.
        self._embedded = self._gpu.allocate_host(rows * cols * ITEM_BYTES[DType.F32], "rows of the embedding")
        self._likeliest = self._gpu.allocate_host(MAX_LOGIT_ROWS * ITEM_BYTES[DType.I32], "likeliest tokens")

    # ---- ops

    def gather_rows(self, table: Weight, batch: Batch, scale: float, out: Tensor) -> None:
        self._begin(batch)
        if self._embedded is None:
            raise ValueError("reserve has not been called")
        rows = Tensor(self._embedded.address, (batch.rows, out.shape[1]), DType.F32, self._embedded)
        self._host.gather_rows(table, batch, scale, rows)
        if self._graphs.replaying:
            # All that the graph reads is in place: the GPU works while Python walks through the layers.
            self._graphs.replay()
        else:
            nbytes = (self._rows.prompt + self._rows.decode) * out.shape[1] * ITEM_BYTES[DType.F32]
            self._host_reads.read(out.address, rows.address, nbytes, self._compute)

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
        self._begin(batch)
        if self._graphs.replaying:
            return
        self._elementwise.add_norm(residual, delta, delta_norm, weight, eps, out, self._rows, self._compute)

    def linear_group(
        self,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        x: Tensor,
        outs: Sequence[Tensor],
        batch: Batch,
    ) -> None:
        if self._graphs.replaying:
            return
        self._linear.linear_group(weights, biases, x, outs, self._rows, self._compute)

    def linear_add(self, weight: Weight, bias: Tensor | None, x: Tensor, residual: Tensor, batch: Batch) -> None:
        if self._graphs.replaying:
            return
        self._linear.linear_add(weight, bias, x, residual, self._rows, self._compute)

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
        if self._graphs.replaying:
            return
        device = self._device
        self._elementwise.qk_norm_rope_append(
            q,
            k,
            v,
            q_norm,
            k_norm,
            eps,
            shape,
            0 if shape.rope is None else device.cos(shape.rope),
            0 if shape.rope is None else device.sin(shape.rope),
            device.positions,
            device.row_sequence,
            device.tile_table(shape.layer),
            device.tile_stride,
            list(self._kv_memory) if self._offload is None else self._offload.written_tiles(shape, batch),
            self._rows,
            self._compute,
        )

    def attention(self, q: Tensor, shape: AttentionShape, out: Tensor, batch: Batch) -> None:
        if self._graphs.replaying:
            return
        if self._offload is None:
            table = self._device.tile_table(shape.layer)
            kv = KvTable(table, self._device.tile_stride, 0, self._tiles(), self._kv_memory)
            self._attend(q, shape, out, kv, begin=True, end=True)
            return
        for run, begin, end in self._offload.runs(shape, batch):
            self._attend(q, shape, out, run, begin, end)

    def split_query_gate(self, joined: Tensor, shape: AttentionShape, q: Tensor, gate: Tensor, batch: Batch) -> None:
        if self._graphs.replaying:
            return
        self._elementwise.split_query_gate(joined, shape, q, gate, self._rows, self._compute)

    def apply_gate(self, x: Tensor, gate: Tensor, batch: Batch) -> None:
        if self._graphs.replaying:
            return
        self._elementwise.apply_gate(x, gate, self._rows, self._compute)

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
        if self._graphs.replaying:
            return
        device = self._device
        arrays = DeltaArrays(
            device.counts,
            device.pieces,
            self._delta_stages(shape, batch),
            device.decode_starts,
            device.decode_next,
            self._rows.decode,
            device.state_table(shape.layer),
            device.sequences,
            self._rows.prompt,
            self._state_memory,
        )
        parameters = DeltaParameters(conv, decay, dt_bias, norm)
        op, workspace = self._delta(shape), self._op_workspace
        op.run(qkv, z, a, b, parameters, out, arrays, workspace, self._compute)

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
        if self._graphs.replaying:
            return
        self._linear.gated_mlp(gate, up, gate_bias, up_bias, activation, x, out, self._rows, self._compute)

    def lm_head(self, weight: Weight, x: Tensor, rows: int, softcap: float | None, out: Tensor) -> None:
        if weight.owner is self._arena:
            self._linear.lm_head(weight, x, softcap, out, self._logit_rows(rows), self._compute)
            return
        head = weight.owner if isinstance(weight.owner, StreamedHead) else None
        for_the_cpu = weight if head is None else head.for_the_cpu
        hidden = None if for_the_cpu is None else self.read(x, rows).copy()  # before the GPU has more to do
        if head is not None:
            for index in range(len(head)):
                with head.block(index) as (first_row, block):
                    self._linear.lm_head(block, x, softcap, out, self._logit_rows(rows), self._compute, first_row)
        if for_the_cpu is not None and hidden is not None:
            self._lm_head_on_the_cpu(for_the_cpu, hidden, softcap, out)

    def select_rows(self, x: Tensor, rows: Tensor, count: int, out: Tensor) -> None:
        """`rows` must be the logit rows of the batch, which lie on the device already."""
        if not self._graphs.replaying:
            of_pass = LaunchRows(0, 0, count, self._device.counts)
            self._elementwise.select_rows(x, self._device.logit_rows, out, of_pass, self._compute)
        self._graphs.end()

    def read(self, tensor: Tensor, rows: int) -> npt.NDArray[np.float32]:
        staging = self._stage(rows, tensor.shape[1])
        self._gpu.copy(staging.address, tensor.address, staging.nbytes, self._compute)
        self._gpu.synchronize(self._compute)
        return staging.numpy().view(np.float32)

    def argmax(self, tensor: Tensor, rows: int) -> npt.NDArray[np.int32]:
        if self._likeliest is None:
            raise ValueError("reserve has not been called")
        # The kernel writes to host memory: a few bytes, and no copy to wait for.
        self._elementwise.argmax(tensor, self._likeliest.address, self._logit_rows(rows), self._compute)
        self._gpu.synchronize(self._compute)
        return array_at(self._likeliest.address, (rows,), np.int32).view(np.int32).copy()

    def write(self, tensor: Tensor, values: npt.NDArray[np.float32]) -> None:
        self._gpu.synchronize(self._compute)  # what was staged before has been read
        staging = self._stage(*values.shape)
        staging.numpy()[...] = values
        self._gpu.copy(tensor.address, staging.address, staging.nbytes, self._compute)

    def give_up(self) -> None:
        """Drop what was being recorded. What was queued runs; the next pass waits for it."""
        self._batch = None
        self._given_up = True
        self._graphs.drop()

    def close(self) -> None:
        """Wait for what is queued, then release the arena and the GPU, also where that wait fails."""
        with ExitStack() as last:
            last.callback(self._host.close)
            last.callback(self._gpu.close)
            last.callback(self._arena.close)
            last.callback(self._graphs.close)
            self._graphs.drop()
            self._gpu.synchronize()

    # ---- parts

    def _lm_head_on_the_cpu(
        self, weight: Weight, hidden: npt.NDArray[np.float32], softcap: float | None, out: Tensor
    ) -> None:
        """The last columns of `out`, as many as `weight` has rows, while the GPU does what is queued."""
        rows, columns, computed = hidden.shape[0], out.shape[1], weight.layout.rows
        logits = self._stage(rows, computed)
        self._host.lm_head(weight, _host_tensor(hidden), rows, softcap, logits)
        item = ITEM_BYTES[DType.F32]
        end_of_rows = Rows(rows, computed * item, computed * item, columns * item)
        self._host_reads.read_rows(
            out.address + (columns - computed) * item, logits.address, end_of_rows, self._compute
        )

    def _begin(self, batch: Batch) -> None:
        """Upload a batch at its first op."""
        if batch is self._batch:
            return
        self._graphs.drop()
        self._gpu.synchronize(self._compute)  # the pass before has read its arrays and the staging memory
        if self._given_up and self._offload is not None:
            self._offload.settle()
        self._given_up = False
        self._device.stage(batch)
        self._batch = batch
        prompt, decode = self._device.prompt_bucket, self._device.decode_bucket
        if prompt + decode > self._capacity.rows:
            prompt, decode = self._device.prompt_rows, self._device.decode_rows
        self._rows = LaunchRows(prompt, decode, 0, self._device.counts)
        if self._replayable and not self._device.prompt_rows and self._device.logit_rows_count:
            self._graphs.begin((decode, self._tiles(), self._device.logit_rows_count))
        if not self._graphs.replaying:
            self._device.upload(prompt + decode, self._compute)

    def _tiles(self) -> int:
        """Tiles that attention is launched for: those of the longest sequence; a power of two, so that graphs are
        few.
        """
        tiles = self._device.last_position // KV_TILE_POSITIONS + 1
        return min(1 << (tiles - 1).bit_length(), self._device.tile_stride)

    def _logit_rows(self, rows: int) -> LaunchRows:
        """For `rows` rows, whatever the newest pass had: hidden states of an earlier one may have been kept."""
        return LaunchRows(0, 0, rows, self._device.counts_of_logits(rows))

    def _attention(self, shape: AttentionShape) -> Attention:
        known = self._attentions.get(id(shape))
        if known is None:
            made = Attention(self._gpu, shape, self._capacity.rows, self._fast)
            self._attentions[id(shape)] = known = (shape, made)
        return known[1]

    def _delta(self, shape: DeltaShape) -> GatedDelta:
        """The op of a layer; layers that differ in their number alone share it."""
        key = replace(shape, layer=0)
        if key not in self._deltas:
            self._deltas[key] = GatedDelta(self._gpu, shape, self._capacity.rows, self._capacity.sequences)
        return self._deltas[key]

    def _delta_stages(self, shape: DeltaShape, batch: Batch) -> list[DeltaStage]:
        """The pieces of the prompt rows, and the copies of blocks to be made between them."""
        blocks = batch.state_tables[shape.layer]
        return [
            DeltaStage(
                first,
                count,
                tuple((int(copy.addresses[shape.layer]), int(blocks[copy.sequence])) for copy in stage.checkpoints),
            )
            for (first, count), stage in zip(self._device.piece_stages, self._device.prompt_stages, strict=True)
        ]

    def _attend(
        self, q: Tensor, shape: AttentionShape, out: Tensor, kv: KvTable | KvRun, begin: bool, end: bool
    ) -> None:
        """Take the tiles of `kv` into the states of all rows of the pass."""
        device, op = self._device, self._attention(shape)
        arrays = PassArrays(device.positions, device.row_sequence, device.counts, device.query_blocks)
        workspace = self._op_workspace
        if device.query_block_count:
            op.prompt(q, out, arrays, device.query_block_count, kv, workspace, self._compute, begin, end)
        if device.decode_rows:
            op.decode(q, out, arrays, self._rows.decode, kv, workspace, self._compute, begin, end)

    def _stage(self, rows: int, cols: int) -> Tensor:
        """Page-locked host memory for f32 [rows, cols]; what was staged there before must have been read."""
        staging = self._grow_staging(rows * cols * ITEM_BYTES[DType.F32])
        return Tensor(staging.address, (rows, cols), DType.F32, staging)

    def _grow_staging(self, nbytes: int) -> Memory:
        if self._staging is None or nbytes > self._staging.nbytes:
            old, self._staging = self._staging, None  # nothing, should the host refuse what is asked for now
            if old is not None:
                self._gpu.synchronize()
                old.close()
            self._staging = self._gpu.allocate_host(nbytes, "staging memory")
        return self._staging


def _host_tensor(values: npt.NDArray[np.float32]) -> Tensor:
    return Tensor(values.ctypes.data, values.shape, DType.F32, values)


def _op_workspace(
    capacity: BatchCapacity,
    shapes: Sequence[AttentionShape],
    deltas: Sequence[DeltaShape],
    widest: int,
    capability: tuple[int, int],
    fast_prefill: bool,
) -> int:
    """Bytes that attention, the gated delta rule or a product needs: they run one after another, and keep nothing there
    from one call to the next.
    """
    return max(
        gemm_workspace_bytes(capacity.rows, widest, capability, fast_prefill),
        max((workspace_bytes(shape, capacity.rows) for shape in shapes), default=0),
        max((delta_workspace_bytes(shape, capacity.rows, capacity.sequences) for shape in deltas), default=0),
    )
