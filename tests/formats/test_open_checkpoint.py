"""What a path is decides how it is opened."""

import json
import os
from pathlib import Path

import pytest

from edge_transformer.errors import FileChangedError, FormatError
from edge_transformer.formats.checkpoint import MappedCheckpoint
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.weight import WeightFormat
from formats.sample_files import GgufTensor, entry, gguf_bytes, safetensors_bytes

GGUF = gguf_bytes([], [GgufTensor("a", (4,), 0, bytes(16))])
SAFETENSORS = safetensors_bytes({"a": entry("F32", [4], 0, 16)}, bytes(16))


def container(path: Path) -> str:
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return checkpoint.container


def test_files(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF)
    (tmp_path / "blob").write_bytes(GGUF)  # the content decides: hub caches name files by hash
    (tmp_path / "x.safetensors").write_bytes(SAFETENSORS)
    assert container(tmp_path / "model.gguf") == "gguf"
    assert container(tmp_path / "blob") == "gguf"
    assert container(tmp_path / "x.safetensors") == "safetensors"


@pytest.mark.parametrize(("name", "content"), [("m.gguf", GGUF), ("m.safetensors", SAFETENSORS)])
def test_both_containers_behave_alike(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    checkpoint = open_checkpoint(tmp_path / name)
    assert type(checkpoint) is MappedCheckpoint
    assert checkpoint.path == tmp_path / name
    assert {name: (info.shape, info.format, info.nbytes) for name, info in checkpoint.tensors.items()} == {
        "a": ((4,), WeightFormat.F32, 16)
    }
    with pytest.raises(TypeError):
        checkpoint.tensors["b"] = checkpoint.tensors["a"]  # type: ignore[index]
    checkpoint.check_unchanged()
    (tmp_path / name).write_bytes(content + b"more")
    with pytest.raises(FileChangedError):
        checkpoint.check_unchanged()
    checkpoint.close()
    checkpoint.close()


def test_folders(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(GGUF)
    assert container(tmp_path) == "gguf"
    (tmp_path / "other.gguf").write_bytes(GGUF)
    with pytest.raises(FormatError, match=r"several GGUF files \(model.gguf, other.gguf\); give one"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(SAFETENSORS)
    assert container(tmp_path) == "safetensors"
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "s.safetensors").write_bytes(SAFETENSORS)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "s.safetensors"}}))
    assert container(tmp_path) == "safetensors"


@pytest.mark.parametrize("start", [b"PK\x03\x04rest", b"\x80\x02rest", b"\x80\x04rest"])
def test_pickles(tmp_path: Path, start: bytes) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(start)
    with pytest.raises(FormatError, match=r"pickled weights.*convert them to safetensors"):
        open_checkpoint(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("name", ["missing", "x" * 5000, "nul\0nul", "plain.txt", "empty.gguf"])
def test_everything_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "plain.txt").write_text("hello")
    (tmp_path / "empty.gguf").touch()
    with pytest.raises(FormatError, match=r"cannot be opened|neither a GGUF nor"):
        open_checkpoint(tmp_path / name)


def test_pipes_are_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        open_checkpoint(tmp_path / "model.gguf")
    with pytest.raises(FormatError, match="not a regular file"):
        open_checkpoint(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(SAFETENSORS)
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(FormatError, match=r"config.json: is not a regular file"):
        open_checkpoint(tmp_path / "x.safetensors")
