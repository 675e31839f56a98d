"""What a family of models is: the names it goes by in files, and how its configuration is read from each container."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_transformer.models.config import ModelConfig
from edge_transformer.models.gate import FieldReader
from edge_transformer.models.gguf_config import GgufFields
from edge_transformer.models.names import GGUF_NAMES, HF_NAMES, NameTable


@dataclass(frozen=True, slots=True)
class HfFamily:
    """A family in Hugging Face folders: `model_type` and the causal language model class of config.json.

    `left_out`: patterns of tensors that belong to other parts of the model than its text, and are not loaded.
    """

    model_type: str
    architecture: str
    read: Callable[[FieldReader], ModelConfig]
    names: NameTable = HF_NAMES
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family in GGUF files: general.architecture, and whether q and k rows are stored in adjacent-pair rope order.

    `read_apart`: tensors that become part of the configuration, not weights.
    """

    architecture: str
    permuted_rope: bool
    read: Callable[[GgufFields], ModelConfig]
    read_apart: tuple[str, ...] = ()
    names: NameTable = GGUF_NAMES
