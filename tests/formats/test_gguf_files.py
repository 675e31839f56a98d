"""GGUF: what the gguf package writes is read the same; one test per rule that a file can break."""

import os
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from edge_transformer.errors import FileChangedError, FormatError, UnsupportedModelError
from edge_transformer.formats.checkpoint import MappedCheckpoint
from edge_transformer.formats.gguf import open_gguf
from edge_transformer.formats.gguf_types import StringArray
from edge_transformer.formats.repack import read_vector
from formats.sample_files import (
    ARRAY,
    GGUF_TYPES,
    STRING,
    VALUE_TYPES,
    GgufTensor,
    gguf_bytes,
    gguf_tensor,
    number_array,
    scalar,
    string_array,
    text_value,
)


def open_bytes(tmp_path: Path, content: bytes, name: str = "x.gguf") -> MappedCheckpoint:
    (tmp_path / name).write_bytes(content)
    return open_gguf(tmp_path / name)


def refuse(tmp_path: Path, content: bytes, match: str, tensor: str | None = None) -> None:
    with pytest.raises(FormatError, match=match) as caught:
        open_bytes(tmp_path, content)
    assert caught.value.tensor == tensor
    assert "x.gguf" in str(caught.value)


def test_what_the_gguf_package_writes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_float32("llama.eps", 1e-5)
    writer.add_bool("flag", True)
    writer.add_string("text", "naïve 文字 🙂\0end")
    writer.add_array("tokenizer.ggml.tokens", ["a", "", "文", "🙂"])
    writer.add_array("tokenizer.ggml.scores", [0.5, -1.0, 3.0])
    writer.add_array("ids", [1, 2, 3])
    writer.add_array("flags", [True, False, True])
    weights = rng.normal(size=(6, 64)).astype(np.float32)
    arrays = {
        "f32": weights,
        "f16": weights.astype(np.float16),
        "q8": gguf.quantize(weights, gguf.GGMLQuantizationType.Q8_0),
        "q5": gguf.quantize(weights, gguf.GGMLQuantizationType.Q5_1),
        "vector": rng.normal(size=7).astype(np.float32),
        "cube": rng.normal(size=(2, 3, 5)).astype(np.float32),
    }
    for name, array in arrays.items():
        kind = {"q8": gguf.GGMLQuantizationType.Q8_0, "q5": gguf.GGMLQuantizationType.Q5_1}.get(name)
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    checkpoint = open_gguf(path)
    metadata = checkpoint.metadata
    assert checkpoint.container == "gguf"
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 3
    assert metadata["llama.eps"] == np.float32(1e-5)
    assert metadata["flag"] is True
    assert metadata["text"] == "naïve 文字 🙂\0end"
    assert list(metadata["tokenizer.ggml.tokens"]) == ["a", "", "文", "🙂"]
    assert metadata["tokenizer.ggml.scores"].tolist() == [0.5, -1.0, 3.0]
    assert metadata["ids"].tolist() == [1, 2, 3]
    assert metadata["flags"].tolist() == [True, False, True]
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    assert list(checkpoint.tensors) == list(expected)
    for name, tensor in expected.items():
        info = checkpoint.tensors[name]
        assert info.format == tensor.tensor_type.name
        assert info.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)
        np.testing.assert_array_equal(
            read_vector(info), gguf.dequantize(tensor.data, tensor.tensor_type).reshape(info.shape)
        )
    checkpoint.close()


@pytest.mark.parametrize("version", [2, 3])
def test_every_value_type(tmp_path: Path, version: int) -> None:
    extremes = {
        "u8": [0, 255], "i8": [-128, 127], "u16": [0, 65535], "i16": [-32768, 32767], "u32": [0, 2**32 - 1],
        "i32": [-(2**31), 2**31 - 1], "f32": [-1.5, float("inf")], "bool": [False, True], "u64": [0, 2**64 - 1],
        "i64": [-(2**63), 2**63 - 1], "f64": [1e-300, -2.5],
    }  # fmt: skip
    assert extremes.keys() == VALUE_TYPES.keys()
    pairs = [(f"one.{kind}.{i}", scalar(kind, v)) for kind, values in extremes.items() for i, v in enumerate(values)]
    pairs += [(f"many.{kind}", number_array(kind, values)) for kind, values in extremes.items()]
    pairs += [(f"none.{kind}", number_array(kind, [])) for kind in extremes]
    pairs += [("text", text_value("")), ("texts", string_array(["x", "yz"])), ("no texts", string_array([]))]
    checkpoint = open_bytes(tmp_path, gguf_bytes(pairs, version=version))
    for kind, values in extremes.items():
        for i, value in enumerate(values):
            found = checkpoint.metadata[f"one.{kind}.{i}"]
            assert found == value
            assert type(found) is type(value)
        array = checkpoint.metadata[f"many.{kind}"]
        assert isinstance(array, np.ndarray)
        assert array.tolist() == values
        assert len(checkpoint.metadata[f"none.{kind}"]) == 0
    assert checkpoint.metadata["text"] == ""
    assert list(checkpoint.metadata["texts"]) == ["x", "yz"]
    assert list(checkpoint.metadata["no texts"]) == []
    checkpoint.close()
    assert list(checkpoint.metadata["texts"]) == ["x", "yz"]  # metadata outlives the files


def nested(depth: int) -> bytes:
    """An array of one array of one ... of one u8, `depth` arrays in all."""
    value = number_array("u8", [7])[4:]
    for _ in range(depth - 1):
        value = struct.pack("<IQ", ARRAY, 1) + value
    return struct.pack("<I", ARRAY) + value


def test_nested_arrays(tmp_path: Path) -> None:
    inner = [string_array(["a", "b"])[4:], number_array("i16", [1, 2, 3])[4:], string_array([])[4:]]
    value = struct.pack("<IIQ", ARRAY, ARRAY, 3) + b"".join(inner)
    checkpoint = open_bytes(tmp_path, gguf_bytes([("k", value), ("deep", nested(4))]))
    found = checkpoint.metadata["k"]
    assert [list(part) for part in found] == [["a", "b"], [1, 2, 3], []]
    assert checkpoint.metadata["deep"][0][0][0].tolist() == [7]
    checkpoint.close()


def test_string_array_is_a_sequence(tmp_path: Path) -> None:
    texts = ["zero", "", "zwei", "🙂" * 3, "vier"]
    checkpoint = open_bytes(tmp_path, gguf_bytes([("k", string_array(texts))]))
    array = checkpoint.metadata["k"]
    assert isinstance(array, StringArray)
    assert len(array) == 5
    assert [array[i] for i in range(-5, 5)] == texts * 2
    assert array[1:4] == texts[1:4]
    assert array[::-2] == texts[::-2]
    assert array.tolist() == list(array) == texts
    assert "zwei" in array
    assert "drei" not in array
    for index in (5, -6):
        with pytest.raises(IndexError):
            array[index]
    checkpoint.close()


def test_strings_that_are_not_utf8(tmp_path: Path) -> None:
    refuse(tmp_path, gguf_bytes([("k", text_value(b"\xff"))]), "metadata 'k' is not UTF-8")
    refuse(tmp_path, gguf_bytes([(b"k\xff", scalar("u8", 1))]), "metadata key 0 is not UTF-8")
    checkpoint = open_bytes(tmp_path, gguf_bytes([("k", string_array(["fine", b"\xff\xfe"]))]))
    array = checkpoint.metadata["k"]
    assert array[0] == "fine"
    for read in (lambda: array[1], lambda: list(array), array.tolist):
        with pytest.raises(FormatError, match=r"x\.gguf.*metadata k.*not UTF-8"):
            read()
    checkpoint.close()


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment(tmp_path: Path, alignment: int) -> None:
    rng = np.random.default_rng(alignment)
    tensors = [gguf_tensor(rng, f"t{i}", name, 3, GGUF_TYPES[name][1]) for i, name in enumerate(GGUF_TYPES)]
    content = gguf_bytes([("general.alignment", scalar("u32", alignment))], tensors, alignment=alignment)
    checkpoint = open_bytes(tmp_path, content)
    for tensor in tensors:
        info = checkpoint.tensors[tensor.name]
        assert info.offset % alignment == 0
        assert content[info.offset : info.offset + info.nbytes] == tensor.data
        assert info.shape == tensor.shape
    checkpoint.close()


F32 = GgufTensor("a", (4,), 0, bytes(16))
U8 = scalar("u8", 1)


@pytest.mark.parametrize(
    ("content", "match", "tensor"),
    [
        (b"GGU", "ends inside the magic number", None),
        (gguf_bytes(magic=b"GGML"), "does not begin with GGUF", None),
        (gguf_bytes(version=1), "GGUF version 1; versions 2 and 3 are read", None),
        (gguf_bytes(version=4), "GGUF version 4", None),
        (gguf_bytes(version=3 << 24), "big-endian", None),
        (gguf_bytes(key_count=1 << 63), "claims 9223372036854775808 metadata keys", None),
        (gguf_bytes(tensor_count=1 << 63), "claims 9223372036854775808 tensors", None),
        (gguf_bytes([("k", U8)], key_count=2), "ends inside|not UTF-8|empty", None),
        (gguf_bytes(tensor_count=1)[:24], "ends inside the name of tensor 0", None),
        (gguf_bytes([("k", U8), ("k", U8)]), "metadata key 'k' is there twice", None),
        (gguf_bytes([("", U8)]), "metadata key '' is empty", None),
        (gguf_bytes([("k" * 65536, U8)]), "more than the 65535 that are accepted", None),
        (gguf_bytes([("k", struct.pack("<I", 13))]), "unknown value type 13", None),
        (gguf_bytes([("k", struct.pack("<IIQ", ARRAY, 99, 0))]), "unknown value type 99", None),
        (gguf_bytes([("k", struct.pack("<IB", 7, 2))]), "is a bool with the value 2", None),
        (gguf_bytes([("k", struct.pack("<IIQ", ARRAY, 7, 3) + b"\0\1\2")]), "a bool that is neither 0 nor 1", None),
        (gguf_bytes([("k", struct.pack("<IQ", STRING, 1 << 62))]), "claims 4611686018427387904 bytes", None),
        (gguf_bytes([("k", struct.pack("<IQ", STRING, 1000))]), "ends inside metadata 'k'", None),
        (gguf_bytes([("k", struct.pack("<IIQ", ARRAY, STRING, 1 << 61))]), "strings, more than the rest", None),
        (gguf_bytes([("k", string_array(["abc" * 99]))])[:-64], "string 0 of 1 reaches past the end", None),
        (
            gguf_bytes([("k", struct.pack("<IIQQQ", ARRAY, STRING, 2, 0, (1 << 64) - 8))]),
            "string 1 of 2 reaches past the end",
            None,
        ),
        (gguf_bytes([("k", struct.pack("<IIQ", ARRAY, 10, 1 << 61))]), "ends inside metadata 'k'", None),
        (gguf_bytes([("k", nested(5))]), "nests arrays more than 4 deep", None),
        (gguf_bytes([("k", struct.pack("<IIQ", ARRAY, ARRAY, 1 << 40))]), "nested arrays above the 4096", None),
        (gguf_bytes([("general.alignment", scalar("u32", 0))]), "general.alignment 0", None),
        (gguf_bytes([("general.alignment", scalar("u32", 24))]), "general.alignment 24", None),
        (gguf_bytes([("general.alignment", scalar("u32", 1 << 30))]), "general.alignment 1073741824", None),
        (gguf_bytes([("general.alignment", text_value("32"))]), "general.alignment 32", None),
        (gguf_bytes([], [F32, F32]), "is there twice", "a"),
        (gguf_bytes([], [GgufTensor("", (4,), 0, bytes(16))]), "tensor 0 has an empty name", None),
        (gguf_bytes([], [GgufTensor(b"\xff", (4,), 0, bytes(16))]), "name of tensor 0 is not UTF-8", None),
        (gguf_bytes([], [GgufTensor("a", (1,) * 5, 0, bytes(4))]), "has 5 dimensions", "a"),
        (gguf_bytes([], [GgufTensor("a", (4, 0), 0, b"")]), r"impossible shape \[4, 0\]", "a"),
        (gguf_bytes([], [GgufTensor("a", (1 << 62, 1 << 62), 0, b"")]), "impossible shape", "a"),
        (gguf_bytes([], [GgufTensor("a", (1 << 40,), 0, bytes(64))]), "of a file of", "a"),
        (gguf_bytes([], [GgufTensor("a", (4,), 0, bytes(15))]), "of a file of", "a"),
        (gguf_bytes([], [GgufTensor("a", (4,), 0, bytes(16), offset=1 << 63)]), "of a file of", "a"),
        (gguf_bytes([], [GgufTensor("a", (4,), 0, bytes(64), offset=8)]), "offset 8, no multiple of 32", "a"),
        (gguf_bytes([], [GgufTensor("a", (33,), 8, bytes(68))]), "rows of 33 values; Q8_0 needs multiples of 32", "a"),
        (gguf_bytes([], [GgufTensor("a", (2, 128), 12, bytes(144))]), "rows of 128 values; Q4_K", "a"),
        (gguf_bytes([], [GgufTensor("a", (32,), 20, bytes(18))]), "has type IQ4_NL; F32, F16", "a"),
        (gguf_bytes([], [GgufTensor("a", (256,), 10, bytes(84))]), "has type Q2_K", "a"),
        (gguf_bytes([], [GgufTensor("a", (32,), 39, bytes(17))]), "has type MXFP4", "a"),
        (gguf_bytes([], [GgufTensor("a", (4,), 26, bytes(16))]), "has type I32", "a"),
        (gguf_bytes([], [GgufTensor("a", (4,), 1000, bytes(16))]), "number 1000, which is unknown", "a"),
        (gguf_bytes([], [F32, GgufTensor("b", (4,), 0, bytes(16), offset=0)]), "overlaps the tensor before it", "b"),
        (
            gguf_bytes([], [GgufTensor("a", (12,), 0, bytes(64)), GgufTensor("b", (4,), 0, bytes(16), offset=32)]),
            "overlaps the tensor before it",
            "b",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_broken_rule_is_refused(tmp_path: Path, content: bytes, match: str, tensor: str | None) -> None:
    refuse(tmp_path, content, match, tensor)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    pairs = [("k", text_value("value")), ("t", string_array(["a", "b"])), ("n", number_array("f32", [1, 2]))]
    content = gguf_bytes(pairs, [gguf_tensor(np.random.default_rng(0), "w", "Q4_K", 2, 256), F32])
    open_bytes(tmp_path, content).close()
    for length in range(1, len(content)):
        refuse_any(tmp_path, content[:length])


def refuse_any(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(FormatError, match=r"x\.gguf"):
        open_bytes(tmp_path, content)


def test_truncation_while_reading_is_not_called_corruption(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from edge_transformer.formats import gguf_reader

    read_metadata = gguf_reader._Reader._read_metadata

    def shrink_and_read(self: gguf_reader._Reader, count: int) -> dict[str, object]:
        os.truncate(tmp_path / "x.gguf", 4096)
        return read_metadata(self, count)

    monkeypatch.setattr(gguf_reader._Reader, "_read_metadata", shrink_and_read)
    with pytest.raises(FileChangedError):
        open_bytes(tmp_path, gguf_bytes([("k", string_array(["abc"] * 1000)), ("z", U8)]))


def split_part(index: int, count: int, total: int, tensors: list[GgufTensor], extra: bool = False) -> bytes:
    pairs = [("split.no", scalar("u16", index)), ("split.count", scalar("u16", count))]
    pairs += [("split.tensors.count", scalar("i32", total))]
    return gguf_bytes(pairs + ([("general.architecture", text_value("llama"))] if extra else []), tensors)


def write_split(tmp_path: Path) -> list[Path]:
    rng = np.random.default_rng(9)
    tensors = [gguf_tensor(rng, f"t{i}", "Q8_0", i + 1, 32) for i in range(5)]
    paths = [tmp_path / f"m-{i:05d}-of-00003.gguf" for i in (1, 2, 3)]
    for index, (path, part) in enumerate(zip(paths, (tensors[:2], tensors[2:3], tensors[3:]), strict=True)):
        path.write_bytes(split_part(index, 3, 5, part, extra=index == 0))
    return paths


def test_any_part_opens_all_parts(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    for path in paths:
        checkpoint = open_gguf(path)
        assert list(checkpoint.tensors) == ["t0", "t1", "t2", "t3", "t4"]
        assert checkpoint.metadata["general.architecture"] == "llama"
        assert [checkpoint.tensors[f"t{i}"].file.path for i in (0, 2, 4)] == paths
        checkpoint.check_unchanged()
        os.utime(paths[1])
        with pytest.raises(FileChangedError, match="m-00002-of-00003"):
            checkpoint.check_unchanged()
        checkpoint.close()


def test_what_the_gguf_package_splits(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    arrays = {f"t{i}": rng.normal(size=(4, 8)).astype(np.float32) for i in range(5)}
    writer = gguf.GGUFWriter(tmp_path / "s.gguf", "llama", split_max_tensors=2)
    for name, array in arrays.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    checkpoint = open_gguf(tmp_path / "s-00002-of-00003.gguf")
    assert checkpoint.metadata["general.architecture"] == "llama"
    for name, array in arrays.items():
        np.testing.assert_array_equal(read_vector(checkpoint.tensors[name]), array)
    checkpoint.close()


def test_split_parts_that_do_not_fit_together(tmp_path: Path) -> None:
    paths = write_split(tmp_path)
    content = [path.read_bytes() for path in paths]

    def refused(match: str, path: Path = paths[0]) -> None:
        with pytest.raises(FormatError, match=match):
            open_gguf(path)

    paths[1].unlink()
    refused("m-00002-of-00003.*missing")
    paths[1].write_bytes(content[2])
    refused("split.no 2 where its name says 1")
    paths[1].write_bytes(gguf_bytes([], [F32]))
    refused("split.count None where its name says 3")
    paths[1].write_bytes(split_part(1, 3, 5, []))
    refused("says that all parts hold 5 tensors, but 4 were found")
    rng = np.random.default_rng(0)
    paths[1].write_bytes(split_part(1, 3, 5, [gguf_tensor(rng, "t0", "Q8_0", 1, 32)]))
    refused("is also in m-00001")
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(content[0])
    refused("split.count 3 where its name says 1", alone)
    numbered = tmp_path / "m-00004-of-00003.gguf"
    numbered.write_bytes(content[0])
    refused("named as part 4 of 3", numbered)


def test_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"LoRA.*merge"):
        open_bytes(tmp_path, gguf_bytes([("general.type", text_value("adapter"))], [F32]))
