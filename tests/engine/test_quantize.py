"""Whole models quantized: what is in the files by the safetensors package, what the engine makes of them, and how work
that was interrupted goes on.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import struct
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import safetensors.numpy

from edge_transformer.engine import quantize as quantize_module
from edge_transformer.engine.quantize import quantize_model
from edge_transformer.engine.quantize_journal import JOURNAL_FILE
from edge_transformer.engine.quantize_plan import Quantization
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import CapacityError, FileChangedError, NumericError, UsageError
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.weight import WeightFormat
from edge_transformer.models.read import read_model
from tiny.models import MODELS, TinyModel
from tiny.run import open_engine, run
from tiny.weights import make_weights, prompts
from tiny.write import write_gguf, write_hf

CHOICES = [
    Quantization("int8"),
    Quantization("int8-row"),
    Quantization("int4", 32),
    Quantization("int4", 32, minimums=True),
    Quantization("int4"),
    Quantization("int4", 128),
]
FUSED = "qwen3_next"  # several matrices in one tensor
SHORT = [name for name in MODELS if not name.endswith("_long") and name != FUSED]
BOUNDS = {"reference": 2e-6, "cpu": 1e-5}


def quantized_arrays(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a quantized folder in fp32, planes decoded here from what the safetensors package reads."""
    path = folder / "model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        metadata = json.loads(file.read(length))["__metadata__"]
    arrays = {}
    for key, entry in metadata.items():
        if not key.startswith("weight:"):
            continue
        name, (known, rows, cols) = key[7:], entry.split()
        rows, cols = int(rows), int(cols)
        planes = {plane: tensors.pop(f"{name}.{plane}", None) for plane in ("codes", "scales", "minimums")}
        arrays[name] = decode(WeightFormat(known), rows, cols, planes)
    for name in list(tensors):
        if name.startswith("padding."):
            assert (tensors.pop(name) == 0).all()
    return arrays | {name: values.astype(np.float32) for name, values in tensors.items()}


def decode(known: WeightFormat, rows: int, cols: int, planes: dict[str, np.ndarray | None]) -> np.ndarray:
    codes, scales = planes["codes"], planes["scales"]
    assert codes is not None
    assert scales is not None
    if known is WeightFormat.I8_ROW:
        return scales[:, :4].copy().view("<f4") * codes[:, :cols].view(np.int8).astype(np.float32)
    group = {WeightFormat.I4_G64: 64, WeightFormat.I4_G128: 128}.get(known, 32)
    of_column = np.repeat(scales[:, : cols // group * 2].copy().view("<f2").astype(np.float32), group, axis=1)
    if known is WeightFormat.Q8_0:
        return of_column * codes[:, :cols].view(np.int8).astype(np.float32)
    bytes_of_group = codes[:, : cols // 2].reshape(rows, -1, 16)
    nibbles = np.concatenate([bytes_of_group & 15, bytes_of_group >> 4], axis=2).reshape(rows, cols).astype(np.float32)
    if known is WeightFormat.Q4_1:
        minimums = planes["minimums"]
        assert minimums is not None
        return of_column * nibbles + np.repeat(
            minimums[:, : cols // 32 * 2].copy().view("<f2").astype(np.float32), 32, axis=1
        )
    return of_column * (nibbles - 8)


def widened(model: TinyModel) -> TinyModel:
    """The model with columns that groups of 128 divide."""
    return replace(model, config=model.config | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 131})


def assert_quantized_runs(source: Path, model: TinyModel, choice: Quantization, folder: Path) -> None:
    """Logits from the quantized folder are those of its own weights in fp32."""
    out = folder / "out"
    quantize_model(source, out, choice, threads=1)
    arrays = quantized_arrays(out)
    plain = write_hf(folder / "plain", model.config, arrays)
    told = prompts(model)
    truth = open_engine(plain, "reference")
    expected = run(truth, told, "one_piece")
    truth.close()
    for backend, bound in BOUNDS.items():
        engine = open_engine(out, backend)
        for ours, right in zip(run(engine, told, "interleaved"), expected, strict=True):
            assert np.abs(ours - right).max() <= bound * max(1.0, float(np.abs(right).max()))
        engine.close()


@pytest.mark.parametrize("name", SHORT)
def test_every_family(tmp_path: Path, name: str) -> None:
    model = MODELS[name]
    source = write_hf(tmp_path / "source", model.config, make_weights(model))
    choice = CHOICES[SHORT.index(name) % len(CHOICES)]
    assert_quantized_runs(source, model, choice, tmp_path)


@pytest.mark.parametrize(
    ("choice", "dtype"),
    list(zip(CHOICES, ["F32", "F16", "BF16"] * 2, strict=True)),
    ids=[choice.description for choice in CHOICES],
)
def test_every_format(tmp_path: Path, choice: Quantization, dtype: str) -> None:
    model = widened(MODELS["llama"])
    source = write_hf(tmp_path / "source", model.config, make_weights(model), dtype)
    assert_quantized_runs(source, model, choice, tmp_path)
    checkpoint = open_checkpoint(tmp_path / "out")
    formats = {name: info.format for name, info in checkpoint.tensors.items()}
    assert formats["model.embed_tokens.weight"] is formats["lm_head.weight"] is WeightFormat.Q8_0
    assert formats["model.layers.1.self_attn.q_proj.weight"] is choice.target(128)
    assert formats["model.layers.1.mlp.down_proj.weight"] is choice.target(256)
    assert formats["model.layers.0.input_layernorm.weight"] is WeightFormat.F32
    assert not any("quantization_config" in key for key in checkpoint.metadata)
    checkpoint.close()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"] == {
        "quant_method": "edge_transformer",
        "layout_version": 1,
        **choice.settings(),
    }


@pytest.mark.parametrize("name", [name for name in SHORT if MODELS[name].gguf])
def test_gguf_files(tmp_path: Path, name: str) -> None:
    """From GGUF: its names and metadata stay, rows come in the order of use; the same weights as from Hugging Face.

    But for columns that a GGUF file has in another order: they share their scales with other columns.
    """
    model = MODELS[name]
    weights = make_weights(model)
    choice = CHOICES[SHORT.index(name) % len(CHOICES)]
    quantize_model(write_hf(tmp_path / "hf", model.config, weights), tmp_path / "from_hf", choice, threads=1)
    quantize_model(write_gguf(tmp_path / "m.gguf", model, weights), tmp_path / "from_gguf", choice, threads=1)
    engines = [open_engine(tmp_path / folder, "reference") for folder in ("from_hf", "from_gguf")]
    told = prompts(model)
    bound = 2e-6 if engines[0].config.delta is None else 2e-2
    for ours, theirs in zip(*(run(engine, told, "one_piece") for engine in engines), strict=True):
        assert np.abs(ours - theirs).max() <= bound * max(1.0, float(np.abs(theirs).max()))
    for engine in engines:
        engine.close()


def test_columns_that_no_group_divides_take_smaller_groups_or_stay(tmp_path: Path) -> None:
    model = replace(MODELS["llama"], config=MODELS["llama"].config | {"hidden_size": 192, "intermediate_size": 112})
    report = quantize_model(
        write_hf(tmp_path / "source", model.config, make_weights(model), "BF16"),
        tmp_path / "out",
        Quantization("int4", 128),
        threads=1,
    )
    formats = {tensor.role: tensor.format for tensor in report.tensors}
    assert formats["q"] == "I4_G64"  # 192 columns
    assert formats["down"] == "BF16"  # 112 columns
    assert formats["embedding"] == "Q8_0"
    assert formats[""] == "F32"
    assert all((tensor.error is None) == (tensor.format in ("F32", "BF16")) for tensor in report.tensors)
    saved = json.loads((tmp_path / "out" / "quantization.json").read_text())
    assert saved == json.loads(json.dumps(report.as_json()))
    data = (tmp_path / "out" / "model.safetensors").read_bytes()
    data_start = 8 + struct.unpack("<Q", data[:8])[0]
    places = {name: entry.get("data_offsets") for name, entry in json.loads(data[8:data_start]).items()}
    for entry in saved["tensors"]:
        first = data_start + (places.get(entry["name"]) or places[f"{entry['name']}.codes"])[0]
        assert entry["sha256"] == hashlib.sha256(data[first : first + entry["bytes"]]).hexdigest()
    (worst,) = [entry for entry in saved["tensors"] if entry["name"] == "model.layers.2.mlp.gate_proj.weight"]
    assert 0.05 < worst["relative_rms_error"] < 0.12
    assert worst["largest_error"] > 0


def test_weights_are_used_where_they_lie(tmp_path: Path) -> None:
    """No copy at load, and the matrices of a layer follow one another as they would in a slot of a GPU."""
    model = widened(MODELS["qwen3"])
    quantize_model(
        write_hf(tmp_path / "source", model.config, make_weights(model)), tmp_path / "out", Quantization("int4"), 1
    )
    with (tmp_path / "out" / "model.safetensors").open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    assert (8 + length) % 4096 == 0
    assert all(
        entry["data_offsets"][0] % 256 == 0
        for name, entry in header.items()
        if name != "__metadata__" and not name.startswith("padding.")
    )
    checkpoint = open_checkpoint(tmp_path / "out")
    weights = HostWeights(checkpoint, read_model(checkpoint))
    assert weights.slab_bytes == 0
    for layer in range(3):
        matrices = [matrix for segment in weights.layer(layer).values() for matrix in segment.values()]
        for matrix, following in pairwise(matrices):
            assert matrix.address % 256 == 0
            assert matrix.address + matrix.layout.nbytes == following.address
    weights.close()
    checkpoint.close()


def tiny_source(folder: Path) -> Path:
    source = write_hf(folder / "source", MODELS["llama"].config, make_weights(MODELS["llama"]), "BF16")
    (source / "tokenizer.json").write_text("{}")
    (source / "generation_config.json").write_text("{}")
    (source / "LICENSE.txt").write_text("yours")
    (source / "model_notes.bin").write_bytes(b"not copied")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    return source


def test_the_folder_has_what_belongs_to_the_model(tmp_path: Path) -> None:
    quantize_model(tiny_source(tmp_path), tmp_path / "out", Quantization("int8"), threads=1)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {
        "LICENSE.txt",
        "additional_chat_templates/tools.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "quantization.json",
        "tokenizer.json",
    }


@pytest.mark.parametrize("stop_at", [1, 7, 20])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, OSError])
def test_interrupted_work_goes_on(tmp_path: Path, stop_at: int, kind: type[BaseException]) -> None:
    source = tiny_source(tmp_path)
    quantize_model(source, tmp_path / "whole", Quantization("int4"), threads=2)
    reports = 0

    def stop(what: str, done: int, total: int) -> None:
        nonlocal reports
        reports += 1
        assert 0 < done <= total
        if reports == stop_at:
            raise kind

    with pytest.raises(kind):
        quantize_model(source, tmp_path / "out", Quantization("int4"), 2, stop)
    assert not (tmp_path / "out").exists()
    journal = (tmp_path / "out.partial" / JOURNAL_FILE).read_text().splitlines()
    written: list[str] = []
    original = quantize_module._Writer._write_plain, quantize_module._Writer._write_quantized

    def watch(method: object) -> object:
        def call(self: object, item: object, *rest: object) -> object:
            written.append(getattr(item, "name", None) or item.info.name)  # type: ignore[attr-defined]
            return method(self, item, *rest)  # type: ignore[operator]

        return call

    quantize_module._Writer._write_plain, quantize_module._Writer._write_quantized = map(watch, original)  # type: ignore[method-assign]
    try:
        quantize_model(source, tmp_path / "out", Quantization("int4"), threads=2)
    finally:
        quantize_module._Writer._write_plain, quantize_module._Writer._write_quantized = original  # type: ignore[method-assign]
    finished = [json.loads(line)["name"] for line in journal[1:]]
    assert not set(finished) & set(written)
    for name in ("model.safetensors", "quantization.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert not (tmp_path / "out.partial").exists()
    assert not (tmp_path / "out" / JOURNAL_FILE).exists()


def test_a_journal_that_a_crash_cut_off(tmp_path: Path) -> None:
    source = tiny_source(tmp_path)
    quantize_model(source, tmp_path / "whole", Quantization("int8"), threads=1)

    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, tmp_path / "out", Quantization("int8"), 1, stop)
    journal = tmp_path / "out.partial" / JOURNAL_FILE
    content = journal.read_bytes()
    for cut in (len(content) - 3, content.index(b"\n") + 30, 10, 0):
        journal.write_bytes(content[:cut])
        with pytest.raises(KeyboardInterrupt):
            quantize_model(source, tmp_path / "out", Quantization("int8"), 1, stop)
    quantize_model(source, tmp_path / "out", Quantization("int8"), threads=1)
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()


@pytest.mark.parametrize(
    "damage",
    [
        b"\xff\xfe\n",
        b"[" * 100_000 + b"\n",
        b'{"name": [], "error": [0, 0, 0]}\n',
        b'{"name": "lm_head.weight", "error": ["x", 0, 0]}\n',
        b'{"name": "lm_head.weight", "error": [null, {}, true]}\n',
    ],
    ids=["no text", "nested", "name", "string", "null"],
)
def test_a_journal_that_is_none_is_named(tmp_path: Path, damage: bytes) -> None:
    source = tiny_source(tmp_path)

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, tmp_path / "out", Quantization("int8"), 1, stop)
    journal = tmp_path / "out.partial" / JOURNAL_FILE
    journal.write_bytes(journal.read_bytes() + damage)
    with pytest.raises(UsageError, match=rf"{JOURNAL_FILE} cannot be read .*; delete the folder"):
        quantize_model(source, tmp_path / "out", Quantization("int8"), threads=1)
    assert not (tmp_path / "out").exists()


def test_a_folder_within_the_source_and_its_templates(tmp_path: Path) -> None:
    """Of the templates' folder only files are copied: never the folder that is being made, into itself."""
    source = tiny_source(tmp_path)
    os.mkfifo(source / "additional_chat_templates" / "pipe")
    for out in (source / "out", source / "additional_chat_templates" / "out"):
        quantize_model(source, out, Quantization("int8"), threads=1)
        assert os.listdir(out / "additional_chat_templates") == ["tools.jinja"]
        assert read_model(open_checkpoint(out)).config == read_model(open_checkpoint(source)).config


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = tiny_source(tmp_path)
    (tmp_path / "out").mkdir()
    with pytest.raises(UsageError, match="exists; nothing is overwritten"):
        quantize_model(source, tmp_path / "out", Quantization("int8"))
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UsageError, match="exists"):
        quantize_model(source, tmp_path / "link", Quantization("int8"))
    (tmp_path / "other.partial").mkdir()
    (tmp_path / "other.partial" / "letter.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"no unfinished work is in it \(letter.txt\)"):
        quantize_model(source, tmp_path / "other", Quantization("int8"))


def test_unfinished_work_of_another_kind_is_refused(tmp_path: Path) -> None:
    source = tiny_source(tmp_path)

    def stop(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, tmp_path / "out", Quantization("int8"), 1, stop)
    with pytest.raises(UsageError, match="another source or other settings"):
        quantize_model(source, tmp_path / "out", Quantization("int4"), 1)
    os.utime(source / "model.safetensors", (1, 1))
    with pytest.raises(UsageError, match="another source or other settings"):
        quantize_model(source, tmp_path / "out", Quantization("int8"), 1)


def test_a_file_that_is_no_more_what_it_was_is_refused(tmp_path: Path) -> None:
    source = tiny_source(tmp_path)

    def stop(what: str, done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, tmp_path / "out", Quantization("int8"), 1, stop)
    os.truncate(tmp_path / "out.partial" / "model.safetensors", 5000)
    with pytest.raises(UsageError, match=r"is not what was written there before; delete .*out\.partial"):
        quantize_model(source, tmp_path / "out", Quantization("int8"), 1)


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    source = tiny_source(tmp_path)

    def another(what: str, done: int, total: int) -> None:
        with pytest.raises(UsageError, match="another process is writing"):
            quantize_model(source, tmp_path / "out", Quantization("int8"), 1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_model(source, tmp_path / "out", Quantization("int8"), 1, another)


def test_what_was_quantized_is_not_quantized_again(tmp_path: Path) -> None:
    quantize_model(tiny_source(tmp_path), tmp_path / "out", Quantization("int8"), threads=1)
    with pytest.raises(UsageError, match="is quantized already"):
        quantize_model(tmp_path / "out", tmp_path / "again", Quantization("int4"))
    assert not (tmp_path / "again.partial").exists()


def test_a_full_disk_is_told_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(CapacityError, match="the quantized model needs"):
        quantize_model(tiny_source(tmp_path), tmp_path / "out", Quantization("int8"))
    assert not (tmp_path / "out.partial" / "model.safetensors").exists()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_disk_that_fills_on_the_way_is_named_and_the_work_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    source = tiny_source(tmp_path)
    quantize_model(source, tmp_path / "whole", Quantization("int8"), threads=1)
    written = os.pwrite
    room = (tmp_path / "whole" / "model.safetensors").stat().st_size // 2

    def full(descriptor: int, values: memoryview, offset: int) -> int:
        if offset + len(values) > room:
            raise OSError(code, os.strerror(code))
        return written(descriptor, values, offset)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(CapacityError, match=r"out\.partial in .* cannot grow: .*; make room"):
        quantize_model(source, tmp_path / "out", Quantization("int8"), threads=1)
    assert not (tmp_path / "out").exists()
    monkeypatch.undo()
    quantize_model(source, tmp_path / "out", Quantization("int8"), threads=1)
    weights = "model.safetensors"
    assert (tmp_path / "out" / weights).read_bytes() == (tmp_path / "whole" / weights).read_bytes()


@pytest.mark.parametrize("changed", ["config.json", "model.safetensors"])
def test_a_source_that_is_replaced_on_the_way_is_refused(tmp_path: Path, changed: str) -> None:
    """The settings beside the weights are read last: they must be those that the weights were read with."""
    source = tiny_source(tmp_path)
    content = (source / changed).read_bytes()
    replaced: list[str] = []

    def replace_file(what: str, done: int, total: int) -> None:
        if not replaced:
            replaced.append(what)
            new = content.replace(b'"rms_norm_eps": 0.03', b'"rms_norm_eps": 0.04')
            (source / "new").write_bytes(new if changed == "config.json" else content)
            os.rename(source / "new", source / changed)

    with pytest.raises(FileChangedError, match=r"while .* was quantized; start again"):
        quantize_model(source, tmp_path / "out", Quantization("int8"), 1, replace_file)
    assert not (tmp_path / "out").exists()


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    weights = make_weights(MODELS["llama"])
    weights["model.layers.1.self_attn.v_proj.weight"][5, 3] = np.nan
    source = write_hf(tmp_path / "source", MODELS["llama"].config, weights)
    with pytest.raises(NumericError, match=r"model\.layers\.1\.self_attn\.v_proj\.weight"):
        quantize_model(source, tmp_path / "out", Quantization("int8"))


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        (("int5",), "there are int8"),
        (("int8", 32), "settings of int4"),
        (("int8-row", None, True), "settings of int4"),
        (("int4", 48), "32, 64 and 128"),
        (("int4", 64, True), "minimums need groups of 32"),
        (("int4", None, True), "minimums need groups of 32"),
    ],
)
def test_settings_that_there_are_not(settings: tuple[object, ...], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        Quantization(*settings)  # type: ignore[arg-type]


def test_fused_tensors_are_refused(tmp_path: Path) -> None:
    source = write_hf(tmp_path / "source", MODELS[FUSED].config, make_weights(MODELS[FUSED]))
    with pytest.raises(UsageError, match="several matrices in one tensor"):
        quantize_model(source, tmp_path / "out", Quantization("int8"))
