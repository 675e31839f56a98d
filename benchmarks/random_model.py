"""A model of a true shape with random weights, in seconds: python benchmarks/random_model.py SHAPE FORMAT PATH

SHAPE: "1b" (1.04 B parameters: 24 layers of 1536, feed-forward 4608, 12 heads and 2 KV heads of 128, vocabulary
130 560), "8b" (Llama 3 8B), "qwen35-9b" (Qwen3.5-9B, text), and two for tests. FORMAT: "hf" (a folder with config.json
and model.safetensors in bf16); "int8", "int8-row" or "int4" (a folder as `ete quantize` makes it, int4 in groups of
64); or a GGUF file in BF16, F16, Q8_0, Q4_0, with Q4_0 the output projection in Q6_K, as llama.cpp's quantizer leaves
it. A GGUF file has no vocabulary, which llama.cpp's llama-bench needs none of, so both engines open the same file.

One block of numbers is repeated, each tensor starting elsewhere in it. Its numbers are scaled so that activations of a
real model's size come out. Time and speed do not depend on what the numbers are. Models of one shape in different
formats have nothing but the shape in common: `ete quantize` makes models to compare.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from random_numbers import Bytes, bf16, blocks_of, deviation, plane_of, vector_of
from random_shapes import SHAPES, Shape, huggingface_config, write_gguf_keys

from edge_transformer.engine.quantize_plan import Quantization, plan_quantization
from edge_transformer.formats.checkpoint import TensorInfo
from edge_transformer.formats.file_names import SINGLE_FILE
from edge_transformer.formats.planes_file import LAYOUT_VERSION, QUANTIZATION_METHOD
from edge_transformer.formats.weight import FORMATS, WeightFormat, WeightLayout, round_up
from edge_transformer.models.config import TensorSpec
from edge_transformer.models.names import tensor_specs

PIECE_BYTES = 16 << 20
GGUF_FORMATS = ("BF16", "F16", "Q8_0", "Q4_0")
QUANTIZATIONS = {
    "int8": Quantization("int8"),
    "int8-row": Quantization("int8-row"),
    "int4": Quantization("int4", 64),
}
FOLDERS = ("hf", *QUANTIZATIONS)
FORMATS_OF_FILES = (*FOLDERS, *GGUF_FORMATS)

_blocks = cache(blocks_of)
_plane = cache(plane_of)


@dataclass(frozen=True, slots=True)
class Part:
    """`nbytes` bytes of a file from byte `offset` on: those of `data` from `start` on, and round again."""

    offset: int
    nbytes: int
    data: Bytes
    start: int = 0


def write_model(path: Path, shape: str, file_format: str, threads: int = os.cpu_count() or 1) -> Path:
    """The model at `path`: a folder or a GGUF file. What was there is replaced when the new one is complete.

    Raises OSError when the file system has no room for it.
    """
    partial = path.with_name(path.name + ".partial")
    partial.parent.mkdir(parents=True, exist_ok=True)
    if file_format in FOLDERS:
        partial.mkdir(exist_ok=True)
    if file_format == "hf":
        _write_safetensors(partial, SHAPES[shape], threads)
    elif file_format in QUANTIZATIONS:
        _write_planes(partial, SHAPES[shape], QUANTIZATIONS[file_format], threads)
    else:
        _write_gguf(partial, SHAPES[shape], WeightFormat(file_format), threads)
    partial.rename(path)
    return path


def model_name(shape: str, file_format: str) -> str:
    """How a model's folder or file may be called."""
    return f"{shape}-{file_format.lower()}" + ("" if file_format in FOLDERS else ".gguf")


def tensor_bytes(weight_format: WeightFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a file."""
    spec = FORMATS[weight_format]
    return int(np.prod(shape)) // spec.block_cols * spec.file_block_bytes


def _write_safetensors(folder: Path, shape: Shape, threads: int) -> None:
    tensors = list(enumerate(tensor_specs(shape.hf_spec())))
    tensors.sort(key=lambda item: item[1].name)  # as files are: by name, not in order of use
    header: dict[str, object] = {}
    offset = 0
    parts = []
    for index, tensor in tensors:
        part = _file_part(tensor, index, WeightFormat.BF16, WeightFormat.BF16, offset)
        offsets = [offset, offset + part.nbytes]
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": offsets}
        parts.append(part)
        offset += part.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = folder / SINGLE_FILE
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    _fill(file, len(text) + 8, parts, threads)
    (folder / "config.json").write_text(json.dumps(huggingface_config(shape)))


def _write_gguf(file: Path, shape: Shape, weight_format: WeightFormat, threads: int) -> None:
    writer = GGUFWriter(None, shape.gguf.architecture)
    write_gguf_keys(writer, shape)
    parts = []
    offset = 0
    for index, tensor in enumerate(tensor_specs(shape.gguf_spec())):
        wider = weight_format is WeightFormat.Q4_0 and tensor.role == "head"
        part_format = WeightFormat.Q6_K if wider else weight_format
        part = _file_part(tensor, index, part_format, WeightFormat.F32, offset)
        raw = GGMLQuantizationType[(part_format if _is_matrix(tensor) else WeightFormat.F32).name]
        writer.add_tensor_info(tensor.name, tensor.shape, np.dtype(np.float32), part.nbytes, raw)
        parts.append(part)
        offset += round_up(part.nbytes, writer.data_alignment)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    _fill(file, round_up(file.stat().st_size, writer.data_alignment), parts, threads, writer.data_alignment)


def _write_planes(folder: Path, shape: Shape, choice: Quantization, threads: int) -> None:
    """What `ete quantize` would make of the "hf" folder, but for the numbers."""
    spec = shape.hf_spec()
    specs = {tensor.name: (index, tensor) for index, tensor in enumerate(tensor_specs(spec))}
    infos = {
        name: TensorInfo(
            name, tensor.shape, WeightFormat.BF16, SimpleNamespace(), 0, tensor_bytes(WeightFormat.BF16, tensor.shape)
        )
        for name, (_, tensor) in sorted(specs.items())
    }
    plan = plan_quantization(SimpleNamespace(container="safetensors", path=folder, tensors=infos), spec, choice)
    parts = []
    for item in plan.items:
        index, tensor = specs[item.info.name]
        offset = plan.file.offsets[tensor.name]
        if not isinstance(item.result, WeightLayout):
            parts.append(_plain_part(tensor, index, offset))
            continue
        layout = item.result
        for plane, plane_spec in zip(layout.planes, FORMATS[layout.format].planes, strict=True):
            data = _plane(layout.format, plane_spec.name, deviation(tensor))
            parts.append(Part(offset + plane.offset, layout.rows * plane.row_pitch, data, _start(index, 16, data)))
    file = folder / SINGLE_FILE
    file.write_bytes(plan.file.header)
    _fill(file, 0, parts, threads)
    if file.stat().st_size < plan.file.nbytes:  # padding at the end
        os.truncate(file, plan.file.nbytes)
    settings = {"quant_method": QUANTIZATION_METHOD, "layout_version": LAYOUT_VERSION, **choice.settings()}
    (folder / "config.json").write_text(json.dumps(huggingface_config(shape) | {"quantization_config": settings}))


def _is_matrix(tensor: TensorSpec) -> bool:
    return len(tensor.shape) == 2 and tensor.role != "conv"


def _file_part(
    tensor: TensorSpec, index: int, matrix_format: WeightFormat, vector_format: WeightFormat, offset: int
) -> Part:
    """A tensor as a container stores it; vectors in F32 or BF16."""
    if not _is_matrix(tensor):
        values = vector_of(tensor, index)
        data = bf16(values) if vector_format is WeightFormat.BF16 else values.reshape(-1).view(np.uint8)
        return Part(offset, data.nbytes, data)
    data = _blocks(matrix_format, deviation(tensor))
    start = _start(index, FORMATS[matrix_format].file_block_bytes, data)
    return Part(offset, tensor_bytes(matrix_format, tensor.shape), data, start)


def _plain_part(tensor: TensorSpec, index: int, offset: int) -> Part:
    """A tensor in F32."""
    if not _is_matrix(tensor):
        return _file_part(tensor, index, WeightFormat.F32, WeightFormat.F32, offset)
    values = np.random.default_rng(index).standard_normal(tensor.shape, np.float32) * np.float32(deviation(tensor))
    data = values.reshape(-1).view(np.uint8)
    return Part(offset, data.nbytes, data)


def _start(index: int, block_bytes: int, data: Bytes) -> int:
    """Where tensor number `index` begins in the block."""
    return index * 7919 * block_bytes % len(data)


def _fill(file: Path, begin: int, parts: list[Part], threads: int, alignment: int = 1) -> None:
    """Write the parts into the file, their offsets counted from `begin`; its end is a multiple of `alignment` away."""
    end = begin + round_up(max(part.offset + part.nbytes for part in parts), alignment)
    room = os.statvfs(file.parent)
    if end > room.f_bavail * room.f_frsize:
        raise OSError(f"{file.parent} has {room.f_bavail * room.f_frsize} bytes left; {end} are needed")
    os.truncate(file, end)
    target = np.memmap(file, np.uint8, "r+")

    def fill(piece: tuple[Part, int]) -> None:
        part, done = piece
        position, left = begin + part.offset + done, min(PIECE_BYTES, part.nbytes - done)
        while left:
            source = (part.start + done) % len(part.data)
            count = min(left, len(part.data) - source)
            target[position : position + count] = part.data[source : source + count]
            position, left, done = position + count, left - count, done + count

    pieces = [(part, done) for part in parts for done in range(0, part.nbytes, PIECE_BYTES)]
    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(fill, pieces):
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("format", choices=FORMATS_OF_FILES)
    parser.add_argument("path", type=Path)
    arguments = parser.parse_args()
    started = time.perf_counter()
    write_model(arguments.path, arguments.shape, arguments.format)
    nbytes = sum(file.stat().st_size for file in [arguments.path, *arguments.path.glob("*")] if file.is_file())
    print(f"{arguments.path}: {nbytes} bytes in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
