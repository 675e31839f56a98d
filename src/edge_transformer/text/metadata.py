"""Typed reads of GGUF metadata and of JSON files, with errors that name the key."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_transformer.errors import FormatError, TextError
from edge_transformer.formats.gguf_types import StringArray
from edge_transformer.formats.json_file import read_bounded

MAX_JSON_BYTES = 256 << 20


def read_string(metadata: Mapping[str, object], key: str) -> str | None:
    """A string, None where the key is absent; TextError for another type."""
    value = metadata.get(key)
    if value is None or isinstance(value, str):
        return value
    raise TextError(f"{key} must be a string, got {type(value).__name__}")


def read_flag(metadata: Mapping[str, object], key: str, default: bool) -> bool:
    """A boolean, `default` where the key is absent; TextError for another type."""
    value = metadata.get(key)
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise TextError(f"{key} must be true or false, got {value!r}")


def read_token_id(metadata: Mapping[str, object], key: str, vocab_size: int) -> int | None:
    """A token id below `vocab_size`, None where the key is absent; TextError for anything else."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size:
        return value
    raise TextError(f"{key} must be a token id below {vocab_size}, got {value!r}")


def read_strings(metadata: Mapping[str, object], key: str) -> Sequence[str]:
    """Strings, TextError where the key is absent or anything else."""
    value = metadata.get(key)
    if value is None:
        raise TextError(f"{key} is missing, so the file holds no usable tokenizer")
    if isinstance(value, StringArray) or (isinstance(value, list) and all(isinstance(item, str) for item in value)):
        return value
    raise TextError(f"{key} must be a list of strings, got {type(value).__name__}")


def read_numbers(metadata: Mapping[str, object], key: str, count: int) -> npt.NDArray[Any] | None:
    """An array of exactly `count` numbers, None where the key is absent; TextError for anything else."""
    value = metadata.get(key)
    if value is None:
        return None
    numbers = np.asarray(value)
    if numbers.ndim != 1 or numbers.dtype.kind not in "iuf":
        raise TextError(f"{key} must be a list of numbers, got {type(value).__name__}")
    if len(numbers) != count:
        raise TextError(f"{key} has {len(numbers)} entries, the vocabulary has {count}")
    return numbers


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in a file, empty where there is no file; TextError when it is not a readable JSON object."""
    if not os.path.lexists(path):
        return {}
    try:
        value = json.loads(read_bounded(path, MAX_JSON_BYTES))
    except FormatError as error:
        raise TextError(str(error)) from error
    except (ValueError, RecursionError) as error:
        raise TextError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise TextError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value
