"""The two real models: every weight equals the gguf package's, and reading the metadata takes no time."""

import time
from pathlib import Path

import gguf
import numpy as np
import pytest

from edge_transformer.formats.dequantize import dequantize
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.repack import read_vector, repack
from edge_transformer.formats.weight import Weight, packed_layout
from edge_transformer.memory import HostMemory
from paths import gemma3_path, shared_folder, smollm2_path

pytestmark = pytest.mark.real_model


@pytest.mark.parametrize("find", [smollm2_path, gemma3_path])
def test_every_tensor_equals_the_gguf_package(find) -> None:
    path: Path = find()
    checkpoint = open_checkpoint(path)
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        info = checkpoint.tensors[name]
        if len(info.shape) == 1:
            np.testing.assert_array_equal(read_vector(info), tensor.data)
            continue
        layout = packed_layout(info.format, *info.shape)
        memory = HostMemory(layout.nbytes)
        repack(info, layout, memory.address)
        # Of the vocabulary every 16th row: all of it takes minutes of numpy and a gigabyte.
        rows = np.arange(0, info.shape[0], 16 if info.shape[0] > 20_000 else 1)
        values = dequantize(Weight(layout, memory.address, memory), rows)
        reference = gguf.dequantize(tensor.data[rows], tensor.tensor_type)
        assert np.array_equal(values.view(np.uint32), reference.view(np.uint32)), name
        memory.close()
    checkpoint.close()


@pytest.mark.parametrize(("find", "tokens"), [(smollm2_path, 49_152), (gemma3_path, 262_144)])
def test_metadata_is_read_in_no_time(find, tokens: int) -> None:
    path = find()
    open_checkpoint(path).close()
    start = time.perf_counter()
    checkpoint = open_checkpoint(path)
    seconds = time.perf_counter() - start
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == tokens
    assert seconds < 0.3  # some milliseconds on an idle machine
    checkpoint.close()


def test_safetensors_equal_the_reference_library() -> None:
    import safetensors

    folder = shared_folder() / "hybrid-24m"
    if not folder.is_dir():
        pytest.skip("no hybrid-24m in the shared folder")
    checkpoint = open_checkpoint(folder)
    with safetensors.safe_open(folder / "model.safetensors", "numpy") as reference:
        assert set(reference.keys()) == checkpoint.tensors.keys()
        for name, info in checkpoint.tensors.items():
            assert list(info.shape) == reference.get_slice(name).get_shape()
            if info.format != "BF16":  # numpy has none
                np.testing.assert_array_equal(read_vector(info), reference.get_tensor(name).astype(np.float32))
    checkpoint.close()
