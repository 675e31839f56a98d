"""Names of model files, and the index of a sharded model as the hub and the reader both read it."""

import json
import os
from pathlib import Path

import pytest

from edge_transformer.errors import FormatError
from edge_transformer.formats.file_names import gguf_part_names, split_name
from edge_transformer.formats.safetensors_index import read_index


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("a-00001-of-00003.gguf", ("a", 1, 3)),
        ("folder/a-b-00002-of-00002.safetensors", ("folder/a-b", 2, 2)),
        ("-00001-of-00001.gguf", ("", 1, 1)),
        ("a.gguf", None),
        ("a-1-of-3.gguf", None),
        ("a-00001-of-00003.bin", None),
        ("a-00001-of-00003.gguf\n", None),
    ],
)
def test_names_of_split_models(name: str, parts: tuple[str, int, int] | None) -> None:
    assert split_name(name) == parts


def test_all_parts_of_a_name() -> None:
    assert gguf_part_names("x/a", 2) == ["x/a-00001-of-00002.gguf", "x/a-00002-of-00002.gguf"]


def test_the_index_by_file(tmp_path: Path) -> None:
    index = tmp_path / "index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}))
    assert read_index(index) == {"1.safetensors": {"a", "b"}}
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(FormatError, match="is not a regular file"):
        read_index(index)
