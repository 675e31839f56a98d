"""Breaking valid model files at random, and what every broken one must do: open, or one typed error, fast and lean.

Shared by the tests (some seconds) and by benchmarks/fuzz_formats.py (minutes).
"""

import json
import os
import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np

from edge_transformer.errors import FormatError, UnsupportedModelError
from edge_transformer.formats.gguf_reader import MAX_TENSORS
from edge_transformer.formats.gguf_types import StringArray
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.formats.planes_writer import PlainTensor, plan_file
from edge_transformer.formats.repack import read_vector
from edge_transformer.formats.weight import WeightFormat, packed_layout
from formats.sample_files import (
    ARRAY,
    GGUF_TYPES,
    STRING,
    VALUE_TYPES,
    entry,
    gguf_bytes,
    gguf_tensor,
    number_array,
    random_blocks,
    safetensors_bytes,
    scalar,
    string_array,
    text_value,
)

SECONDS_LIMIT = 2.0
SMALL_CONSTANT = 4 << 20  # what a parse may take beyond twice the file; sample files are smaller than this
RSS_CONSTANT = 64 << 20  # allocator slack and libraries loaded on the way

INTERESTING = [0, 1, 2, 3, 7, 8, 9, 31, 32, 255, 256, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1]
INTERESTING += [1 << 32, 1 << 40, 1 << 61, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]
JSON_PIECES = [*'{}[],:"', "null", "true", "-1", "1e999", "NaN", "0.5", "18446744073709551616", "1" * 30, "\\u0000"]
JSON_PIECES += ['"dtype"', '"F32"', '"I8"', '"shape"', '"data_offsets"', '"__metadata__"', '"a":{},', "\\ud800", "\xff"]
JSON_PIECES += ['"../x.safetensors"', '"/etc/passwd"', "{" * 50, "[" * 5000]

Folder = dict[str, bytes]
"""A model as files: name -> content."""


def sample_models() -> list[tuple[str, Folder]]:
    """Valid models: (name to open inside the folder, "" for the folder itself; its files)."""
    rng = np.random.default_rng(0)
    pairs = [("general.architecture", text_value("llama")), ("general.alignment", scalar("u32", 32))]
    pairs += [(f"one.{kind}", scalar(kind, 1)) for kind in VALUE_TYPES]
    pairs += [(f"many.{kind}", number_array(kind, [0, 1, 1])) for kind in VALUE_TYPES]
    pairs += [("tokenizer.ggml.tokens", string_array([f"token {i} é" for i in range(50)]))]
    nested = string_array(["a", "b"])[4:] + number_array("i16", [1, 2, 3])[4:]
    pairs += [("nested", struct.pack("<IIQ", ARRAY, ARRAY, 2) + nested)]
    tensors = [gguf_tensor(rng, f"blk.{i}.{name}", name, 2, GGUF_TYPES[name][1]) for i, name in enumerate(GGUF_TYPES)]
    counts = [("split.count", scalar("u16", 2)), ("split.tensors.count", scalar("i32", len(tensors)))]
    first, second = ([("split.no", scalar("u16", number)), *counts] for number in (0, 1))
    data = random_blocks(rng, "F32", 3, 8)
    header = {
        "__metadata__": {"format": "pt"},
        "model.embed.weight": entry("F32", [3, 8], 0, 96),
        "model.layers.0.w": entry("F16", [2, 4], 96, 112),
        "model.layers.0.b": entry("BF16", [], 112, 114),
    }
    config = b'{"model_type": "llama", "rope_parameters": {"rope_theta": 1e4}, "layers": [1, 2]}'
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    planes = plan_file(
        [("w", packed_layout(WeightFormat.I4_G64, 3, 64)), ("b", PlainTensor(WeightFormat.F32, (2,)))],
        {"edge_transformer.names": "gguf"},
    )
    index = {"metadata": {"total_size": 20}, "weight_map": {"a": one, "b": two, "c": two}}
    return [
        ("m.gguf", {"m.gguf": gguf_bytes(pairs, tensors)}),
        ("m.gguf", {"m.gguf": gguf_bytes([], tensors[:3], version=2)}),
        (
            "m-00002-of-00002.gguf",
            {
                "m-00001-of-00002.gguf": gguf_bytes(first + pairs[:4], tensors[:4]),
                "m-00002-of-00002.gguf": gguf_bytes(second, tensors[4:]),
            },
        ),
        ("", {"model.safetensors": safetensors_bytes(header, data + bytes(18)), "config.json": config}),
        (
            "",
            {
                one: safetensors_bytes({"a": entry("F32", [2], 0, 8)}, bytes(8)),
                two: safetensors_bytes({"b": entry("F16", [2], 0, 4), "c": entry("F32", [2], 4, 12)}, bytes(12)),
                "model.safetensors.index.json": json.dumps(index).encode(),
            },
        ),
        (
            "",
            {
                "model.safetensors": planes.header + bytes(planes.nbytes - len(planes.header)),
                "metadata.gguf": gguf_bytes(pairs[:1], []),
            },
        ),
    ]


def bomb_models() -> list[tuple[str, Folder]]:
    """Files that make much out of little: many small things, deep things, long headers."""

    def header(text: bytes, fill: int = 0) -> tuple[str, Folder]:
        return "m.safetensors", {"m.safetensors": safetensors_bytes(text, bytes(fill))}

    def metadata(*pairs: tuple[str, bytes]) -> tuple[str, Folder]:
        return "m.gguf", {"m.gguf": gguf_bytes(pairs)}

    mebibyte = 1 << 20
    many_tensors = ",".join(f'"{i}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for i in range(15_000))
    empty_arrays = struct.pack("<IQ", 0, 0) * 4_096
    entries = (struct.pack("<Q", 5) + b"%05d" % i + struct.pack("<IQIQ", 1, 1, 0, 32 * i) for i in range(MAX_TENSORS))
    many_gguf_tensors = b"GGUF" + struct.pack("<IQQ", 3, MAX_TENSORS, 0) + b"".join(entries) + bytes(32 * MAX_TENSORS)
    return [
        header(b'{"a":[' + b"[]," * (mebibyte // 3 - 10) + b"[]]}"),
        header(b'{"a":[' + b"{}," * (mebibyte // 3 - 10) + b"{}]}"),
        header(b"{" + b",".join(b'"%x":1' % i for i in range(90_000)) + b"}"),
        header(b'{"a":{},' * 100_000),
        header(b"[" * (mebibyte - 1)),
        header(b'{"a":' * (mebibyte // 6)),
        header(f"{{{many_tensors}}}".encode()),
        header(b'{"a":[' + b"[]," * (2 * mebibyte // 3) + b"[]]}", fill=40 * mebibyte),
        metadata(("k", string_array([""] * 1_000_000))),
        metadata(*((f"{i}", scalar("u8", 1)) for i in range(16_384))),
        metadata(("k", struct.pack("<IIQ", ARRAY, ARRAY, 4_096) + empty_arrays)),
        metadata(("k", text_value("a" * (2 * mebibyte) + "🙂"))),
        metadata(*((f"{i}", text_value("a" * 100_000 + "🙂")) for i in range(40))),
        metadata(("k", struct.pack("<IIQ", ARRAY, STRING, 1 << 40) + bytes(mebibyte))),
        ("m.gguf", {"m.gguf": many_gguf_tensors}),
    ]


def mutate(random_source: random.Random, content: bytes) -> bytes:
    """One to four random injuries."""
    data = bytearray(content)
    for _ in range(random_source.randint(1, 4)):
        place = random_source.randrange(len(data) + 1)
        if random_source.random() < 0.5:  # near the start, where counts and lengths are
            place = min(len(data), int(random_source.expovariate(1 / 60)))
        match random_source.randrange(8):
            case 0 if data:
                data[min(place, len(data) - 1)] ^= 1 << random_source.randrange(8)
            case 1:
                data[place : place + 4] = (random_source.choice(INTERESTING) & 0xFFFFFFFF).to_bytes(4, "little")
            case 2:
                data[place : place + 8] = random_source.choice(INTERESTING).to_bytes(8, "little")
            case 3:
                del data[place:]
            case 4:
                del data[place : place + random_source.randint(1, 40)]
            case 5:
                start = random_source.randrange(len(data) + 1)
                data[place:place] = data[start : start + random_source.randint(1, 200)]
            case 6:
                data[place : place + random_source.randint(0, 6)] = random_source.choice(JSON_PIECES).encode("latin-1")
            case _:
                length = random_source.randrange(2 * len(data) + 16)
                data[0:8] = length.to_bytes(8, "little") if data[:4] != b"GGUF" else bytes(data[0:8])
    return bytes(data)


def write_model(folder: Path, files: Folder) -> None:
    for path in folder.iterdir():
        path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def open_and_look(path: Path) -> Callable[[], None]:
    """Open a model and decode its metadata. Returns what reads its small tensors (which takes memory of its own)."""
    checkpoint = open_checkpoint(path)

    def read_tensors() -> None:
        for info in checkpoint.tensors.values():
            if info.nbytes < 65_536:
                read_vector(info)
        checkpoint.close()

    try:
        for value in checkpoint.metadata.values():
            if isinstance(value, StringArray) and len(value):
                assert isinstance(value[len(value) - 1], str)
    except FormatError:
        checkpoint.close()
        raise
    return read_tensors


def check_model(folder: Path, name: str, constant: int = SMALL_CONSTANT) -> bool:
    """Open what lies in `folder`; True when it opened. Raises AssertionError when a limit is broken."""
    size = sum(path.stat().st_size for path in folder.iterdir())
    reset_peak_rss()
    rss_before = peak_rss()
    tracemalloc.start()
    start = time.thread_time()  # time of our own: the machine may be busy with other things
    read_tensors, message = None, str(folder)
    try:
        read_tensors = open_and_look(folder / name)
    except (FormatError, UnsupportedModelError) as error:
        message = str(error)
    finally:
        seconds = time.thread_time() - start
        allocated = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    rss = peak_rss() - rss_before
    assert len(message) < 4096, f"an error message of {len(message)} characters"
    assert str(folder) in message, f"the error does not name the file: {message}"
    assert seconds < SECONDS_LIMIT, f"took {seconds:.1f} s"
    assert allocated <= 2 * size + constant, f"allocated {allocated} bytes for files of {size}"
    # The mapping itself is resident once.
    assert rss <= 3 * size + RSS_CONSTANT, f"resident memory grew by {rss} bytes for files of {size}"
    if read_tensors is not None:
        read_tensors()
    return read_tensors is not None


def reset_peak_rss() -> None:
    """Let the kernel count the peak resident memory of this process anew."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_rss() -> int:
    """Peak resident memory since the last reset, in bytes."""
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def fuzz_once(seed: int, folder: Path, samples: list[tuple[str, Folder]]) -> bool:
    """Injure one file of one sample by `seed` and check it; True when the broken model opened all the same."""
    random_source = random.Random(seed)
    name, files = random_source.choice(samples)
    victim = random_source.choice(sorted(files))
    write_model(folder, files | {victim: mutate(random_source, files[victim])})
    try:
        return check_model(folder, name)
    except BaseException as error:
        error.add_note(f"seed {seed}, pid {os.getpid()}, file {victim} in {folder}")
        raise
