"""A model of a true shape with random weights, in seconds: python benchmarks/random_model.py SHAPE FORMAT PATH

SHAPE: "1b" (1.04 B parameters: 24 layers of 1536, feed-forward 4608, 12 heads and 2 KV heads of 128, vocabulary
130 560), "8b" (Llama 3 8B), "tiny" (for tests). FORMAT: "hf" (a folder with config.json and model.safetensors in bf16),
or a GGUF file in BF16, F16, Q8_0, Q4_0; with Q4_0 the output projection is Q6_K, as llama.cpp's quantizer leaves it. A
GGUF file has no vocabulary, which llama.cpp's llama-bench needs none of, so both engines open the same file.

One block of numbers is repeated, each tensor starting elsewhere in it. Its numbers are scaled so that activations of a
real model's size come out. Time and speed do not depend on what the numbers are.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

from edge_transformer.formats.weight import FORMATS, WeightFormat, round_up
from edge_transformer.models.config import ModelConfig, Rope, TensorSpec
from edge_transformer.models.names import GGUF_NAMES, HF_NAMES, NameTable, model_spec, tensor_specs

CONTEXT = 131072
ROPE_THETA = 500000.0
NORM_EPS = 1e-5
BLOCK_BYTES = 16 << 20
PIECE_BYTES = 16 << 20
GAIN = 0.7
GGUF_FORMATS = ("BF16", "F16", "Q8_0", "Q4_0")
FORMATS_OF_FILES = ("hf", *GGUF_FORMATS)


def llama(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocabulary: int) -> ModelConfig:
    """A Llama with untied embeddings."""
    head_dim = 128
    return ModelConfig(
        family="llama",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=inner,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=NORM_EPS,
        activation="silu",
        attention_scale=head_dim**-0.5,
        context_length=CONTEXT,
        ropes=(Rope("default", ROPE_THETA, head_dim),),
        layer_kinds=("attention",) * layers,
        layer_windows=(None,) * layers,
        layer_ropes=(0,) * layers,
    )


SHAPES: dict[str, ModelConfig] = {
    "1b": llama(24, 1536, 4608, 12, 2, 130560),
    "8b": llama(32, 4096, 14336, 32, 8, 128256),
    "tiny": llama(3, 256, 512, 2, 1, 1000),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the file: its bytes are `data`, from byte `start` of it on and round again."""

    name: str
    shape: tuple[int, ...]
    format: WeightFormat
    data: npt.NDArray[np.uint8]
    start: int

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.format, self.shape)


def write_model(path: Path, shape: str, file_format: str, threads: int = os.cpu_count() or 1) -> Path:
    """The model at `path`: a folder ("hf") or a file. What was there is replaced when the new one is complete.

    Raises OSError when the file system has no room for it.
    """
    config = SHAPES[shape]
    partial = path.with_name(path.name + ".partial")
    if file_format == "hf":
        partial.mkdir(parents=True, exist_ok=True)
        _write_safetensors(partial / "model.safetensors", config, threads)
        (partial / "config.json").write_text(json.dumps(_huggingface_config(config)))
    else:
        partial.parent.mkdir(parents=True, exist_ok=True)
        _write_gguf(partial, config, WeightFormat(file_format), threads)
    partial.rename(path)
    return path


def tensor_bytes(weight_format: WeightFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a tensor in a file."""
    spec = FORMATS[weight_format]
    return int(np.prod(shape)) // spec.block_cols * spec.file_block_bytes


def blocks_of(weight_format: WeightFormat, deviation: float, nbytes: int = BLOCK_BYTES) -> npt.NDArray[np.uint8]:
    """About `nbytes` bytes of whole blocks whose values have this standard deviation and mean 0."""
    spec = FORMATS[weight_format]
    count = max(1, nbytes // spec.file_block_bytes)
    return _BLOCKS[weight_format](np.random.default_rng(0), count, deviation).reshape(-1).view(np.uint8)


# ---- the numbers of each format; GGUF's block layouts


def _bf16(rng: np.random.Generator, count: int, deviation: float) -> npt.NDArray[np.uint8]:
    values = (rng.standard_normal(count, np.float32) * np.float32(deviation)).view(np.uint32)
    return (values >> 16).astype(np.uint16).view(np.uint8)


def _f16(rng: np.random.Generator, count: int, deviation: float) -> npt.NDArray[np.uint8]:
    return (rng.standard_normal(count, np.float32) * np.float32(deviation)).astype(np.float16).view(np.uint8)


def _q8_0(rng: np.random.Generator, count: int, deviation: float) -> npt.NDArray[np.uint8]:
    codes = np.clip(np.rint(rng.standard_normal((count, 32), np.float32) * 42), -127, 127).astype(np.int8)
    return np.hstack([_half(rng, count, deviation / 42), codes.view(np.uint8)])


def _q4_0(rng: np.random.Generator, count: int, deviation: float) -> npt.NDArray[np.uint8]:
    codes = np.clip(np.rint(rng.standard_normal((count, 32), np.float32) * 2.7 + 8), 0, 15).astype(np.uint8)
    return np.hstack([_half(rng, count, deviation / 2.7), codes[:, :16] | codes[:, 16:] << 4])


def _q6_k(rng: np.random.Generator, count: int, deviation: float) -> npt.NDArray[np.uint8]:
    bits = rng.integers(0, 256, (count, 192), np.uint8)  # all codes alike: 32 +- 18.5
    scales = rng.integers(6, 11, (count, 16), np.int8).view(np.uint8)
    return np.hstack([bits, scales, _half(rng, count, deviation / (18.5 * 8))])


def _half(rng: np.random.Generator, count: int, size: float) -> npt.NDArray[np.uint8]:
    """Scales, uint8 [count, 2]: f16, from 0.8 to 1.2 times `size`."""
    return (rng.uniform(0.8, 1.2, (count, 1)) * size).astype(np.float16).view(np.uint8)


_BLOCKS: dict[WeightFormat, Callable[[np.random.Generator, int, float], npt.NDArray[np.uint8]]] = {
    WeightFormat.BF16: _bf16,
    WeightFormat.F16: _f16,
    WeightFormat.Q8_0: _q8_0,
    WeightFormat.Q4_0: _q4_0,
    WeightFormat.Q6_K: _q6_k,
}


# ---- files


def _parts(
    config: ModelConfig,
    table: NameTable,
    vector_format: WeightFormat,
    format_of: Callable[[TensorSpec], WeightFormat],
) -> list[Part]:
    """All tensors in order of use: norms are 1, matrices random."""
    known: dict[tuple[WeightFormat, int], npt.NDArray[np.uint8]] = {}
    one = np.array([1.0], np.float32).view(np.uint8)
    ones = np.tile(one[2:] if vector_format is WeightFormat.BF16 else one, 4096)
    parts = []
    for index, tensor in enumerate(tensor_specs(model_spec(config, table))):
        if len(tensor.shape) == 1:
            parts.append(Part(tensor.name, tensor.shape, vector_format, ones, 0))
            continue
        weight_format, cols = format_of(tensor), tensor.shape[-1]
        key = (weight_format, cols)
        if key not in known:
            known[key] = blocks_of(weight_format, GAIN / cols**0.5)
        block_bytes = FORMATS[weight_format].file_block_bytes
        start = index * 7919 * block_bytes % len(known[key])
        parts.append(Part(tensor.name, tensor.shape, weight_format, known[key], start))
    return parts


def _write_safetensors(file: Path, config: ModelConfig, threads: int) -> None:
    parts = _parts(config, HF_NAMES, WeightFormat.BF16, lambda _: WeightFormat.BF16)
    parts.sort(key=lambda part: part.name)  # as files are: by name, not in order of use
    header: dict[str, object] = {}
    offset = 0
    for part in parts:
        header[part.name] = {
            "dtype": "BF16",
            "shape": part.shape,
            "data_offsets": [offset, offset + part.nbytes],
        }
        offset += part.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file.write_bytes(len(text).to_bytes(8, "little") + text)
    _append(file, parts, 1, threads)


def _huggingface_config(config: ModelConfig) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context_length,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.ropes[0].theta,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }


def _write_gguf(file: Path, config: ModelConfig, weight_format: WeightFormat, threads: int) -> None:
    def format_of(tensor: TensorSpec) -> WeightFormat:
        return WeightFormat.Q6_K if weight_format is WeightFormat.Q4_0 and tensor.role == "head" else weight_format

    parts = _parts(config, GGUF_NAMES, WeightFormat.F32, format_of)
    writer = GGUFWriter(None, "llama")
    writer.add_name("random")
    writer.add_context_length(config.context_length)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.ropes[0].theta)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    for part in parts:
        raw = GGMLQuantizationType[part.format.name]
        writer.add_tensor_info(part.name, part.shape, np.dtype(np.float32), part.nbytes, raw)
    writer.write_header_to_file(file)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    _append(file, parts, writer.data_alignment, threads)


def _append(file: Path, parts: list[Part], alignment: int, threads: int) -> None:
    """The data of all tensors after what the file holds, each at a multiple of `alignment` from there on."""
    begin = round_up(file.stat().st_size, alignment)
    pieces: list[tuple[int, int, Part, int]] = []  # offset in the file, bytes, tensor, offset in the tensor
    offset = begin
    for part in parts:
        for done in range(0, part.nbytes, PIECE_BYTES):
            pieces.append((offset + done, min(PIECE_BYTES, part.nbytes - done), part, done))
        offset += round_up(part.nbytes, alignment)
    room = os.statvfs(file.parent)
    if offset > room.f_bavail * room.f_frsize:
        raise OSError(f"{file.parent} has {room.f_bavail * room.f_frsize} bytes left; {offset} are needed")
    os.truncate(file, offset)
    target = np.memmap(file, np.uint8, "r+")

    def fill(piece: tuple[int, int, Part, int]) -> None:
        position, left, part, done = piece
        while left:
            source = (part.start + done) % len(part.data)
            count = min(left, len(part.data) - source)
            target[position : position + count] = part.data[source : source + count]
            position, left, done = position + count, left - count, done + count

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
