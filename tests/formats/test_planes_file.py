"""Files of weight planes: what is written is what the safetensors package reads; each way of being wrong is told."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from edge_transformer.errors import FormatError, UnsupportedModelError
from edge_transformer.formats.gguf_reader import metadata_section, read_part
from edge_transformer.formats.mapping import MappedModelFile
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.planes_writer import PlainTensor, plan_file
from edge_transformer.formats.repack import read_vector, repack
from edge_transformer.formats.weight import FORMATS, WeightFormat, packed_layout
from formats.sample_files import gguf_bytes, scalar, string_array, text_value

ITEMS = [
    ("norm", PlainTensor(WeightFormat.F32, (5,))),
    ("w", packed_layout(WeightFormat.I4_G64, 3, 192)),
    ("half", PlainTensor(WeightFormat.BF16, (3, 7, 2))),
    ("v", packed_layout(WeightFormat.Q4_1, 17, 64)),
    ("row", packed_layout(WeightFormat.I8_ROW, 2, 96)),
]


def content(items: list[tuple[str, object]] = ITEMS, **metadata: str) -> bytes:  # type: ignore[assignment]
    """A file of random bytes."""
    plan = plan_file(items, metadata)  # type: ignore[arg-type]
    rest = np.random.default_rng(0).integers(0, 256, plan.nbytes - len(plan.header), np.uint8)
    return plan.header + rest.tobytes()


def header_of(data: bytes) -> dict[str, dict[str, object]]:
    (length,) = struct.unpack("<Q", data[:8])
    return dict(json.loads(data[8 : 8 + length]))


def with_header(data: bytes, header: object) -> bytes:
    (length,) = struct.unpack("<Q", data[:8])
    text = json.dumps(header).encode()
    assert len(text) <= length
    return data[:8] + text.ljust(length) + data[8 + length :]


def write(folder: Path, data: bytes, config: object = None) -> Path:
    (folder / "model.safetensors").write_bytes(data)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_what_is_written_is_what_the_reference_library_reads(tmp_path: Path) -> None:
    data = content(origin="here")
    write(tmp_path, data)
    with safetensors.safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata()["origin"] == "here"
        assert file.metadata()["edge_transformer.layout"] == "1"
        names = {name for name in file.keys() if not name.startswith("padding.")}  # noqa: SIM118 - no mapping
        assert names == {
            "norm", "half", "w.codes", "w.scales", "v.codes", "v.scales", "v.minimums", "row.codes", "row.scales",
        }  # fmt: skip
        checkpoint = open_checkpoint(tmp_path)
        for name, item in ITEMS:
            info = checkpoint.tensors[name]
            assert info.offset % 256 == 0
            if isinstance(item, PlainTensor):
                assert (info.format, info.shape, info.layout) == (item.format, item.shape, None)
                continue
            assert (info.format, info.shape, info.layout) == (item.format, (item.rows, item.cols), item)
            for spec, plane in zip(FORMATS[item.format].planes, item.planes, strict=True):
                start = info.offset + plane.offset
                expected = np.frombuffer(data, np.uint8, item.rows * plane.row_pitch, start)
                assert np.array_equal(file.get_tensor(f"{name}.{spec.name}").reshape(-1), expected)
        assert checkpoint.tensors.keys() == dict(ITEMS).keys()
        checkpoint.close()
    assert (8 + struct.unpack("<Q", data[:8])[0]) % 4096 == 0
    assert len(data) % 256 == 0


def test_planes_are_values_but_no_blocks(tmp_path: Path) -> None:
    data = content()
    checkpoint = open_checkpoint(write(tmp_path, data))
    info = checkpoint.tensors["row"]
    scales = np.frombuffer(data, "<f4", 8, info.offset + 256)[::4]
    codes = np.frombuffer(data, np.int8, 192, info.offset).reshape(2, 96)
    assert np.array_equal(read_vector(info), scales[:, None] * codes.astype(np.float32), equal_nan=True)
    with pytest.raises(ValueError, match="layout of I4_G64"):
        repack(checkpoint.tensors["w"], packed_layout(WeightFormat.I4_G64, 3, 192), 0)
    assert read_vector(checkpoint.tensors["norm"]).shape == (5,)
    checkpoint.close()


def test_two_of_one_name_are_not_written() -> None:
    for second in ("w", "w.scales"):
        with pytest.raises(ValueError, match="two tensors are called"):
            plan_file([ITEMS[1], (second, PlainTensor(WeightFormat.F32, (1,)))], {})


def changed(change: str) -> bytes:
    data = content()
    header = header_of(data)
    metadata, codes, scales = header["__metadata__"], header["w.codes"], header["w.scales"]
    match change:
        case "version":
            metadata["edge_transformer.layout"] = "2"
        case "format":
            metadata["weight:w"] = "I4_G65 3 192"
        case "words":
            metadata["weight:w"] = "I4_G64 3"
        case "columns":
            metadata["weight:w"] = "I4_G64 3 193"
        case "shape":
            metadata["weight:w"] = "I4_G64 4 192"
        case "missing plane":
            header["w.scale"] = header.pop("w.scales")
        case "missing matrix":
            metadata["weight:x"] = "I8_ROW 1 32"
        case "exchanged":
            codes["shape"], scales["shape"] = scales["shape"], codes["shape"]
            codes["data_offsets"], scales["data_offsets"] = scales["data_offsets"], codes["data_offsets"]
        case "unknown bytes":
            del metadata["weight:w"]
    return with_header(data, header)


@pytest.mark.parametrize(
    ("change", "match", "tensor"),
    [
        ("version", "layout version '2' of quantized files; this program reads version 1", None),
        ("format", "described as 'I4_G65 3 192', not as FORMAT ROWS COLUMNS", "w"),
        ("words", "not as FORMAT ROWS COLUMNS", "w"),
        ("columns", "multiples of 64", "w"),
        ("shape", "layout 1 has U8", "w"),
        ("missing plane", "its plane 'w.scales' is missing", "w"),
        ("missing matrix", "its plane 'x.codes' is missing", "x"),
        ("exchanged", "layout 1 has U8", "w"),
        ("unknown bytes", "has dtype U8; F32, F16 and BF16 are read", "w.codes"),
    ],
)
def test_what_a_file_can_have_wrong(tmp_path: Path, change: str, match: str, tensor: str | None) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        open_checkpoint(write(tmp_path, changed(change)))
    assert caught.value.tensor == tensor


@pytest.mark.parametrize("change", ["format of as many bytes", "exchanged tensors", "another digest", "an origin"])
def test_a_header_that_was_changed(tmp_path: Path, change: str) -> None:
    """Where all else fits, its digest tells: 12 bytes of scales and 6 are padded to the same 16."""
    data = content([*ITEMS, ("w2", ITEMS[1][1])], origin="here")
    header = header_of(data)
    metadata = header["__metadata__"]
    open_checkpoint(write(tmp_path, with_header(data, dict(reversed(header.items()))))).close()
    if change == "format of as many bytes":
        assert metadata["weight:w"] == "I4_G64 3 192"
        metadata["weight:w"] = "Q4_0 3 192"
    elif change == "exchanged tensors":
        for plane in ("codes", "scales"):
            header[f"w.{plane}"], header[f"w2.{plane}"] = header[f"w2.{plane}"], header[f"w.{plane}"]
    elif change == "another digest":
        metadata["edge_transformer.header_sha256"] = "0" * 64
    else:
        metadata["origin"] = "else"
    with pytest.raises(FormatError, match=r"header was changed after it was written.*quantize the model again"):
        open_checkpoint(write(tmp_path, with_header(data, header)))


def test_a_file_without_a_digest_of_its_header(tmp_path: Path) -> None:
    """As layout 1 was written at first."""
    data = content()
    header = header_of(data)
    del header["__metadata__"]["edge_transformer.header_sha256"]
    checkpoint = open_checkpoint(write(tmp_path, with_header(data, header)))
    assert checkpoint.tensors.keys() == dict(ITEMS).keys()
    checkpoint.close()


def test_data_that_does_not_begin_at_a_multiple_of_256(tmp_path: Path) -> None:
    data = content()
    (length,) = struct.unpack("<Q", data[:8])
    moved = struct.pack("<Q", length + 64) + data[8 : 8 + length] + b" " * 64 + data[8 + length :]
    with pytest.raises(FormatError, match="no multiple of 256"):
        open_checkpoint(write(tmp_path, moved))


OURS = {"quant_method": "edge_transformer", "layout_version": 1, "format": "int4"}


def test_the_configuration_and_the_weights_agree(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path, content(), {"model_type": "llama", "quantization_config": OURS}))
    assert checkpoint.metadata == {"model_type": "llama"}
    checkpoint.close()
    plain = safetensors.numpy.save({"a": np.zeros(3, np.float32)})
    with pytest.raises(FormatError, match="was quantized by ete quantize, but its weights were not"):
        open_checkpoint(write(tmp_path, plain))


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "gptq"}},
        {"quantization_config": "edge_transformer"},
        {"text_config": {"quantization_config": OURS}},
    ],
)
def test_other_quantizations_are_refused_as_before(tmp_path: Path, config: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"quantization_config .* is not supported"):
        open_checkpoint(write(tmp_path, content(), config))


def test_metadata_of_a_gguf_file(tmp_path: Path) -> None:
    pairs = [("general.architecture", text_value("llama")), ("n", scalar("u32", 7)), ("t", string_array(["a", "bé"]))]
    source = tmp_path / "source.gguf"
    source.write_bytes(gguf_bytes(pairs, []))
    file = MappedModelFile(source)
    (tmp_path / "metadata.gguf").write_bytes(metadata_section(file))
    file.close()
    checkpoint = open_checkpoint(write(tmp_path, content(**{"edge_transformer.names": "gguf"})))
    assert checkpoint.container == "gguf"
    assert checkpoint.tensors.keys() == dict(ITEMS).keys()
    assert checkpoint.metadata.keys() == {"general.architecture", "n", "t"}
    assert checkpoint.metadata["n"] == 7
    assert list(checkpoint.metadata["t"]) == ["a", "bé"]  # type: ignore[call-overload]
    checkpoint.check_unchanged()
    (tmp_path / "metadata.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match="changed"):
        checkpoint.check_unchanged()
    checkpoint.close()
    copied = MappedModelFile(source)
    assert read_part(copied).tensors == {}
    copied.close()


def test_metadata_of_a_gguf_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"metadata\.gguf"):
        open_checkpoint(write(tmp_path, content(**{"edge_transformer.names": "gguf"})))
