"""The Backend protocol: the coarse ops a model is written in. `cpu`, `cuda` and `ops.reference` implement it.

Rules for every implementation:
- ops write into the given outputs; none allocates, synchronises, or reads a device value on the host;
- activations, residual stream and accumulation are fp32; x and out of one op never overlap;
- row r of an output depends on row r of the inputs, on its kind, and on absolute positions only;
- the first `batch.rows` rows of activation tensors are live, the rest is undefined.

Shapes: R rows of the pass, H hidden size, F feed-forward size, Q = heads * head_dim, K = kv_heads * head_dim,
V vocabulary. In gated-delta layers: C = channels of the shape, I = value_heads * value_dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edge_transformer.formats.weight import Weight, round_up
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.tensor import ITEM_BYTES, DType, Tensor

STATE_ALIGNMENT = 256
"""Of the blocks of recurrent state."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """Static facts of one layer's attention.

    `layer` selects the tile table; `rope` the cos/sin rows of the batch (None: no rotation); rotary_dim <= head_dim is
    rotated in half-split pairs (i, i + rotary_dim / 2). `window`: key j is visible to query i when i - j < window
    (None: all). `softcap`: s = softcap * tanh(s / softcap) before the mask (None: none). KV tiles of the layer hold
    K [kv_heads][512][head_dim], then V the same, in `kv_dtype` (F32 or BF16).
    """

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dim: int
    rope: int | None
    scale: float
    softcap: float | None
    window: int | None
    kv_dtype: DType


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Static facts of one gated-delta layer. `layer` selects the table of state blocks.

    Value head j uses key head j % key_heads when `tiled` (the order of GGUF files), else j // (value_heads //
    key_heads). conv_width: values of a channel that enter its convolution, the newest included; norm_eps is that of the
    norm of each head's output.

    The state of a sequence is one block per layer, f32: S [value_heads][key_dim][value_dim], then conv [channels]
    [conv_width - 1], the values before the convolution of the last tokens, the oldest first.
    """

    layer: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_width: int
    tiled: bool
    norm_eps: float

    @property
    def channels(self) -> int:
        """Columns of q, k and v side by side: what the convolution works on."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def state_values(self) -> int:
        """f32 values of S; those of the convolution follow."""
        return self.value_heads * self.key_dim * self.value_dim

    @property
    def block_bytes(self) -> int:
        """Bytes of a sequence's state in this layer, rounded up so that blocks lie one behind the other."""
        values = self.state_values + self.channels * (self.conv_width - 1)
        return round_up(values * ITEM_BYTES[DType.F32], STATE_ALIGNMENT)


class Backend(Protocol):
    """Executor of the ops. `name` is what `--backend` takes."""

    name: str

    def allocate(self, nbytes: int) -> tuple[int, object]:
        """Memory for a workspace: (address aligned to 256, owner). Called once at load, never by an op."""
        ...

    def reserve(
        self, rows: int, cols: int, shapes: Sequence[AttentionShape], deltas: Sequence[DeltaShape] = ()
    ) -> None:
        """Scratch for passes of up to `rows` rows, linear ops with up to `cols` input columns, these attentions and
        gated-delta layers.

        Called once at load, so that no op allocates. Raises UnsupportedModelError for shapes that cannot be computed.
        """
        ...

    def gather_rows(self, table: Weight, batch: Batch, scale: float, out: Tensor) -> None:
        """out[r] = scale * table[token_ids[r]]; out f32 [R, H]."""
        ...

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
        """residual += delta_norm ? rmsnorm(delta) * delta_norm : delta (when given); out = rmsnorm(residual) * weight.

        rmsnorm(x) = x / sqrt(mean(x^2) + eps) over the last axis. All f32; residual, delta, out [R, H]; weights [H].
        """
        ...

    def linear_group(
        self,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        x: Tensor,
        outs: Sequence[Tensor],
        batch: Batch,
    ) -> None:
        """outs[i] = x @ weights[i].T + biases[i]; x f32 [R, cols], outs[i] f32 [R, rows_i]."""
        ...

    def linear_add(self, weight: Weight, bias: Tensor | None, x: Tensor, residual: Tensor, batch: Batch) -> None:
        """residual += x @ weight.T + bias; x f32 [R, cols], residual f32 [R, rows]."""
        ...

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
        """Per head optional rmsnorm of q and k, then rope; q in place, k, v into their KV tiles, rounded to kv_dtype.

        q f32 [R, Q], k and v f32 [R, K]; q_norm, k_norm f32 [head_dim]. k is left undefined.
        """
        ...

    def attention(self, q: Tensor, shape: AttentionShape, out: Tensor, batch: Batch) -> None:
        """out = softmax(mask(softcap(scale * q k^T))) v over positions <= the row's own; q, out f32 [R, Q].

        Online softmax: one state (m, l, acc) per absolute tile of 512 positions, merged in ascending order.
        """
        ...

    def split_query_gate(self, joined: Tensor, shape: AttentionShape, q: Tensor, gate: Tensor, batch: Batch) -> None:
        """Take apart what the query projection of a gated attention gives: per head the query, then the gate.

        joined f32 [R, 2 Q], q and gate f32 [R, Q].
        """
        ...

    def apply_gate(self, x: Tensor, gate: Tensor, batch: Batch) -> None:
        """x *= sigmoid(gate); both f32 [R, Q]."""
        ...

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
        """The gated delta rule (Yang et al. 2024, arXiv:2412.06464) of all rows, in the order of their positions:

        causal depthwise convolution of qkv, then SiLU; q and k of each key head divided by sqrt(sum of squares + 1e-6),
        q also by sqrt(key_dim); beta = sigmoid(b), g = decay * softplus(a + dt_bias) <= 0; per value head
        S = exp(g) S, S += k (beta (v - S^T k))^T, o = S^T q; out = rmsnorm(o) * norm * silu(z) over value_dim.

        qkv f32 [R, C], z f32 [R, I], a and b f32 [R, value_heads]; conv f32 [C, conv_width], its last column for the
        newest value; decay (-exp(A_log)) and dt_bias f32 [value_heads], norm f32 [value_dim]; out f32 [R, I]. qkv and
        z are left undefined.

        A sequence's block is read when its first row of the pass has a position > 0 (the state before position 0 is
        zero whatever the block holds), and always written. Prompt rows take the chunked form, piece by piece: a piece
        is the rows of a span between two absolute borders of DELTA_CHUNK_POSITIONS. The engine ends prompt chunks on
        such borders, so that the pieces of a prompt do not depend on the chunks. Decode rows take one step each, in row
        order where a sequence has several.

        Where the batch asks for a checkpoint, the block is copied as it is before the row at that position; the copy is
        there when the pass has ended. Rows and blocks have the same bits with and without.
        """
        ...

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
        """out = activation(x @ gate.T + gate_bias) * (x @ up.T + up_bias); x f32 [R, H], out f32 [R, F].

        `activation`: "silu" or "gelu_tanh". The down projection is a linear_group or linear_add of its own segment.
        """
        ...

    def lm_head(self, weight: Weight, x: Tensor, rows: int, softcap: float | None, out: Tensor) -> None:
        """out = softcap(x @ weight.T) for the first `rows` rows; x f32 [>= rows, H], out f32 [>= rows, V].

        Takes the decode kernel whatever the rows' kind, so that a logit does not depend on how it was asked for.
        """
        ...

    def select_rows(self, x: Tensor, rows: Tensor, count: int, out: Tensor) -> None:
        """out[i] = x[rows[i]] for i < count; x, out f32 [., H], rows int32 [>= count]."""
        ...

    def read(self, tensor: Tensor, rows: int) -> npt.NDArray[np.float32]:
        """The first `rows` rows of an f32 tensor, on the host, once the ops before have run. Valid until the next read
        or op.
        """
        ...

    def argmax(self, tensor: Tensor, rows: int) -> npt.NDArray[np.int32]:
        """For each of the first `rows` rows of an f32 tensor, on the host, the index of its largest value, of equals
        the first; -1 where a value is NaN or infinite. Waits as `read` does.
        """
        ...

    def write(self, tensor: Tensor, values: npt.NDArray[np.float32]) -> None:
        """Put f32 [n, cols] into the first n rows of a tensor [>= n, cols], before the ops that follow."""
        ...

    def give_up(self) -> None:
        """The pass at hand was cancelled or has failed: no further op of it will come."""
        ...

    def close(self) -> None:
        """Release threads and memory. The backend is not used afterwards."""
        ...
