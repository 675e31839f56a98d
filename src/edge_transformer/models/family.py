"""What a family of models is: the names it goes by in files, and how its configuration is read from each container."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from edge_transformer.models.config import ModelConfig
from edge_transformer.models.gate import FieldReader
from edge_transformer.models.gguf_config import GgufFields


@dataclass(frozen=True, slots=True)
class HfFamily:
    """A family in Hugging Face folders: `model_type` and the causal language model class of config.json."""

    model_type: str
    architecture: str
    read: Callable[[FieldReader], ModelConfig]


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """A family in GGUF files: general.architecture, and whether q and k rows are stored in adjacent-pair rope order.

    `read_apart`: tensors that become part of the configuration, not weights.
    """

    architecture: str
    permuted_rope: bool
    read: Callable[[GgufFields], ModelConfig]
    read_apart: tuple[str, ...] = ()
