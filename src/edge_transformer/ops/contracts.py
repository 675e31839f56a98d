"""The contract of every op as data: how close a result must be to fp64, and what the op moves and computes.

A result x is right when |x - x64| <= eps * magnitude, where x64 is the same op in fp64 on the same inputs (weights at
their dequantized values, keys and values as stored in their tiles), and the op's magnitude, element by element, is what
rounding errors are proportional to. The tests of every backend take their tolerance from here and never loosen it.

Shapes and dtypes of the tensors are in ops.backend, op by op. Scratch is stated by each executor as a function of rows
and columns (cpu: linear_workspace, attention_workspace) and reserved by Backend.reserve.
"""

from __future__ import annotations

from dataclasses import dataclass

from edge_transformer.formats.weight import FORMATS, WeightLayout
from edge_transformer.ops.backend import AttentionShape, DeltaShape
from edge_transformer.ops.tensor import ITEM_BYTES, DType


@dataclass(frozen=True, slots=True)
class Contract:
    """`eps` times the magnitude bounds the error; 0: the result is exact."""

    eps: float
    magnitude: str


_PRODUCT = "sum over columns of |x| |w|, plus |bias|, plus |residual| where one is added to"

CONTRACTS: dict[str, Contract] = {
    "gather_rows": Contract(1.2e-7, "|result|: one rounding, of scale * value"),
    # A column's own error, and that of the row's scale through its largest relative error.
    "add_norm": Contract(
        1e-6,
        "p = |residual| before + |delta| normalised, for residual; "
        "(p + |residual| * max(p) / rms) / rms * |weight| for out, rms of the new residual's row",
    ),
    "linear_group": Contract(1e-6, _PRODUCT),
    "linear_add": Contract(1e-6, _PRODUCT),
    "qk_norm_rope_append": Contract(
        1e-6, "|a| + |b| of the rotated pair, after the norm; then one rounding to kv_dtype"
    ),
    # A score's error is relative to the terms of its dot product and enters the weights through exp.
    "attention": Contract(1e-6, "(1 + largest scale * sum |q| |k| in sight) * largest |v| of the column in sight"),
    "split_query_gate": Contract(0.0, "copies"),
    "apply_gate": Contract(1e-6, "|x|"),
    # Errors of the convolution enter k and q over their norms; errors of the state decay with it, and enter o through q
    # and out through its norm, as those of a row's scale do in add_norm.
    "gated_delta": Contract(
        2e-6,
        "(p + |o| max(p) / rms) / rms |norm silu(z)|, rms = sqrt(mean(o^2) + eps), with p = E^T q', "
        "E = exp(g) E + k' m^T, m = beta (v' + |S|^T k'), and q', k', v' made of the sums of |conv| |qkv| in place of "
        "the convolution's results, over the same norms; for the state E, for that of the convolution 0",
    ),
    "gated_mlp": Contract(2e-6, "(sum |x| |gate| + 1) * (sum |x| |up| + 1), biases included in the sums"),
    "lm_head": Contract(1e-6, _PRODUCT),
    "select_rows": Contract(0.0, "copies"),
}


def weight_bytes(layout: WeightLayout) -> int:
    """Bytes of a weight's planes without padding: what one reading of it moves."""
    spec = FORMATS[layout.format]
    per_row = sum(plane.row_bytes(layout.cols) for plane in spec.planes)
    return layout.rows * per_row


def add_norm_bytes(rows: int, cols: int, has_delta: bool) -> int:
    """Bytes of residual (read, and written when there is a delta), delta and out."""
    return rows * cols * ITEM_BYTES[DType.F32] * (4 if has_delta else 2)


def visible_positions(shape: AttentionShape, position: int) -> int:
    """How many keys a row at `position` sees."""
    return position + 1 if shape.window is None else min(position + 1, shape.window)


def attention_decode_bytes(shape: AttentionShape, position: int) -> int:
    """Bytes of keys and values that one decode row reads; every row reads its own."""
    visible = visible_positions(shape, position)
    return 2 * shape.kv_heads * visible * shape.head_dim * ITEM_BYTES[shape.kv_dtype]


def attention_flops(shape: AttentionShape, position: int, rows: int = 1) -> int:
    """Floating-point operations (a multiply-add is two) of `rows` consecutive rows from `position` on, without exp."""
    visible = sum(visible_positions(shape, row) for row in range(position, position + rows))
    return 4 * shape.heads * shape.head_dim * visible


def gated_delta_decode_bytes(shape: DeltaShape) -> int:
    """Bytes that one decode row moves: the state read and written, qkv, z and out."""
    inner = shape.value_heads * shape.value_dim
    conv = shape.channels * (shape.conv_width - 1)
    return (2 * (shape.state_values + conv) + shape.channels + 2 * inner) * ITEM_BYTES[DType.F32]


def gated_delta_step_flops(shape: DeltaShape) -> int:
    """Floating-point operations of one step (a multiply-add is two) on the state: decay, S^T k, the update, S^T q."""
    return 7 * shape.state_values
