"""What each tensor of a model becomes when the model is quantized: decided before anything is read or written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from edge_transformer.errors import UsageError
from edge_transformer.formats.checkpoint import Checkpoint, TensorInfo
from edge_transformer.formats.planes_file import NAMES_KEY, QUANTIZATION_KEY
from edge_transformer.formats.planes_writer import FilePlan, PlainTensor, plan_file
from edge_transformer.formats.weight import FORMATS, WeightFormat, WeightLayout, packed_layout
from edge_transformer.models.config import ModelSpec, TensorSpec

VOCABULARY_FORMAT = WeightFormat.Q8_0
"""Of embedding and output projection, whatever the others get: their errors are those of whole tokens."""

SENSITIVE_ROLES = frozenset({"a", "b"})
"""Small matrices that stay f32: they make the decay and the step size of a recurrent state, whose errors add up."""

GROUPS = (32, 64, 128)
DEFAULT_GROUP = 64
_INT4 = {32: WeightFormat.Q4_0, 64: WeightFormat.I4_G64, 128: WeightFormat.I4_G128}


@dataclass(frozen=True, slots=True)
class Quantization:
    """What the user asked for. format: "int8" (groups of 32), "int8-row" or "int4"; group, minimums: of int4.

    Raises UsageError for combinations that there are not.
    """

    format: str
    group: int | None = None
    minimums: bool = False

    def __post_init__(self) -> None:
        if self.format not in ("int8", "int8-row", "int4"):
            raise UsageError(f"--format is {self.format!r}; there are int8, int8-row and int4")
        if self.format != "int4" and (self.group is not None or self.minimums):
            raise UsageError(f"--group and --minimums are settings of int4; {self.format} has none: leave them out")
        if self.group is not None and self.group not in GROUPS:
            raise UsageError(f"--group is {self.group}; there are 32, 64 and 128")
        if self.minimums and self.group != 32:
            raise UsageError(
                "--minimums need groups of 32 (--group 32): with larger ones they cost as many bytes as smaller groups "
                "do, and help less"
            )

    @property
    def description(self) -> str:
        if self.format == "int4":
            return f"int4, groups of {self.group or DEFAULT_GROUP}" + (", with minimums" if self.minimums else "")
        return "int8, a scale per row" if self.format == "int8-row" else "int8, groups of 32"

    def settings(self) -> dict[str, object]:
        """As they stand in config.json."""
        if self.format != "int4":
            return {"format": self.format}
        return {"format": "int4", "group": self.group or DEFAULT_GROUP, "minimums": self.minimums}

    def target(self, cols: int) -> WeightFormat | None:
        """The format of a matrix of `cols` columns: with smaller groups where these do not divide them, None where none
        do.
        """
        if cols % 32:
            return None
        if self.format == "int8":
            return WeightFormat.Q8_0
        if self.format == "int8-row":
            return WeightFormat.I8_ROW
        if self.minimums:
            return WeightFormat.Q4_1
        asked = self.group or DEFAULT_GROUP
        return next(_INT4[group] for group in reversed(GROUPS) if group <= asked and cols % group == 0)


@dataclass(frozen=True, slots=True)
class Item:
    """One tensor of the new file. spec: of a matrix; None for tensors that are no matrices of the model."""

    info: TensorInfo
    spec: TensorSpec | None
    result: WeightLayout | PlainTensor

    @property
    def quantized(self) -> bool:
        return isinstance(self.result, WeightLayout)


@dataclass(frozen=True, slots=True)
class QuantizationPlan:
    """All tensors in the order of the file, the file, and the tensors of the source that are left out."""

    items: tuple[Item, ...]
    file: FilePlan
    left_out: tuple[str, ...]

    @property
    def source_bytes(self) -> int:
        return sum(item.info.nbytes for item in self.items)


def plan_quantization(checkpoint: Checkpoint, spec: ModelSpec, choice: Quantization) -> QuantizationPlan:
    """Small tensors first, then matrices in order of use: embedding, layers by segments, output projection.

    Raises UsageError for a model that `ete quantize` has made.
    """
    tensors = checkpoint.tensors
    if any(info.layout is not None for info in tensors.values()):
        raise UsageError(
            f"{checkpoint.path} is quantized already; quantize the model it was made from, so that errors do not add up"
        )
    if any(matrix.parts for matrix in _matrices(spec)):
        raise UsageError(
            f"{checkpoint.path}: models of the family {spec.config.family} keep several matrices in one tensor; they "
            "cannot be quantized yet"
        )
    matrices = {matrix.name: matrix for matrix in _matrices(spec)}
    left_out = set(spec.ignored_tensors)
    vectors = [
        Item(info, None, PlainTensor(WeightFormat.F32, info.shape))
        for name, info in tensors.items()
        if name not in matrices and name not in left_out
    ]
    vocabulary = {spec.embedding.name, spec.head.name}
    items = (*vectors, *(_matrix_item(tensors, matrix, choice, vocabulary) for matrix in matrices.values()))
    metadata = {QUANTIZATION_KEY: choice.description, NAMES_KEY: checkpoint.container}
    file = plan_file([(item.info.name, item.result) for item in items], metadata)
    return QuantizationPlan(items, file, tuple(name for name in tensors if name in left_out))


def _matrices(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield spec.embedding
    for layer in spec.layers:
        for segment in layer.segments:
            yield from segment.matrices
    yield spec.head


def _matrix_item(
    tensors: Mapping[str, TensorInfo], matrix: TensorSpec, choice: Quantization, vocabulary: set[str]
) -> Item:
    info = tensors[matrix.name]
    rows, cols = matrix.shape
    target = choice.target(cols)
    if matrix.role in SENSITIVE_ROLES:
        target = None
    elif target is not None and matrix.name in vocabulary:
        target = VOCABULARY_FORMAT
    if target is not None:
        return Item(info, matrix, packed_layout(target, rows, cols))
    stays = FORMATS[info.format].block_cols == 1 and matrix.role not in SENSITIVE_ROLES
    return Item(info, matrix, PlainTensor(info.format if stays else WeightFormat.F32, info.shape))
