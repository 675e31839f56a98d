"""Weights in host memory: what does not fit is refused before it is loaded, what is used in the file needs no room."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import edge_transformer.engine.weights as module
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import CapacityError
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from tiny.models import MODELS
from tiny.weights import make_weights
from tiny.write import write_gguf, write_hf


def test_weights_beyond_memory_and_swap_are_refused_before_they_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a GGUF file q and k change the order of their rows: 3 layers of 64 + 32 rows of 64 numbers."""
    model = MODELS["llama"]
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", model, make_weights(model)))
    spec, nbytes = read_model(checkpoint), 3 * 96 * 64 * 4
    monkeypatch.setattr(module, "available_memory", lambda: nbytes - 11)
    monkeypatch.setattr(module, "free_swap", lambda: 10)
    with pytest.raises(CapacityError, match=rf"m\.gguf: weights: {nbytes} bytes .* are available: .*ete quantize"):
        HostWeights(checkpoint, spec)
    monkeypatch.setattr(module, "free_swap", lambda: 11)
    weights = HostWeights(checkpoint, spec)
    assert weights.slab_bytes == nbytes
    weights.close()
    checkpoint.close()


def test_weights_used_in_the_file_need_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = MODELS["llama"]
    checkpoint = open_checkpoint(write_hf(tmp_path / "folder", model.config, make_weights(model)))
    monkeypatch.setattr(module, "available_memory", lambda: 0)
    monkeypatch.setattr(module, "free_swap", lambda: 0)
    weights = HostWeights(checkpoint, read_model(checkpoint))
    assert weights.slab_bytes == 0
    assert weights.mapped_bytes == sum(info.nbytes for info in checkpoint.tensors.values() if len(info.shape) == 2)
    weights.close()
    checkpoint.close()


@pytest.mark.parametrize("container", ["folder", "gguf"])
def test_a_model_that_is_run_leaves_no_second_copy_on_the_disk(tmp_path: Path, container: str) -> None:
    model, home = MODELS["llama"], tmp_path / "home"
    home.mkdir()
    path = tmp_path / container
    if container == "gguf":
        write_gguf(path, model, make_weights(model))
    else:
        write_hf(path, model.config, make_weights(model))
    before = sorted(tmp_path.rglob("*"))
    program = (
        "import sys; from pathlib import Path; from tiny.run import open_engine, run\n"
        "engine = open_engine(Path(sys.argv[1]), 'cpu'); run(engine, [[1, 2, 3]], 'token_by_token'); engine.close()"
    )
    places = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME", "XDG_DATA_HOME"), str(home))
    environment = os.environ | places | {"PYTHONPATH": str(Path(__file__).parents[1]), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run([sys.executable, "-c", program, str(path)], cwd=home, env=environment, check=True)
    assert sorted(tmp_path.rglob("*")) == before
