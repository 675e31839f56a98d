"""A model described from its files' headers, and the verdict of the gate on it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from edge_transformer.cpu.limits import check_attention, check_delta
from edge_transformer.errors import EdgeTransformerError, TextError, UnsupportedModelError
from edge_transformer.formats.checkpoint import Checkpoint, TensorInfo
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.config import GATED_DELTA, ModelConfig, ModelSpec
from edge_transformer.models.forward import attention_shapes, delta_shapes
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.text.load import load_text

KV_BYTES = {"bf16": 2, "f32": 4}


def describe(path: Path) -> tuple[dict[str, Any], EdgeTransformerError | None]:
    """Facts that can be written as JSON, and why the model would be refused (None: it runs).

    A refused model is described as far as it is understood. Raises FormatError when the files are corrupt or missing.
    """
    facts: dict[str, Any] = {
        "path": str(path),
        "container": "unknown",
        "quantization": None,
        "files": 0,
        "tensors": 0,
        "bytes": 0,
        "parts": {},
    }
    refusal: EdgeTransformerError | None = None
    try:
        checkpoint = open_checkpoint(path)
    except UnsupportedModelError as error:
        refusal = error
    else:
        try:
            facts |= _file_facts(checkpoint)
            spec = read_model(checkpoint)
            refusal = _limit_of_the_cpu(spec.config)
            facts |= _architecture_facts(spec.config)
            facts |= {"parameters": _parameters(checkpoint, spec), "parts": _parts(checkpoint, spec)}
            facts |= {"left_out": list(spec.ignored_tensors)}
            text = load_text(checkpoint)
            facts |= {"tokenizer": _tokenizer_kind(checkpoint), "chat_template": text.chat_template is not None}
        except (UnsupportedModelError, TextError) as error:
            refusal = error
        finally:
            checkpoint.close()
    facts |= {"runs": refusal is None, "reason": None if refusal is None else str(refusal)}
    return facts, refusal


def _limit_of_the_cpu(config: ModelConfig) -> UnsupportedModelError | None:
    """Why the default backend would refuse a model that the gate understands; None when it runs."""
    try:
        for shape in attention_shapes(config, DType.F32):
            check_attention(shape)
        for delta in delta_shapes(config):
            check_delta(delta)
    except UnsupportedModelError as error:
        return error
    return None


def _file_facts(checkpoint: Checkpoint) -> dict[str, Any]:
    tensors = list(checkpoint.tensors.values())
    files = {tensor.file.path: tensor.file.nbytes for tensor in tensors}
    return {
        "container": checkpoint.container if checkpoint.quantization is None else "safetensors",
        "quantization": checkpoint.quantization,
        "files": len(files),
        "tensors": len(tensors),
        "bytes": sum(files.values()),
        "parts": {"weights": _bytes_by_format(tensors)},
    }


def _architecture_facts(config: ModelConfig) -> dict[str, Any]:
    recurrent = config.layer_kinds.count(GATED_DELTA)
    per_token = 2 * (config.num_layers - recurrent) * config.num_kv_heads * config.head_dim
    return {
        "architecture": config.family,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "layer_windows": config.layer_windows,
        "gated_delta_layers": recurrent,
        "vocab_size": config.vocab_size,
        "tied_embeddings": config.tied_embeddings,
        "context_length": config.context_length,
        "ropes": [{"type": rope.type, "theta": rope.theta, "factor": rope.factor} for rope in config.ropes],
        "kv_bytes_per_token": {name: per_token * nbytes for name, nbytes in KV_BYTES.items()},
        "recurrent_bytes": sum(shape.block_bytes for shape in delta_shapes(config)),
    }


def _parts(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, dict[str, int]]:
    """Bytes by format, for each part of the model."""
    names: dict[str, list[str]] = {"embedding": [spec.embedding.name], "attention": []}
    names |= {} if spec.config.delta is None else {"gated delta": []}
    names |= {"MLP": [], "vectors": []}
    part_of = {"mixer": "attention", "delta_mixer": "gated delta"}
    for layer in spec.layers:
        for segment in layer.segments:
            names[part_of.get(segment.name, "MLP")] += [matrix.name for matrix in segment.matrices]
        names["vectors"] += [vector.name for vector in layer.vectors]
    names["vectors"].append(spec.final_norm.name)
    if spec.head.name != spec.embedding.name:
        names["lm_head"] = [spec.head.name]
    if spec.ignored_tensors:
        names["left out"] = list(spec.ignored_tensors)
    return {
        part: _bytes_by_format(checkpoint.tensors[name] for name in dict.fromkeys(tensors))
        for part, tensors in names.items()
    }


def _parameters(checkpoint: Checkpoint, spec: ModelSpec) -> int:
    used = (tensor for name, tensor in checkpoint.tensors.items() if name not in spec.ignored_tensors)
    return sum(_elements(tensor) for tensor in used)


def _elements(tensor: TensorInfo) -> int:
    count = 1
    for length in tensor.shape:
        count *= length
    return count


def _bytes_by_format(tensors: Iterable[TensorInfo]) -> dict[str, int]:
    total: dict[str, int] = {}
    for tensor in tensors:
        total[str(tensor.format)] = total.get(str(tensor.format), 0) + tensor.nbytes
    return dict(sorted(total.items(), key=lambda entry: -entry[1]))


def _tokenizer_kind(checkpoint: Checkpoint) -> str:
    """Where the tokenizer comes from; for GGUF its model and pre-tokenizer, as the file names them."""
    if checkpoint.container != "gguf":
        return "tokenizer.json"
    model = checkpoint.metadata.get("tokenizer.ggml.model")
    pre = checkpoint.metadata.get("tokenizer.ggml.pre")
    return f"{model}" if pre is None else f"{model}, pre-tokenizer {pre}"
