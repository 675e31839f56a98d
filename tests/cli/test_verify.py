"""`ete verify` on tiny models: every link passes, and each can fail.

A link fails when what it watches is broken and nothing else: the faults here are in the ops as Python calls them.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edge_transformer import LLM
from edge_transformer.cli.main import ete
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.cuda import driver, streamed_head, weights
from edge_transformer.cuda.backend import CudaBackend
from edge_transformer.engine.quantize import quantize_model
from edge_transformer.engine.quantize_plan import Quantization
from edge_transformer.engine.sequence import Sequence
from edge_transformer.errors import GpuError
from edge_transformer.hub.progress import silent
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.tensor import DType
from edge_transformer.verify import conversation, live_transformers, material, oracle_backend, subject
from edge_transformer.verify import gpu as gpu_links
from edge_transformer.verify.chain import find_links, run_link
from edge_transformer.verify.feed import Way
from edge_transformer.verify.link import Outcome, Status
from emulator import EmulatedGpu
from emulator import build as emulator_build
from paths import smollm2_path
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


def outcomes(path: Path, names: Callable[[str], bool], quick: bool = True) -> dict[str, Outcome]:
    """Of the links whose names are wanted."""
    with LLM(path, kv_dtype="f32", threads=2) as llm:
        links = [link for link in find_links(llm, 2, quick) if names(link.name)]
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
ORDER = (
    "CPU against numpy",
    "CPU against numpy, after the long prompt",
    "CPU, chunks of 64",
    "CPU, chunks of 128",
    "CPU, several decode rows in a pass",
    "CPU, sequences together",
    "CPU, one thread",
    "CPU, token by token",
    "CPU, state forked, saved and loaded",
    "CPU, bf16 KV cache",
    "CPU, second call that goes on",
    "CPU, second call that differs",
)


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
        right(self, residual, delta, delta_norm, weight, eps + (3e-4 if broken(self, batch) else 0), out, batch)

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


def damaged(sequence: Sequence) -> None:
    """Keys and values of the first layer with attention are others than were computed."""
    tiles = sequence.layers[0]
    tiles.write(0, np.roll(tiles.read(0), 4096))


def damage_restored_states(monkeypatch: pytest.MonkeyPatch) -> None:
    load = Sequence.load

    def broken(path: Path, shape: Any) -> Sequence:
        sequence = load(path, shape)
        damaged(sequence)
        return sequence

    monkeypatch.setattr(Sequence, "load", broken)


def damage_kept_states(monkeypatch: pytest.MonkeyPatch) -> None:
    reuse = Sequence.reuse

    def broken(self: Sequence, length: int) -> int:
        left = reuse(self, length)
        damaged(self)
        return left

    monkeypatch.setattr(Sequence, "reuse", broken)


def round_bf16_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = CpuBackend.attention

    def broken(self: CpuBackend, q: Any, shape: Any, out: Any, batch: Batch) -> None:
        if shape.kv_dtype is DType.BF16:
            q.numpy()[: batch.rows] *= np.float32(1.1)
        attention(self, q, shape, out, batch)

    monkeypatch.setattr(CpuBackend, "attention", broken)


STATE_FAULTS = {
    "CPU, state forked, saved and loaded": damage_restored_states,
    "CPU, bf16 KV cache": round_bf16_twice,
    "CPU, second call that goes on": damage_kept_states,
    "CPU, second call that differs": damage_kept_states,
}


@pytest.mark.parametrize("link", STATE_FAULTS)
def test_a_fault_of_kept_state_is_found(folder: Path, link: str, monkeypatch: pytest.MonkeyPatch) -> None:
    STATE_FAULTS[link](monkeypatch)
    found = outcomes(model_path(folder, "llama"), lambda name: name == link)
    assert found[link].status is Status.MISSED, found[link].text


def test_every_link_of_the_cpu_can_fail() -> None:
    assert set(FAULTS) | set(STATE_FAULTS) == set(CPU_LINKS)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator as the GPU of this machine."""
    monkeypatch.setattr(material, "QUICK_TOKENS", (40, 70))
    monkeypatch.setattr(conversation, "TEXT", "The lamp turns. " * 5)
    monkeypatch.setattr(
        driver, "CudaGpu", lambda ordinal, forced=None, **_: EmulatedGpu(0, capability=forced or (8, 0))
    )


GPU_BITS = (
    "GPU, all streamed",
    "GPU, one layer resident, three slots",
    "GPU, KV cache on the host",
    "GPU, lm_head streamed",
    "GPU, all on the host",
    "GPU, chunks as large as can be",
    "GPU, chunks of 64",
    "GPU, chunks of 128",
    "GPU, several decode rows in a pass",
    "GPU, sequences together",
    "GPU, state forked, saved and loaded",
)
GPU_ROUNDING = (
    "GPU, all resident",
    "GPU, lm_head split",
    "GPU, lm_head on the CPU",
    "GPU, token by token",
    "GPU, without tensor cores",
    "GPU, bf16 KV cache",
    "GPU, second call that goes on",
    "GPU, second call that differs",
)


def test_every_link_of_a_gpu_passes(folder: Path, gpu: None) -> None:
    """On a model that has both attention and recurrent state."""
    found = outcomes(model_path(folder, "qwen3_5_equal_heads"), lambda link: link.startswith("GPU"))
    assert set(found) == {*GPU_BITS, *GPU_ROUNDING}
    for link, outcome in found.items():
        assert outcome.status is Status.PASSED, f"{link}: {outcome.text}"
    assert {found[link].figure for link in GPU_BITS} == {0.0}


def shift_weights(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    """What a slot is filled with begins a few bytes too early."""
    right = module.HostRange
    monkeypatch.setattr(module, "HostRange", lambda address, *others: right(address - 16, *others))


def scale_head_of_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    lm_head = CpuBackend.lm_head

    def broken(self: CpuBackend, weight: Any, x: Any, rows: int, softcap: Any, out: Any) -> None:
        lm_head(self, weight, x, rows, softcap, out)
        out.numpy()[:rows] *= np.float32(1.0001)

    monkeypatch.setattr(CpuBackend, "lm_head", broken)


def break_gpu(broken: Fault) -> Callable[[pytest.MonkeyPatch], None]:
    return lambda monkeypatch: break_norms(monkeypatch, CudaBackend, broken)


STREAMED = ("GPU, all streamed", "GPU, one layer resident, three slots", "GPU, all on the host")
CALLS = ("GPU, second call that goes on", "GPU, second call that differs")

GPU_FAULTS: dict[tuple[str, ...], Callable[[pytest.MonkeyPatch], None]] = {
    ("GPU, all resident",): break_gpu(lambda backend, batch: True),
    STREAMED: lambda monkeypatch: shift_weights(monkeypatch, weights),
    ("GPU, KV cache on the host",): break_gpu(lambda backend, batch: backend._offload is not None),
    ("GPU, lm_head streamed",): lambda monkeypatch: shift_weights(monkeypatch, streamed_head),
    ("GPU, lm_head split", "GPU, lm_head on the CPU"): scale_head_of_cpu,
    ("GPU, chunks as large as can be",): break_gpu(lambda backend, batch: batch.prompt_rows == 3),
    ("GPU, several decode rows in a pass",): break_gpu(lambda backend, batch: decode_rows(batch) == 3),
    ("GPU, sequences together",): break_gpu(lambda backend, batch: int(batch.row_sequence.max()) > 0),
    ("GPU, token by token",): break_gpu(lambda backend, batch: decode_rows(batch) == 1),
    ("GPU, without tensor cores",): break_gpu(lambda backend, batch: backend._gpu.properties.capability == (7, 5)),
    ("GPU, state forked, saved and loaded",): damage_restored_states,
    CALLS: damage_kept_states,
}


@pytest.mark.parametrize("links", GPU_FAULTS, ids=lambda links: links[0])
def test_a_fault_of_a_gpu_is_found(
    folder: Path, links: tuple[str, ...], gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(material, "QUICK_TOKENS", (12, 12))
    monkeypatch.setattr(gpu_links, "FIRST_WAY", Way(2))
    GPU_FAULTS[links](monkeypatch)
    found = outcomes(model_path(folder, "llama"), ("GPU, all resident", *links).__contains__)
    for link in links:
        assert found[link].status is Status.MISSED, f"{link}: {found[link].text}"


def test_a_placement_that_does_not_fit_is_not_run(folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first that fits is compared with the CPU instead."""
    monkeypatch.setattr(material, "QUICK_TOKENS", (12, 12))
    within = gpu_links._within

    def little(gpu: Any, wishes: Any, layers: int) -> Any:
        budget = 1 if wishes.resident_layers == -1 else 1 << 29
        return replace(within(gpu, wishes, layers), budget_bytes=budget)

    monkeypatch.setattr(gpu_links, "_within", little)
    wanted = ("GPU, all resident", "GPU, all streamed", "GPU, all on the host", "GPU, sequences together")
    resident, streamed, on_host, together = outcomes(model_path(folder, "llama"), wanted.__contains__).values()
    assert (resident.status, streamed.status) == (Status.NOT_RUN, Status.PASSED)
    assert "this needs at least" in resident.text
    assert streamed.text.endswith("against the CPU")
    assert on_host.text.endswith("bit for bit, against all streamed")
    assert together.status is Status.PASSED


MUTATIONS = {
    "rope turns the wrong way": ("rope_append.cu", "d < half ? -turned : turned", "d < half ? turned : -turned"),
    "a barrier is missing": ("norm.cu", "  __syncthreads();\n", ""),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_broken_kernel_is_found_on_the_emulator(
    folder: Path, tmp_path: Path, mutation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is compiled from a changed source; all others are the product's."""
    name, right, wrong = MUTATIONS[mutation]
    kernels = Path(shutil.copytree(emulator_build.KERNELS, tmp_path / "kernels"))
    source = (kernels / name).read_text()
    assert source.count(right) == 1
    monkeypatch.setattr(emulator_build, "KERNELS", kernels)
    link = "emulated GPU, all resident"
    path = model_path(folder, "llama")
    assert outcomes(path, lambda name: name == link, quick=False)[link].status is Status.PASSED
    (kernels / name).write_text(source.replace(right, wrong))
    assert outcomes(path, lambda name: name == link, quick=False)[link].status is Status.MISSED


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise GpuError("no NVIDIA driver was found (libcuda)")

    monkeypatch.setattr(driver, "load_driver", none)


def verify(*arguments: Any) -> Result:
    return CliRunner().invoke(ete, ["verify", *(str(argument) for argument in arguments)])


@pytest.fixture
def no_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_transformers, "PACKAGES", ("torch", "no_such_package"))


@pytest.mark.usefixtures("no_gpu", "no_transformers")
def test_a_line_for_each_link_and_a_summary(folder: Path) -> None:
    result = verify(model_path(folder, "llama"), "--quick", "--threads", 2)
    assert result.exit_code == 0, result.output
    width = max(map(len, ORDER))
    lines = [(line[:8].strip(), line[9 : 9 + width].strip(), line[9 + width :]) for line in result.stdout.splitlines()]
    assert [name for _, name, _ in lines] == [
        "CPU against transformers",
        *ORDER,
        "emulated GPU",
        "GPU",
    ]
    assert {status for status, name, _ in lines if name in CPU_LINKS} == {"passed"}
    reasons = {name: text for status, name, text in lines if status == "not run"}
    assert "no_such_package" in reasons["CPU against transformers"]
    assert "without --quick" in reasons["emulated GPU"]
    assert "no NVIDIA driver" in reasons["GPU"]
    assert f"{len(CPU_LINKS)} links passed, 0 missed, 3 not run" in result.stderr


@pytest.mark.usefixtures("no_gpu", "no_transformers")
def test_a_missed_link_is_named_and_ends_with_status_1(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_norms(monkeypatch, CpuBackend, FAULTS["CPU, sequences together"])
    result = verify(model_path(folder, "llama"), "--quick")
    assert result.exit_code == 1
    missed = [line for line in result.stdout.splitlines() if line.startswith("missed")]
    assert len(missed) == 1
    assert "CPU, sequences together" in missed[0]
    assert "positions differ" in missed[0]


@pytest.mark.usefixtures("no_gpu", "no_transformers")
def test_json_has_every_link_with_figure_and_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_path(folder, "llama")
    found = json.loads(verify(path, "--quick", "--json").stdout)
    assert found["passed"] is True
    links = {link["name"]: link for link in found["links"]}
    assert links["CPU, chunks of 64"]["figure"] == links["CPU, chunks of 64"]["bound"] == 0
    assert 0 < links["CPU against numpy"]["figure"] <= links["CPU against numpy"]["bound"] == 1e-5
    assert links["GPU"]["figure"] is None
    assert all(link["status"] in ("passed", "not run") and link["seconds"] >= 0 for link in links.values())
    break_norms(monkeypatch, CpuBackend, FAULTS["CPU, one thread"])
    broken = verify(path, "--quick", "--json", "--threads", 2)
    assert broken.exit_code == 1
    missed = [link["name"] for link in json.loads(broken.stdout)["links"] if link["status"] == "missed"]
    assert missed == ["CPU, one thread"]


@pytest.mark.usefixtures("no_gpu", "no_transformers")
def test_an_error_of_the_engine_is_a_miss_and_the_next_links_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = CpuBackend.add_norm

    def add_norm(self: CpuBackend, residual: Any, *others: Any) -> None:
        right(self, residual, *others)
        if others[-1].prompt_rows == 64:
            others[-2].numpy()[:] = np.nan

    monkeypatch.setattr(CpuBackend, "add_norm", add_norm)
    found = outcomes(model_path(folder, "llama"), lambda name: name in CPU_BITS)
    assert found["CPU, chunks of 64"].status is Status.MISSED
    assert "NaN or infinity" in found["CPU, chunks of 64"].text
    assert found["CPU, chunks of 128"].status is Status.PASSED


@pytest.mark.parametrize(
    ("config", "vocabulary", "code", "message"),
    [
        ({"max_position_embeddings": 1}, None, 2, "context holds 1 token"),
        ({}, 0, 6, "none"),
        ({}, 700, 6, "another model"),
    ],
)
def test_a_model_that_no_text_can_be_given_to(
    tmp_path: Path, no_gpu: None, config: dict[str, int], vocabulary: int | None, code: int, message: str
) -> None:
    """It is named before any link runs, which would be missed for it."""
    path = write_model(tmp_path, "llama")
    stored = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(stored | config))
    if vocabulary is not None:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet()) if vocabulary else []
        ids = {f"<{index}>": index for index in range(3)}  # those that config.json names
        ids |= {token: index + vocabulary - 256 for index, token in enumerate(alphabet)}
        tokenizer = Tokenizer(models.BPE(ids, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.save(str(path / "tokenizer.json"))
    result = verify(str(path), "--quick")
    assert result.exit_code == code, result.output
    assert message in result.output
    assert "missed" not in result.output


def test_interrupted_it_ends_at_once_and_says_nothing_more(folder: Path) -> None:
    program = (
        "from edge_transformer.verify import live_transformers\n"
        "live_transformers.PACKAGES = ('no_such_package',)  # its import takes seconds\n"
        "from edge_transformer.cli.main import main\nmain()"
    )
    command = [sys.executable, "-c", program, "verify", str(model_path(folder, "llama"))]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_a_quantized_file_is_what_was_written(folder: Path, tmp_path: Path) -> None:
    name = "checksums of the quantized file"
    out = tmp_path / "out"
    quantize_model(model_path(folder, "llama"), out, Quantization("int8"), threads=1)

    def outcome() -> Outcome:
        return outcomes(out, lambda link: link == name)[name]

    assert outcome().status is Status.PASSED, outcome().text
    with LLM(out, threads=1) as llm:
        victim = next(tensor for tensor in llm.parts.checkpoint.tensors.values() if tensor.layout is not None)
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(victim.offset + victim.nbytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    missed = outcome()
    assert missed.status is Status.MISSED
    assert missed.figure == 1
    assert repr(victim.name) in missed.text
    report = json.loads((out / "quantization.json").read_text())
    for tensor in report["tensors"]:
        del tensor["sha256"]
    (out / "quantization.json").write_text(json.dumps(report))
    assert outcome().status is Status.NOT_RUN
    (out / "quantization.json").unlink()
    missing = outcome()
    assert (missing.status, "quantization.json" in missing.text) == (Status.MISSED, True)
    assert not outcomes(model_path(folder, "llama"), lambda link: link == name)


@pytest.mark.golden
@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_live(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    link = "CPU against transformers"
    path = model_path(folder, name)
    assert outcomes(path, lambda name: name == link)[link].status is Status.PASSED
    break_norms(monkeypatch, CpuBackend, lambda backend, batch: True)
    assert outcomes(path, lambda name: name == link)[link].status is Status.MISSED


@pytest.mark.golden
def test_a_model_that_transformers_does_not_load_is_said(tmp_path: Path) -> None:
    path = write_model(tmp_path, "llama")
    with LLM(path, threads=1) as llm:
        (path / "config.json").write_text("{}")
        link = find_links(llm, 1, quick=True)[0]
        outcome = run_link(link, silent).outcome
    assert outcome.status is Status.NOT_RUN
    assert "transformers does not load it" in outcome.text


@pytest.mark.golden
@pytest.mark.real_model
def test_transformers_live_on_a_gguf_file() -> None:
    link = "CPU against transformers"
    found = outcomes(smollm2_path(), lambda name: name == link)[link]
    assert found.status is Status.PASSED, found.text


@pytest.mark.real_model
def test_the_demo_model_passes_quickly() -> None:
    """Nothing is shortened here but what --quick shortens; a minute is the promise for two idle cores."""
    program = "from edge_transformer.cli.main import main; main()"
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", program, "verify", smollm2_path(), "--quick", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    statuses = {link["name"]: link["status"] for link in json.loads(done.stdout)["links"]}
    assert {statuses[link] for link in CPU_LINKS if link != "CPU, one thread"} == {"passed"}
    assert time.perf_counter() - started < 180


@pytest.mark.parametrize("name", FAMILIES)
def test_the_oracle_in_little_memory_computes_the_same(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subject, "available_memory", lambda: subject.SPARE_BYTES + (1 << 18))
    monkeypatch.setattr(oracle_backend, "HEAD_ROWS", 77)
    held: list[int] = []
    forget = oracle_backend.FrugalReference.forget

    def counted(self: oracle_backend.FrugalReference) -> None:
        held.append(len(self._values))
        forget(self)

    monkeypatch.setattr(oracle_backend.FrugalReference, "forget", counted)
    found = outcomes(model_path(folder, name), lambda name: name == "CPU against numpy")["CPU against numpy"]
    assert found.status is Status.PASSED, found.text
    assert 0 < max(held) <= 5  # matrices of a segment


def test_too_little_memory_for_the_oracle_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subject, "available_memory", lambda: subject.SPARE_BYTES)
    found = outcomes(model_path(folder, "llama"), lambda name: name.startswith("CPU against numpy"))
    assert {outcome.status for outcome in found.values()} == {Status.NOT_RUN}
    assert all("GiB" in outcome.text for outcome in found.values())


def test_a_few_layers_say_that_they_are_not_all(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(material, "QUICK_ORACLE_PARAMETERS", 1)
    for name, layers in (("llama", "1 of 3"), ("gemma2", "2 of 3"), ("qwen3_5_equal_heads", "2 of 3")):
        found = outcomes(model_path(folder, name), lambda link: link.startswith("CPU against numpy"))
        assert all(outcome.status is Status.PASSED for outcome in found.values())
        assert all(outcome.text.endswith(f"; first {layers} layers") for outcome in found.values())
