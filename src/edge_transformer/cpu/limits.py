"""What the CPU kernels do not take: asked before memory is allocated, and by whoever describes a model."""

from __future__ import annotations

from edge_transformer import _native
from edge_transformer.errors import UnsupportedModelError
from edge_transformer.ops.backend import AttentionShape, DeltaShape


def check_attention(shape: AttentionShape) -> None:
    """Raise UnsupportedModelError for heads that the kernels do not handle."""
    try:
        _native.check_heads(shape.heads, shape.kv_heads, shape.head_dim, shape.rotary_dim)
    except ValueError as error:
        raise UnsupportedModelError(f"attention on the CPU: {error} (--backend reference has no such limit)") from error


def check_delta(shape: DeltaShape) -> None:
    """Raise UnsupportedModelError for a gated-delta layer that the kernels do not handle."""
    try:
        _native.check_delta(shape.key_heads, shape.value_heads, shape.key_dim, shape.value_dim, shape.conv_width)
    except ValueError as error:
        raise UnsupportedModelError(
            f"gated-delta layers on the CPU: {error} (--backend reference has no such limit)"
        ) from error
