"""`ete trace` on the emulated GPU, and where there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from edge_transformer.cli.main import ete
from edge_transformer.cuda import driver, driver_library
from edge_transformer.errors import GpuError
from emulator import EmulatedGpu
from engine.test_llm import write_chat_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "CudaGpu", lambda *_, **__: EmulatedGpu(0))


def trace(*arguments: Any) -> Result:
    return CliRunner().invoke(ete, ["trace", *(str(argument) for argument in arguments)])


def test_a_trace_and_three_shares(model: Path, tmp_path: Path, gpu: None) -> None:
    output = tmp_path / "out.json"
    options = ("--resident-layers", 0, "--max-tokens", 4, "--ignore-eos", "--raw", "--ctx", 64, "--threads", 1)
    result = trace(model, "hello", "-o", output, *options)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("decode: 3 passes in ")
    assert [line.split("%")[0].rsplit(maxsplit=1)[0].strip() for line in lines[1:]] == [
        "bus busy",
        "compute not under a copy",
        "compute waited for copies",
    ]
    assert "layers: " in result.stderr
    assert f"{output}: " in result.stderr
    events = json.loads(output.read_text())["traceEvents"]
    assert events[0]["args"] == {"name": "edge_transformer on emulated GPU"}
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"CPU", "compute", "weight copies"}


def test_an_answer_of_one_token_has_no_shares(model: Path, tmp_path: Path, gpu: None) -> None:
    result = trace(model, "hello", "-o", tmp_path / "t.json", "--max-tokens", 1, "--ctx", 64)
    assert result.exit_code == 0
    assert result.stdout.startswith("no decode pass was traced")
    assert (tmp_path / "t.json").exists()


def test_a_folder_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    result = trace("no model", "hello", "-o", tmp_path / "missing" / "t.json")
    assert result.exit_code == 2
    assert "does not exist" in result.stderr


def test_a_full_disk_under_the_trace_is_told_with_its_name(model: Path, gpu: None) -> None:
    options = ("--max-tokens", 2, "--ignore-eos", "--raw", "--ctx", 64, "--threads", 1)
    result = trace(model, "hello", "-o", "/dev/full", *options)
    assert result.exit_code == 9
    assert result.stderr.splitlines()[-1] == (
        "Error: the trace cannot be written to /dev/full: No space left on device; make room, or name another --output"
    )


def test_without_a_driver_the_advice_is_one_that_can_be_followed(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ete trace` has no --backend: the commands that have one are named."""

    def absent(*_: object) -> None:
        raise RuntimeError("libcuda.so.1 is not here")

    monkeypatch.setattr(pytest.importorskip("cuda.bindings.driver"), "cuInit", absent)
    monkeypatch.setattr(driver, "load_driver", driver_library.load_driver.__wrapped__)
    result = trace(model, "hello", "-o", tmp_path / "t.json")
    assert result.exit_code == 10
    assert result.stderr.splitlines()[-1].endswith("or let the CPU compute (--backend cpu of ete run, chat and serve)")
    context = click.Context(ete)
    for name in ("run", "chat", "serve", "trace"):
        command = ete.get_command(context, name)
        assert command is not None
        assert any(option.name == "backend" for option in command.params) is (name != "trace")


def test_without_a_gpu_the_error_says_so(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> None:
        raise GpuError("no NVIDIA driver was found (libcuda): install it, or use the CPU")

    monkeypatch.setattr(driver, "load_driver", none)
    result = trace(model, "hello", "-o", tmp_path / "t.json")
    assert result.exit_code == 10
    assert result.stderr.splitlines()[-1] == "Error: no NVIDIA driver was found (libcuda): install it, or use the CPU"
    assert not (tmp_path / "t.json").exists()
