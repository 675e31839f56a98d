"""`ete verify` on tiny models: every link passes, and each can fail.

A link fails when what it watches is broken and nothing else: the faults here are in the ops as Python calls them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edge_transformer import LLM
from edge_transformer.cli.main import ete
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.cuda import driver
from edge_transformer.hub.progress import silent
from edge_transformer.ops.batch import Batch
from edge_transformer.verify import material
from edge_transformer.verify.chain import find_links, run_link
from edge_transformer.verify.link import Outcome, Status
from emulator import EmulatedGpu
from tiny.models import MODELS, TinyModel
from tiny.weights import make_weights
from tiny.write import write_hf

VOCABULARY = 300
FAMILIES = ("llama", "gemma2", "qwen3_5")


def write_model(folder: Path, name: str) -> Path:
    """A tiny model with a tokenizer of single bytes."""
    config = MODELS[name].config | {"vocab_size": VOCABULARY, "max_position_embeddings": 4096}
    path = write_hf(folder / name, config, make_weights(TinyModel(name, config, {})))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "QUICK_TOKENS", (130, 160))


def model_path(folder: Path, name: str) -> Path:
    return folder / name if (folder / name).exists() else write_model(folder, name)


def verify(*arguments: Any) -> Result:
    return CliRunner().invoke(ete, ["verify", *(str(argument) for argument in arguments)])


def outcomes(path: Path, names: Callable[[str], bool]) -> dict[str, Outcome]:
    """Of the links whose names are wanted."""
    with LLM(path, kv_dtype="f32", threads=2) as llm:
        links = [link for link in find_links(llm, 2, quick=True) if names(link.name)]
        return {link.name: run_link(link, silent).outcome for link in links}


CPU_BITS = (
    "CPU, chunks of 64",
    "CPU, chunks of 128",
    "CPU, several decode rows in a pass",
    "CPU, sequences together",
    "CPU, one thread",
    "CPU, state forked, saved and loaded",
)
CPU_ROUNDING = (
    "CPU against numpy",
    "CPU against numpy, after the long prompt",
    "CPU, token by token",
    "CPU, bf16 KV cache",
    "CPU, second call that goes on",
    "CPU, second call that differs",
)
CPU_LINKS = CPU_BITS + CPU_ROUNDING


@pytest.mark.parametrize("name", FAMILIES)
def test_every_link_of_the_cpu_passes(folder: Path, name: str) -> None:
    found = outcomes(model_path(folder, name), lambda link: link in CPU_LINKS)
    assert set(found) == set(CPU_LINKS)
    for link, outcome in found.items():
        assert outcome.status is Status.PASSED, f"{link}: {outcome.text}"
        assert outcome.figure is not None
    assert {found[link].figure for link in CPU_BITS} == {0.0}
    assert all(found[link].figure > 0 for link in ("CPU against numpy", "CPU, token by token", "CPU, bf16 KV cache"))


Fault = Callable[[Any, Batch], bool]


def break_norms(monkeypatch: pytest.MonkeyPatch, backend: type, broken: Fault) -> None:
    """Norms take another eps in the passes for which `broken` says so."""
    right = backend.add_norm  # type: ignore[attr-defined]

    def add_norm(
        self: Any, residual: Any, delta: Any, delta_norm: Any, weight: Any, eps: float, out: Any, batch: Batch
    ) -> None:
        right(self, residual, delta, delta_norm, weight, eps * (1.01 if broken(self, batch) else 1.0), out, batch)

    monkeypatch.setattr(backend, "add_norm", add_norm)


def decode_rows(batch: Batch) -> int:
    return batch.rows - batch.prompt_rows


FAULTS: dict[str, Fault] = {
    "CPU against numpy": lambda backend, batch: True,
    "CPU against numpy, after the long prompt": lambda backend, batch: int(batch.positions.max()) > 120,
    "CPU, chunks of 64": lambda backend, batch: batch.prompt_rows == 64,
    "CPU, chunks of 128": lambda backend, batch: batch.prompt_rows == 128,
    "CPU, several decode rows in a pass": lambda backend, batch: decode_rows(batch) == 3,
    "CPU, sequences together": lambda backend, batch: int(batch.row_sequence.max()) > 0,
    "CPU, one thread": lambda backend, batch: backend.pool.threads == 1,
    "CPU, token by token": lambda backend, batch: decode_rows(batch) == 1,
}


@pytest.mark.parametrize("link", FAULTS)
def test_a_fault_of_the_cpu_is_found_by_its_link(folder: Path, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    break_norms(monkeypatch, CpuBackend, FAULTS[link])
    found = outcomes(model_path(folder, "llama"), lambda name: name == link)
    assert found[link].status is Status.MISSED, found[link].text


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator as the GPU of this machine."""
    monkeypatch.setattr(material, "QUICK_TOKENS", (40, 70))
    monkeypatch.setattr(
        driver, "CudaGpu", lambda ordinal, forced=None, **_: EmulatedGpu(0, capability=forced or (8, 0))
    )


GPU_BITS = (
    "GPU, all streamed",
    "GPU, one layer resident, three slots",
    "GPU, KV cache on the host",
    "GPU, lm_head streamed",
    "GPU, all on the host",
    "GPU, chunks of 64",
    "GPU, chunks of 128",
    "GPU, several decode rows in a pass",
    "GPU, sequences together",
    "GPU, state forked, saved and loaded",
)
GPU_ROUNDING = (
    "GPU, all resident",
    "GPU, lm_head on the CPU",
    "GPU, token by token",
    "GPU, without tensor cores",
    "GPU, bf16 KV cache",
    "GPU, second call that goes on",
    "GPU, second call that differs",
)


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_every_link_of_a_gpu_passes(folder: Path, name: str, gpu: None) -> None:
    found = outcomes(model_path(folder, name), lambda link: link.startswith("GPU"))
    assert set(found) == {*GPU_BITS, *GPU_ROUNDING}
    for link, outcome in found.items():
        assert outcome.status is Status.PASSED, f"{link}: {outcome.text}"
    assert {found[link].figure for link in GPU_BITS} == {0.0}
