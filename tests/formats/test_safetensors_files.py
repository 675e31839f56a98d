"""safetensors: what the reference library writes is read; one test per rule that a file can break."""

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from edge_transformer.errors import FileChangedError, FormatError, UnsupportedModelError
from edge_transformer.formats.repack import read_vector
from edge_transformer.formats.safetensors import open_safetensors
from edge_transformer.formats.weight import WeightFormat
from formats.sample_files import entry, safetensors_bytes

PAIR = {"a": entry("F32", [2], 0, 8), "b": entry("BF16", [3], 8, 14)}


def write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def refuse(path: Path, match: str, tensor: str | None = None) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        open_safetensors(path)
    assert caught.value.tensor == tensor
    if tensor is not None:
        assert tensor in str(caught.value)


def test_what_the_reference_library_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "model.weight": rng.normal(size=(7, 5)).astype(np.float32),
        "half": rng.normal(size=(3, 4, 2)).astype(np.float16),
        "scalar": np.array(1.5, np.float32),
        "none": np.zeros((0, 4), np.float32),
        "übung": rng.normal(size=11).astype(np.float16),
    }
    safetensors.numpy.save_file(arrays, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 5}')
    for path in (tmp_path, tmp_path / "model.safetensors"):
        checkpoint = open_safetensors(path)
        assert checkpoint.container == "safetensors"
        assert checkpoint.path == path
        assert checkpoint.metadata == {"model_type": "llama", "hidden_size": 5}
        assert checkpoint.tensors.keys() == arrays.keys()
        for name, array in arrays.items():
            info = checkpoint.tensors[name]
            assert info.shape == array.shape
            assert info.nbytes == array.nbytes
            np.testing.assert_array_equal(read_vector(info), array.astype(np.float32))
        checkpoint.check_unchanged()
        checkpoint.close()


def test_bf16_at_any_alignment(tmp_path: Path) -> None:
    torch_like = np.array([0x3F80, 0xC000, 0x7F80, 0x0001, 0x8000], np.uint16)  # 1, -2, inf, smallest subnormal, -0
    for spaces in range(4):
        header = json.dumps({"w": entry("BF16", [5], 0, 10)}).encode() + b" " * spaces
        checkpoint = open_safetensors(write(tmp_path, "x.safetensors", safetensors_bytes(header, torch_like.tobytes())))
        info = checkpoint.tensors["w"]
        assert info.format is WeightFormat.BF16
        expected = (torch_like.astype(np.uint32) << 16).view(np.float32)
        assert read_vector(info).tobytes() == expected.tobytes()
        assert checkpoint.metadata == {}
        checkpoint.close()


def test_shards_by_index_and_through_symlinks(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {f"layer.{i}": rng.normal(size=(3, i + 1)).astype(np.float32) for i in range(5)}
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshots"
    blobs.mkdir()
    folder.mkdir()
    weight_map = {}
    for shard, names in enumerate([["layer.0", "layer.3"], ["layer.1"], ["layer.2", "layer.4"]], 1):
        file_name = f"model-{shard:05d}-of-00003.safetensors"
        safetensors.numpy.save_file({name: arrays[name] for name in names}, blobs / f"hash{shard}")
        (folder / file_name).symlink_to(f"../blobs/hash{shard}")
        weight_map |= dict.fromkeys(names, file_name)
    write_index(folder, weight_map)
    checkpoint = open_safetensors(folder)
    assert checkpoint.tensors.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(read_vector(checkpoint.tensors[name]), array)
    checkpoint.close()
    refuse(folder / "model-00002-of-00003.safetensors", "one of 3 shards; give the folder")


def two_headers_of_one_name() -> bytes:
    text = json.dumps({"a": entry("F32", [], 0, 4)})
    return safetensors_bytes(f"{text[:-1]}, {text[1:]}".encode(), bytes(4))


@pytest.mark.parametrize(
    ("content", "match", "tensor"),
    [
        (b"1234567", "too short", None),
        (safetensors_bytes(b"{}", length=3), "header claims 3 bytes", None),
        (safetensors_bytes(b"{}", length=2**63), "header claims 9223372036854775808 bytes", None),
        (
            safetensors_bytes(b" " * (2 << 20)),
            "header claims 2097152 bytes, of which a file of .* can have 1048576",
            None,
        ),
        (safetensors_bytes(b""), "not valid JSON", None),
        (safetensors_bytes(b"[]"), "not valid JSON", None),
        (safetensors_bytes(b"{} {}"), "something after its end", None),
        (safetensors_bytes(b'{"a": {"shape": []}}'.replace(b"[]", b"[" * 900)), "not valid JSON", None),
        (safetensors_bytes(b'{"a": {"shape": [' + b"1," * 1000), "no object without objects", None),
        (safetensors_bytes(b'{"a'), "no string", None),
        (safetensors_bytes(rb'{"\ud800": {}}'), "no Unicode text", None),
        (safetensors_bytes(b'{"a": "b"}'), "no object", None),
        (safetensors_bytes(b'{"a": {},}'), "exactly dtype, shape, data_offsets", "a"),
        (safetensors_bytes(b'{"a": '), "not valid JSON", None),
        (safetensors_bytes(b'{"a\xff": 1}'), "not valid JSON", None),
        (safetensors_bytes(b"[" * 100_000), "not valid JSON", None),
        (safetensors_bytes(b'{"a":' * 100_000), "not valid JSON", None),
        (safetensors_bytes(b'{"a": ' + b"1" * 5000 + b"}"), "not valid JSON", None),
        (two_headers_of_one_name(), "the key 'a' twice", None),
        (safetensors_bytes(b'{"a": {"dtype": "F32", "dtype": "F16"}}'), "with a key twice", None),
        (safetensors_bytes({"__metadata__": {"x": 1}}), "no string", None),
        (safetensors_bytes({"a": 5}), "no object", None),
        (safetensors_bytes({"a": {"dtype": "F32", "shape": []}}), "exactly dtype, shape, data_offsets", "a"),
        (safetensors_bytes({"a": entry("F32", [], 0, 4) | {"x": 1}}, bytes(4)), "exactly dtype, shape", "a"),
        (safetensors_bytes({"a": entry("F8_E4M3", [4], 0, 4)}, bytes(4)), "dtype F8_E4M3; F32, F16 and BF16", "a"),
        (safetensors_bytes({"a": entry("I64", [1], 0, 8)}, bytes(8)), "dtype I64", "a"),
        (safetensors_bytes({"a": entry("F32", [2.0], 0, 8)}, bytes(8)), "has the shape", "a"),
        (safetensors_bytes({"a": entry("F32", [True], 0, 4)}, bytes(4)), "has the shape", "a"),
        (safetensors_bytes({"a": entry("F32", [-1], 0, 4)}, bytes(4)), "has the shape", "a"),
        (safetensors_bytes({"a": entry("F32", [1 << 64], 0, 4)}, bytes(4)), "has the shape", "a"),
        (safetensors_bytes({"a": entry("F32", [1] * 9, 0, 4)}, bytes(4)), "has the shape", "a"),
        (safetensors_bytes({"a": entry("F32", [1], 0, 8)}, bytes(8)), r"shape \[1\] of F32 needs 4 bytes", "a"),
        (safetensors_bytes({"a": entry("F32", [1 << 62], 0, 8)}, bytes(8)), "needs 18446744073709551616 bytes", "a"),
        (safetensors_bytes({"a": entry("F32", [2], 0, 8)}, bytes(7)), "of the data, of which there are 7", "a"),
        (safetensors_bytes({"a": entry("F32", [1], 8, 4)}, bytes(8)), "lies at bytes 8 to 4", "a"),
        (safetensors_bytes({"a": entry("F32", [1], -4, 0)}, bytes(8)), "data_offsets", "a"),
        (safetensors_bytes(PAIR | {"b": entry("BF16", [3], 6, 12)}, bytes(12)), "overlaps", "b"),
        (safetensors_bytes(PAIR | {"b": entry("F32", [2], 0, 8)}, bytes(8)), "overlaps", "b"),
        (safetensors_bytes(PAIR | {"b": entry("BF16", [3], 10, 16)}, bytes(16)), "2 unexplained bytes before", "b"),
        (safetensors_bytes({"a": entry("F32", [1], 4, 8)}, bytes(8)), "4 unexplained bytes before", "a"),
        (safetensors_bytes(PAIR, bytes(15)), "1 bytes at the end belong to no tensor", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_broken_rule_is_refused(tmp_path: Path, content: bytes, match: str, tensor: str | None) -> None:
    refuse(write(tmp_path, "model.safetensors", content), match, tensor)


@pytest.mark.parametrize(
    "place",
    [
        "../x.safetensors",
        "/x.safetensors",
        "sub/x.safetensors",
        "..",
        "",
        "x.bin",
        "\0.safetensors",
        "x" * 300 + ".safetensors",
    ],
)
def test_index_entries_that_leave_the_folder(tmp_path: Path, place: str) -> None:
    write(tmp_path.parent, "x.safetensors", safetensors_bytes(PAIR, bytes(14)))
    write_index(tmp_path, {"a": place})
    refuse(tmp_path, "no file of this folder|missing", "a" if len(place) < 100 else None)


def test_index_and_shards_disagree(tmp_path: Path) -> None:
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    write(tmp_path, one, safetensors_bytes({"a": entry("F32", [1], 0, 4)}, bytes(4)))
    write_index(tmp_path, {"a": one, "b": two})
    refuse(tmp_path, "names the shard 'model-00002-of-00002.safetensors', which is missing")
    write(tmp_path, two, safetensors_bytes({"a": entry("F32", [1], 0, 4)}, bytes(4)))
    refuse(tmp_path, "is also in model-00001", "a")
    write(tmp_path, two, safetensors_bytes({"c": entry("F32", [1], 0, 4)}, bytes(4)))
    refuse(tmp_path, "is not placed in this file", "c")
    write(tmp_path, two, safetensors_bytes({}))
    refuse(tmp_path, "is placed in this file by .* but not there", "b")
    for content in [
        "[]",
        '{"weight_map": []}',
        "{}",
        '{"weight_map": {}}',
        '{"weight_map": {"a": "x", "a": "y"}}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": null}}',
        '{"other": 1}',
        "\xff",
    ]:
        (tmp_path / "model.safetensors.index.json").write_text(content, encoding="latin-1")
        refuse(tmp_path, "weight_map|unknown key|twice|not valid JSON")


@pytest.mark.parametrize(
    ("config", "match"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, r"quantization_config \(method 'gptq'\).*GGUF"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, r"text_config\.quantization_config"),
        ({"auto_map": {"AutoModel": "modeling_x.X"}}, "auto_map .*never run.*GGUF"),
    ],
)
def test_config_that_nothing_here_can_honour(tmp_path: Path, config: object, match: str) -> None:
    write(tmp_path, "model.safetensors", safetensors_bytes(PAIR, bytes(14)))
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match=match):
        open_safetensors(tmp_path)


def test_empty_settings_of_those_names_are_no_reason_to_refuse(tmp_path: Path) -> None:
    write(tmp_path, "model.safetensors", safetensors_bytes(PAIR, bytes(14)))
    (tmp_path / "config.json").write_text('{"quantization_config": null, "auto_map": {}}')
    open_safetensors(tmp_path).close()


@pytest.mark.parametrize("config", ["[1]", "{", '{"a": 1, "a": 2}', "[" * 100_000])
def test_config_that_is_no_object(tmp_path: Path, config: str) -> None:
    write(tmp_path, "model.safetensors", safetensors_bytes(PAIR, bytes(14)))
    (tmp_path / "config.json").write_text(config)
    refuse(tmp_path, r"config\.json")


def test_adapters_and_pickles_are_refused_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    refuse(tmp_path, "pickled weights .*convert them to safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    write(tmp_path, "adapter_model.safetensors", safetensors_bytes(PAIR, bytes(14)))
    for path in (tmp_path, tmp_path / "adapter_model.safetensors"):
        with pytest.raises(UnsupportedModelError, match=r"LoRA.*merge"):
            open_safetensors(path)


def test_folders_without_the_expected_names(tmp_path: Path) -> None:
    refuse(tmp_path, "has no weights")
    write(tmp_path, "consolidated.safetensors", safetensors_bytes(PAIR, bytes(14)))
    refuse(tmp_path, "but consolidated.safetensors: give that file's path")
    open_safetensors(tmp_path / "consolidated.safetensors").close()
    refuse(tmp_path / "missing.safetensors", "No such file")


def test_truncation_while_reading_is_not_called_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file shrinks between opening and parsing: FileChangedError, not a complaint about zeros."""
    from edge_transformer.formats import safetensors as module

    path = write(tmp_path, "model.safetensors", safetensors_bytes(PAIR, bytes(14)))
    parse = module._parse_header

    def shrink_and_parse(file: module.MappedModelFile) -> object:
        path.write_bytes(struct.pack("<Q", 0))
        return parse(file)

    monkeypatch.setattr(module, "_parse_header", shrink_and_parse)
    with pytest.raises(FileChangedError):
        open_safetensors(path)
