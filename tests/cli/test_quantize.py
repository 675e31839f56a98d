"""`ete quantize`: what it says and leaves, and that the other commands take what it made."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from edge_transformer import hub
from edge_transformer.cli.main import ete
from engine.test_llm import write_chat_model
from paths import smollm2_path
from tiny.models import MODELS
from tiny.weights import make_weights
from tiny.write import write_gguf, write_hf


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


def invoke(*arguments: Any) -> Result:
    return CliRunner().invoke(ete, [str(argument) for argument in arguments])


def test_a_quantized_model_is_a_model(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "small"
    result = invoke("quantize", model, out, "--format", "int4", "--group", 32, "--threads", 1)
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0].startswith("tensors      format   number       size  relative RMS error")
    assert any(line.startswith("q            Q4_0") for line in lines)
    assert any(line.startswith("embedding    Q8_0          1") for line in lines)
    assert any(line.startswith("vectors      F32") and line.endswith("as they were") for line in lines)
    assert lines[-1].startswith(f"{out}: int4, groups of 32; weights of ")
    assert "no smaller" not in result.stderr

    options = ("--raw", "--max-tokens", 3, "--ignore-eos", "--threads", 1, "--seed", 1)
    answer = invoke("run", out, "hello", *options, "--json")
    assert answer.exit_code == 0, answer.stderr
    assert len(json.loads(answer.stdout)["ids"]) == 3
    facts = json.loads(invoke("info", out, "--json").stdout)
    assert facts["runs"]
    assert "Q4_0" in str(facts["parts"])


@pytest.mark.parametrize("container", ["hf", "gguf"])
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--format", "int8"), "int8, groups of 32"),
        (("--format", "int8-row"), "int8, a scale per row"),
        (("--format", "int4", "--group", 32, "--minimums"), "int4, groups of 32, with minimums"),
        (("--format", "int4"), "int4, groups of 64"),
    ],
)
def test_info_says_how_a_model_was_quantized(tmp_path: Path, container: str, options: Any, words: str) -> None:
    """Also where its names, and the metadata beside it, are those of the GGUF file that it was made from."""
    model = MODELS["llama"]
    weights = make_weights(model)
    hf = write_hf(tmp_path / "hf", model.config, weights)
    source = hf if container == "hf" else write_gguf(tmp_path / "m.gguf", model, weights)
    assert invoke("quantize", source, tmp_path / "out", *options).exit_code == 0
    facts = json.loads(invoke("info", tmp_path / "out", "--json").stdout)
    assert (facts["container"], facts["quantization"]) == ("safetensors", words)
    lines = invoke("info", tmp_path / "out").stdout.splitlines()
    assert lines[1].startswith("files          safetensors, 1 with ")
    assert lines[2] == f"quantized      {words}, by ete quantize"
    facts = json.loads(invoke("info", source, "--json").stdout)
    assert (facts["container"], facts["quantization"]) == ("gguf" if container == "gguf" else "safetensors", None)
    assert "quantized" not in invoke("info", source).stdout


def test_the_report_as_json(model: Path, tmp_path: Path) -> None:
    result = invoke("quantize", model, tmp_path / "out", "--format", "int8-row", "--json")
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report.pop("path") == str(tmp_path / "out")
    assert report == json.loads((tmp_path / "out" / "quantization.json").read_text())
    assert (report["quantization"], report["format"]) == ("int8, a scale per row", "int8-row")
    assert {tensor["format"] for tensor in report["tensors"]} <= {"I8_ROW", "Q8_0", "F32"}


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ((), 2, "Missing option '--format'"),
        (("--format", "int5"), 2, "int5"),
        (("--format", "int8", "--group", "32"), 2, "--group and --minimums are settings of int4; int8 has none"),
        (("--format", "int4", "--group", "16"), 2, "16"),
        (("--format", "int4", "--minimums"), 2, "--minimums need groups of 32 (--group 32)"),
        (("--format", "int4", "--threads", "0"), 2, "0"),
    ],
)
def test_wrong_options(model: Path, tmp_path: Path, options: tuple[str, ...], code: int, message: str) -> None:
    result = invoke("quantize", model, tmp_path / "out", *options)
    assert result.exit_code == code
    assert message in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("out", ["new/..", "taken"])
def test_names_that_no_folder_can_be_made_under(model: Path, tmp_path: Path, out: str) -> None:
    """Said before hours of work, and nothing is left behind."""
    (tmp_path / "taken.partial").touch()
    result = invoke("quantize", model, f"{tmp_path}/{out}", "--format", "int8")
    assert result.exit_code == 2
    assert ("is no name for a new folder" if out == "new/.." else "taken.partial is in the way") in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["taken.partial"]


def test_a_folder_that_is_there_is_left_alone(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    result = invoke("quantize", model, tmp_path / "out", "--format", "int8")
    assert result.exit_code == 2
    assert "nothing is overwritten" in result.stderr
    assert not list((tmp_path / "out").iterdir())


def test_a_folder_that_cannot_be_made_is_named(model: Path) -> None:
    result = invoke("quantize", model, "/proc/out", "--format", "int8")
    assert result.exit_code == 1
    assert result.stderr == (
        "Error: the folder /proc/out cannot be made in /proc: /proc/out.partial: No such file or directory; "
        "give OUT as a name in a folder that can be written\n"
    )


@pytest.mark.parametrize("kind", ["a file", "read only", "there"])
def test_a_name_that_cannot_be_made_is_told_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def resolve(*_: object, **__: object) -> Path:
        raise AssertionError("a model was looked for")

    monkeypatch.setattr(hub, "resolve", resolve)
    folder = tmp_path / "folder"
    if kind == "a file":
        folder.touch()
        expected = f"{folder}/new/out cannot be made: {folder} is no folder; give OUT as a name in one"
    elif kind == "read only":
        monkeypatch.setattr(os, "access", lambda path, mode: path != folder)
        folder.mkdir()
        expected = f"{folder}/new/out cannot be made: {folder} cannot be written; give OUT as a name in a folder that"
    else:
        (folder / "new" / "out").mkdir(parents=True)
        expected = f"{folder}/new/out exists; nothing is overwritten"
    result = invoke("quantize", "some/model", f"{folder}/new/out", "--format", "int8")
    assert result.exit_code == 2
    assert expected in result.stderr


@pytest.mark.parametrize("call", ["fdatasync", "rename"])
def test_a_folder_that_can_no_longer_be_written_is_named(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """And what is said of the way out is true."""
    out = tmp_path / "out"

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(arguments[0]) if call == "rename" else None)

    monkeypatch.setattr(os, call, refuse)
    result = invoke("quantize", model, out, "--format", "int8")
    assert result.exit_code == 1
    monkeypatch.undo()
    if call == "rename":
        assert result.stderr == (
            f"Error: the model is complete in {out}.partial, which cannot be renamed: {out}.partial: "
            "Read-only file system; with that mended, rename it out\n"
        )
        (tmp_path / "out.partial").rename(out)
    else:
        expected = f"{out} cannot be made of {model}: Read-only file system; with that mended, the same command goes on"
        assert result.stderr == f"Error: {expected}\n"
        assert invoke("quantize", model, out, "--format", "int8").exit_code == 0
    assert json.loads(invoke("info", out, "--json").stdout)["runs"]


@pytest.mark.real_model
@pytest.mark.parametrize("as_json", [False, True])
def test_a_source_of_few_bits_that_grows_is_told(tmp_path: Path, as_json: bool) -> None:
    source, out = smollm2_path(), tmp_path / "out"
    result = invoke("quantize", source, out, "--format", "int8", *(["--json"] if as_json else []))
    assert result.exit_code == 0, result.stderr
    assert (out / "model.safetensors").stat().st_size > source.stat().st_size
    told = f"{out} will be no smaller than {source}, whose weights have few bits already: int8 takes more room"
    assert [line for line in result.stderr.splitlines() if line.startswith(told)] == [
        f"{told} and makes nothing more exact"
    ]


@pytest.mark.real_model
def test_a_source_of_few_bits_that_grows_is_told_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edge_transformer.engine.quantize._write_weights", write)
    result = invoke("quantize", smollm2_path(), tmp_path / "out", "--format", "int8")
    assert result.exit_code == 130
    assert "will be no smaller" in result.stderr
