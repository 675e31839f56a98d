"""`ete info`, `list`, `rm`, `pull`: on tiny files written here and a cache that is a folder."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
from click.testing import CliRunner, Result
from tokenizers import pre_tokenizers

from cpu.attention_cases import make_shape
from edge_transformer.cli.description import describe
from edge_transformer.cli.main import ete
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.errors import UnsupportedModelError
from paths import gemma3_path, smollm2_path
from text.tokenizer_files import byte_level_tokenizer
from tiny.models import MODELS, TinyModel
from tiny.weights import make_weights
from tiny.write import write_hf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(ete, arguments)


def write_gguf(path: Path, architecture: str) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_tensor("token_embd.weight", np.zeros((8, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_refused_model_is_described_and_the_reason_given(tmp_path: Path) -> None:
    write_gguf(tmp_path / "mamba.gguf", "mamba")
    result = invoke("info", "mamba.gguf")
    assert result.exit_code == 4
    assert "verdict        refused: mamba.gguf: field 'general.architecture' = 'mamba'" in result.stdout
    assert "weights        F32 1.0 KiB" in result.stdout
    facts = json.loads(invoke("info", "mamba.gguf", "--json").stdout)
    assert facts["runs"] is False
    assert "mamba" in facts["reason"]
    assert facts["parts"] == {"weights": {"F32": 8 * 32 * 4}}


def test_files_that_are_no_model(tmp_path: Path) -> None:
    write_gguf(tmp_path / "whole.gguf", "llama")
    data = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[:100])
    (tmp_path / "text.gguf").write_text("hello")
    (tmp_path / "folder").mkdir()
    for command in (["info"], ["run", "--raw"]):
        for name in ("cut.gguf", "text.gguf", "folder"):
            result = invoke(*command, name, *(["hello"] if "run" in command else []))
            assert result.exit_code == 3, result.output
            assert name in result.stderr
            assert result.stdout == ""
        assert invoke(*command, "missing.gguf", *(["hello"] if "run" in command else [])).exit_code == 5


def test_info_downloads_nothing() -> None:
    for name in ("demo", "org/name"):
        result = invoke("info", name)
        assert result.exit_code == 5
        assert f"ete pull {name}" in result.stderr


def test_nothing_pulled() -> None:
    result = invoke("list")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "ete pull demo" in result.stderr
    assert json.loads(invoke("list", "--json").stdout) == []
    assert invoke("rm", "demo").exit_code == 5
    assert invoke("rm", "org/name", "--yes").exit_code == 5
    assert invoke("rm", "org/name").exit_code == 5
    assert invoke("pull", "no-such-model").exit_code == 5


def test_deleting_from_the_shared_cache_needs_a_yes(tmp_path: Path) -> None:
    snapshot = tmp_path / "hf" / "models--org--name" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    references = tmp_path / "hf" / "models--org--name" / "refs"
    references.mkdir()
    (references / "main").write_text("abc")
    (snapshot / "m-Q8_0.gguf").write_bytes(b"x" * 2048)
    listed = invoke("list").stdout
    assert listed == f"org/name:m-Q8_0.gguf     2.0 KiB  {snapshot / 'm-Q8_0.gguf'}\n"
    unasked = invoke("rm", "org/name")
    assert (unasked.exit_code, "--yes" in unasked.stderr) == (2, True)
    assert invoke("rm", "org/name:other.gguf").exit_code == 5
    assert snapshot.exists()
    assert "2.0 KiB freed" in invoke("rm", "org/name", "--yes").stderr
    assert not snapshot.exists()


def test_a_hybrid_is_described(tmp_path: Path) -> None:
    """Six numbers of the state of a value head by hand; what is not part of the text is named."""
    model = MODELS["qwen3_5"]
    weights = make_weights(model) | dict.fromkeys(("mtp.fc.weight", "mtp.norm.weight"), np.ones((2, 64), np.float32))
    path = write_hf(tmp_path / "hybrid", model.config, weights)
    byte_level_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), 300).save(str(path / "tokenizer.json"))
    facts = json.loads(invoke("info", str(path), "--json").stdout)
    assert facts["runs"] is True
    assert facts["gated_delta_layers"] == 3
    assert facts["recurrent_bytes"] == 3 * (4 * 16 * 16 + (2 * 2 * 16 + 4 * 16) * 3) * 4
    assert facts["kv_bytes_per_token"] == {"bf16": 2 * 2 * 32 * 2, "f32": 2 * 2 * 32 * 4}
    assert facts["left_out"] == ["mtp.fc.weight", "mtp.norm.weight"]
    assert facts["parts"]["gated delta"] == {"F32": 3 * (128 + 64 + 4 + 4 + 64) * 64 * 4}
    text = invoke("info", str(path)).stdout
    assert "3 of 4 layers, gated delta rule" in text
    assert "(not loaded: mtp.fc.weight and 1 more)" in text


@pytest.mark.parametrize(("head_dim", "runs"), [(16, True), (20, False), (264, False)])
def test_the_verdict_knows_the_limits_of_the_cpu(tmp_path: Path, head_dim: int, runs: bool) -> None:
    """The same answer as loading gives."""
    model = TinyModel("tiny", MODELS["llama"].config | {"head_dim": head_dim}, {})
    path = write_hf(tmp_path / "tiny", model.config, make_weights(model))
    byte_level_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False)).save(str(path / "tokenizer.json"))
    facts, refusal = describe(path)
    assert facts["head_dim"] == head_dim
    assert facts["runs"] is runs
    assert (refusal is None) is runs
    shape = make_shape(4, 2, head_dim)
    if runs:
        CpuBackend(1).reserve(8, 32, [shape])
    else:
        with pytest.raises(UnsupportedModelError) as caught:
            CpuBackend(1).reserve(8, 32, [shape])
        assert facts["reason"] == str(caught.value)
        assert f"head_dim is {head_dim}; supported" in facts["reason"]
        assert invoke("info", str(path)).exit_code == 4


@pytest.mark.real_model
def test_real_models_are_described_from_their_headers() -> None:
    facts = json.loads(invoke("info", str(smollm2_path()), "--json").stdout)
    assert facts["runs"] is True
    assert (facts["architecture"], facts["layers"], facts["parameters"]) == ("llama", 30, 134_515_008)
    assert facts["kv_bytes_per_token"] == {"bf16": 2 * 30 * 3 * 64 * 2, "f32": 2 * 30 * 3 * 64 * 4}
    assert facts["chat_template"] is True
    assert facts["parts"]["embedding"] == {"Q8_0": 49152 * 576 // 32 * 34}
    facts = json.loads(invoke("info", str(gemma3_path()), "--json").stdout)
    assert (facts["architecture"], facts["layers"], facts["parameters"]) == ("gemma3", 18, 268_098_176)
    assert facts["chat_template"] is False
    assert facts["layer_windows"].count(512) == 15


def test_deleting_the_demo_needs_a_yes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_transformer.hub.require_pulled", lambda name: None, raising=False)
    removed: list[str] = []
    monkeypatch.setattr("edge_transformer.hub.remove", lambda name: (removed.append(name), 2048)[1], raising=False)
    assert invoke("rm", "demo").exit_code == 2
    assert removed == []
    assert "2.0 KiB freed" in invoke("rm", "demo", "-y").stderr
    assert removed == ["demo"]
