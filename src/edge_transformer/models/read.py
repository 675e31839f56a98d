"""From a checkpoint to a gated ModelSpec: find the family by name, read its configuration, account for every tensor."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from edge_transformer.errors import UnsupportedModelError
from edge_transformer.formats.checkpoint import Checkpoint, TensorInfo
from edge_transformer.formats.weight import WeightFormat
from edge_transformer.memory import bytes_at
from edge_transformer.models import gemma2, gemma3, llama, mistral, qwen2, qwen3, qwen3_5, qwen3_next
from edge_transformer.models.config import ModelSpec
from edge_transformer.models.gate import FieldReader
from edge_transformer.models.gguf_config import gguf_fields
from edge_transformer.models.names import model_spec, tensor_specs

HF_FAMILIES = {
    family.model_type: family
    for family in (
        llama.HF, mistral.HF, qwen2.HF, qwen3.HF, gemma2.HF, gemma3.HF, qwen3_5.HF, qwen3_5.HF_WITH_VISION,
        qwen3_next.HF,
    )
}  # fmt: skip
GGUF_FAMILIES = {
    family.architecture: family
    for family in (llama.GGUF, qwen2.GGUF, qwen3.GGUF, gemma2.GGUF, gemma3.GGUF, qwen3_5.GGUF)
}

_VECTOR_FORMATS = (WeightFormat.F32, WeightFormat.F16, WeightFormat.BF16)
_COMPARED_BYTES = 1 << 20
_NAMED_LEFTOVERS = 5


def read_model(checkpoint: Checkpoint) -> ModelSpec:
    """The complete description of the model in `checkpoint`.

    Raises UnsupportedModelError naming the field or tensor and its value when the family is unknown, a field of the
    configuration is not understood in full, a tensor is missing or misshapen, or one is left over unexplained.
    """
    return _read_gguf(checkpoint) if checkpoint.container == "gguf" else _read_hf(checkpoint)


def _read_hf(checkpoint: Checkpoint) -> ModelSpec:
    fields = FieldReader(checkpoint.metadata, str(checkpoint.path))
    model_type = fields.string("model_type")
    family = HF_FAMILIES.get(model_type)
    if family is None:
        fields.refuse("model_type", f"supported are {', '.join(HF_FAMILIES)}")
    architectures = fields.optional_strings("architectures")
    if architectures is not None and architectures != [family.architecture]:
        fields.refuse("architectures", f"only [{family.architecture!r}] is supported for model_type {model_type!r}")
    config = family.read(fields)
    fields.finish()
    names = family.names
    left_out = (*names.ignorable, *map(re.compile, family.left_out))
    return _account(checkpoint, model_spec(config, names), names.names["head"], left_out, read_apart=())


def _read_gguf(checkpoint: Checkpoint) -> ModelSpec:
    keys = FieldReader(checkpoint.metadata, str(checkpoint.path))
    architecture = keys.string("general.architecture")
    family = GGUF_FAMILIES.get(architecture)
    if family is None:
        keys.refuse("general.architecture", f"supported are {', '.join(GGUF_FAMILIES)}")
    fields = gguf_fields(checkpoint, architecture)
    config = family.read(fields)
    fields.model.finish()
    fields.general.finish()
    names = family.names
    spec = model_spec(config, names, permuted_rope=family.permuted_rope)
    left_out = (*names.ignorable, *map(re.compile, fields.left_out))
    return _account(checkpoint, spec, names.names["head"], left_out, read_apart=family.read_apart)


def _account(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    head_name: str,
    left_out: tuple[re.Pattern[str], ...],
    read_apart: tuple[str, ...],
) -> ModelSpec:
    """Check that every tensor the model needs is there with its shape, and that every other one is explained: a match
    of `left_out`, or read apart.
    """
    vectors = {vector.name for layer in spec.layers for vector in layer.vectors} | {spec.final_norm.name}
    needed = set()
    for tensor in tensor_specs(spec):
        info = checkpoint.tensors.get(tensor.name)
        if info is None:
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor {tensor.name!r} is missing" + _why(spec, tensor.role)
            )
        if info.shape != tensor.stored_shape:
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor {tensor.name!r} has shape {list(info.shape)}; "
                f"the configuration asks for {list(tensor.stored_shape)}"
            )
        if tensor.name in vectors and info.format not in _VECTOR_FORMATS:
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor {tensor.name!r} is {info.format}; a vector must be F32, F16 or BF16"
            )
        if info.layout is not None and (tensor.name in vectors or tensor.parts):
            raise UnsupportedModelError(
                f"{checkpoint.path}: tensor {tensor.name!r} is quantized into planes; only a whole matrix can be, and "
                "this is a vector or several matrices in one: quantize the original model again (ete quantize)"
            )
        needed.add(tensor.name)
    ignored = [name for name in checkpoint.tensors if any(pattern.fullmatch(name) for pattern in left_out)]
    head = checkpoint.tensors.get(head_name)
    if spec.config.tied_embeddings and head is not None:
        _check_tied_copy(checkpoint, checkpoint.tensors[spec.embedding.name], head)
        ignored.append(head.name)
    explained = needed.union(ignored, read_apart)
    left = [name for name in checkpoint.tensors if name not in explained]
    if left:
        named = ", ".join(repr(name) for name in left[:_NAMED_LEFTOVERS])
        more = f" and {len(left) - _NAMED_LEFTOVERS} more" if len(left) > _NAMED_LEFTOVERS else ""
        raise UnsupportedModelError(
            f"{checkpoint.path}: tensor {named}{more} is not known in a {spec.config.family} model, "
            "so its effect cannot be ruled out"
        )
    return replace(spec, ignored_tensors=tuple(ignored))


def _why(spec: ModelSpec, role: str) -> str:
    return ", and tie_word_embeddings is false" if role == "head" and not spec.config.tied_embeddings else ""


def _check_tied_copy(checkpoint: Checkpoint, embedding: TensorInfo, head: TensorInfo) -> None:
    """With tied embeddings a head of its own is accepted only as a bit for bit copy of the embedding."""
    same = embedding.format is head.format and embedding.shape == head.shape and _equal_bytes(embedding, head)
    if not same:
        raise UnsupportedModelError(
            f"{checkpoint.path}: tie_word_embeddings is true, but tensor {head.name!r} differs from {embedding.name!r}"
        )


def _equal_bytes(a: TensorInfo, b: TensorInfo) -> bool:
    for start in range(0, a.nbytes, _COMPARED_BYTES):
        count = min(_COMPARED_BYTES, a.nbytes - start)
        left = bytes_at(a.file.address + a.offset + start, count)
        right = bytes_at(b.file.address + b.offset + start, count)
        if not np.array_equal(left, right):
            return False
    return True
