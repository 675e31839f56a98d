"""Random models of true shapes: files that independent readers open, numbers of a sane size, finite logits."""

import json
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from paths import REPOSITORY

sys.path.insert(0, str(REPOSITORY / "benchmarks"))

import random_model
from random_model import FOLDERS, FORMATS_OF_FILES, GGUF_FORMATS, QUANTIZATIONS, write_model
from random_numbers import GAIN, HEAD_GAIN, blocks_of, plane_of
from random_shapes import SHAPES

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.core import Engine
from edge_transformer.engine.quantize import quantize_model
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.weight import FORMATS, Weight, WeightFormat, packed_layout
from edge_transformer.models.config import ATTENTION
from edge_transformer.models.names import tensor_specs
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType

TINY = ("tiny", "tiny-qwen35")
IDS = [1, 2, 3, 999]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as large as tiny models, which are made sooner."""
    monkeypatch.setattr(random_model, "_blocks", lambda *arguments: blocks_of(*arguments, nbytes=1 << 18))
    monkeypatch.setattr(random_model, "_plane", lambda *arguments: plane_of(*arguments, nbytes=1 << 18))


def written(folder: Path, shape: str, file_format: str) -> Path:
    return write_model(folder / ("model" if file_format in FOLDERS else "model.gguf"), shape, file_format, 2)


def logits_of(path: Path) -> npt.NDArray[np.float32]:
    checkpoint = open_checkpoint(path)
    spec = read_model(checkpoint)
    engine = Engine(checkpoint, spec, CpuBackend(1), HostWeights(checkpoint, spec), DType.F32)
    logits = engine.prefill(engine.new_sequence(), IDS)
    engine.close()
    checkpoint.close()
    assert logits is not None
    return logits


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("file_format", FORMATS_OF_FILES)
def test_the_engine_opens_it_and_its_logits_are_of_a_sane_size(file_format: str, shape: str, tmp_path: Path) -> None:
    logits = logits_of(written(tmp_path, shape, file_format))
    assert logits.shape == (SHAPES[shape].config.vocab_size,)
    assert np.isfinite(logits).all()
    assert 0.8 * HEAD_GAIN < logits.std() < 1.2 * HEAD_GAIN  # a normed state times rows of HEAD_GAIN / sqrt(hidden)


@pytest.mark.golden
@pytest.mark.parametrize("shape", TINY)
def test_transformers_opens_the_folder_and_agrees(shape: str, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    path = written(tmp_path, shape, "hf")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = model(torch.tensor([IDS]), use_cache=False).logits[0, -1].numpy()
    logits = logits_of(path)
    assert np.abs(logits - expected).max() < 1e-5 * max(1, np.abs(expected).max())


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("file_format", GGUF_FORMATS)
def test_the_gguf_package_reads_formats_shapes_and_numbers(file_format: str, shape: str, tmp_path: Path) -> None:
    from gguf import GGUFReader, dequantize

    reader = GGUFReader(written(tmp_path, shape, file_format))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    specs = {spec.name: spec for spec in tensor_specs(SHAPES[shape].gguf_spec())}
    assert tensors.keys() == specs.keys()
    expected_head = "Q6_K" if file_format == "Q4_0" else file_format
    for name, tensor in tensors.items():
        values = dequantize(tensor.data, tensor.tensor_type)
        role = specs[name].role
        if len(tensor.shape) == 1 or role == "conv":
            assert tensor.tensor_type.name == "F32", name
            assert (values == 1).all() or role in ("conv", "decay", "dt_bias"), name
            continue
        assert tensor.tensor_type.name == (expected_head if role == "head" else file_format), name
        columns = int(tensor.shape[0])
        expected = {"embedding": 1.0, "head": HEAD_GAIN / columns**0.5}.get(role, GAIN / columns**0.5)
        assert abs(values.std() / expected - 1) < 0.1, name
        assert abs(values.mean()) < 0.1 * values.std(), name
    assert reader.fields["tokenizer.ggml.model"].contents() == "no_vocab"
    architecture = SHAPES[shape].gguf.architecture
    assert reader.fields[f"{architecture}.vocab_size"].contents() == SHAPES[shape].config.vocab_size


@pytest.mark.parametrize("shape", TINY)
def test_the_safetensors_package_reads_it(shape: str, tmp_path: Path) -> None:
    from safetensors import safe_open

    specs = {spec.name: list(spec.shape) for spec in tensor_specs(SHAPES[shape].hf_spec())}
    with safe_open(written(tmp_path, shape, "hf") / "model.safetensors", "numpy") as file:
        assert {name: file.get_slice(name).get_shape() for name in file.keys()} == specs  # noqa: SIM118


@pytest.mark.parametrize("shape", TINY)
@pytest.mark.parametrize("choice", QUANTIZATIONS)
def test_a_quantized_folder_is_laid_out_as_ete_quantize_does_it(choice: str, shape: str, tmp_path: Path) -> None:
    source = written(tmp_path, shape, "hf")
    quantize_model(source, tmp_path / "quantized", QUANTIZATIONS[choice], 1)
    ours = write_model(tmp_path / "ours", shape, choice, 2)
    files = [path / "model.safetensors" for path in (ours, tmp_path / "quantized")]
    lengths = [int.from_bytes(file.read_bytes()[:8], "little") for file in files]
    headers = [json.loads(file.read_bytes()[8 : 8 + length]) for file, length in zip(files, lengths, strict=True)]
    assert headers[0] == headers[1]
    assert files[0].stat().st_size == files[1].stat().st_size
    configs = [json.loads((path / "config.json").read_text()) for path in (ours, tmp_path / "quantized")]
    assert configs[0] == configs[1]


def test_the_9b_shape_is_that_of_the_model() -> None:
    config = SHAPES["qwen35-9b"].config
    assert [layer for layer, kind in enumerate(config.layer_kinds) if kind == ATTENTION] == list(range(3, 32, 4))
    assert config.ropes[0].rotary_dim == 64
    matrices = [spec for spec in tensor_specs(SHAPES["qwen35-9b"].hf_spec()) if len(spec.shape) == 2]
    parameters = sum(int(np.prod(spec.shape)) for spec in matrices)
    assert parameters == 8_952_741_888  # 2 * 248320 * 4096 of the vocabulary, 24 * 218.4 M, 8 * 209.7 M


def test_no_two_rows_of_a_matrix_are_the_same(tmp_path: Path) -> None:
    from gguf import GGUFReader

    # Rows of 8 blocks, 1000 of them, from 1001 blocks: the block is repeated 8 times.
    data = blocks_of(WeightFormat.Q8_0, 1.0, 1000 * 34)
    assert len(data) == 1001 * 34
    rows = np.resize(data, (1000, 8 * 34))
    assert len(np.unique(rows, axis=0)) == 1000
    reader = GGUFReader(written(tmp_path, "tiny", "Q8_0"))
    gate, up = (next(t.data for t in reader.tensors if t.name == f"blk.0.ffn_{part}.weight") for part in ("gate", "up"))
    assert not np.array_equal(gate, up)


@pytest.mark.parametrize("weight_format", ["BF16", "F16", "Q8_0", "Q4_0", "Q6_K"])
@pytest.mark.parametrize("deviation", [0.7 / 14336**0.5, 0.05])
def test_blocks_have_the_deviation_that_was_asked(weight_format: str, deviation: float) -> None:
    from gguf import GGMLQuantizationType, dequantize

    data = blocks_of(WeightFormat(weight_format), deviation, 1 << 16)
    assert len(data) % FORMATS[WeightFormat(weight_format)].file_block_bytes == 0
    values = dequantize(data, GGMLQuantizationType[weight_format])
    assert abs(values.std() / deviation - 1) < 0.05


@pytest.mark.parametrize("name", ["Q8_0", "I8_ROW", "Q4_0", "I4_G64", "I4_G128"])
@pytest.mark.parametrize("deviation", [0.7 / 14336**0.5, 0.05])
def test_planes_have_the_deviation_that_was_asked(name: str, deviation: float) -> None:
    from edge_transformer.formats.dequantize import dequantize

    weight_format = WeightFormat(name)
    layout = packed_layout(weight_format, 64, 1024)
    memory = np.zeros(layout.nbytes, np.uint8)
    for spec, plane in zip(FORMATS[weight_format].planes, layout.planes, strict=True):
        count = layout.rows * plane.row_pitch
        memory[plane.offset : plane.offset + count] = np.resize(
            plane_of(weight_format, spec.name, deviation, 1 << 16), count
        )
    values = dequantize(Weight(layout, memory.ctypes.data, memory))
    assert abs(values.std() / deviation - 1) < 0.05
    assert abs(values.mean()) < 0.05 * deviation


def test_a_full_file_system_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import os

    real = os.statvfs(tmp_path)
    fields = list(real)
    fields[4] = 0  # f_bavail
    monkeypatch.setattr(random_model.os, "statvfs", lambda _: os.statvfs_result(fields))
    with pytest.raises(OSError, match=r"0 bytes left; \d+ are needed"):
        write_model(tmp_path / "model.gguf", "tiny", "Q8_0", 1)
    assert not (tmp_path / "model.gguf").exists()
