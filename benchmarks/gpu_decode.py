"""Decode and prefill of a model on a GPU, for each way to place it: python benchmarks/gpu_decode.py SHAPE [MODE ...]

SHAPE: "1b" (24 layers, hidden 1536, ff 4608, 12 heads, 2 KV heads of 128, vocabulary 130 560, bf16: 1.04 B parameters)
or "8b" (Llama 3 8B in bf16). Weights are random: one block of numbers, repeated. MODE: resident, streamed, offload,
least (streamed and offloaded, lm_head on the CPU). Printed beside the bus: bytes a token moves over it, over its
measured rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.cuda.driver import CudaGpu
from edge_transformer.engine.core import Chunk, Engine
from edge_transformer.engine.gpu import GpuOptions, open_gpu_engine
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.models.read import read_model
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Plan, Wishes

SHAPES = {
    "1b": {"hidden_size": 1536, "intermediate_size": 4608, "num_hidden_layers": 24, "num_attention_heads": 12,
           "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 130560},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128256},
}  # fmt: skip
BUDGET = 100 << 30
MODES = {
    "resident": Wishes(BUDGET, resident_layers=-1, kv_offload=False, head=HeadPlace.GPU),
    "streamed": Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=False, head=HeadPlace.GPU),
    "offload": Wishes(BUDGET, resident_layers=-1, kv_offload=True, head=HeadPlace.GPU),
    "bus": Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.STREAMED),
    "least": Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.CPU),
}


def write_model(folder: Path, shape: dict[str, int]) -> Path:
    """A folder with config.json and random bf16 weights, data from byte 4096 on."""
    hidden, inner, vocabulary = shape["hidden_size"], shape["intermediate_size"], shape["vocab_size"]
    query, key = (shape[name] * shape["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(shape["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        tensors |= {
            f"{prefix}input_layernorm.weight": (hidden,),
            f"{prefix}self_attn.q_proj.weight": (query, hidden),
            f"{prefix}self_attn.k_proj.weight": (key, hidden),
            f"{prefix}self_attn.v_proj.weight": (key, hidden),
            f"{prefix}self_attn.o_proj.weight": (hidden, query),
            f"{prefix}post_attention_layernorm.weight": (hidden,),
            f"{prefix}mlp.gate_proj.weight": (inner, hidden),
            f"{prefix}mlp.up_proj.weight": (inner, hidden),
            f"{prefix}mlp.down_proj.weight": (hidden, inner),
        }
    tensors |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    header, offset = {}, 0
    for name, dims in tensors.items():
        nbytes = int(np.prod(dims)) * 2
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 4096)
    scale = 0.7 / np.sqrt(hidden)
    numbers = (np.random.default_rng(0).standard_normal(8 << 20) * scale).astype(np.float32)
    block = numbers.view(np.uint32) >> 16
    data = block.astype(np.uint16).tobytes()
    ones = np.full(hidden, 0x3F80, np.uint16).tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dims in tensors.values():
            left = int(np.prod(dims)) * 2
            if len(dims) == 1:
                file.write(ones)
                continue
            while left:
                file.write(data[: min(left, len(data))])
                left -= min(left, len(data))
    config = shape | {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def bus_rate(gpu: CudaGpu) -> float:
    """Bytes per second from page-locked host memory."""
    nbytes = 256 << 20
    host, device, stream = gpu.allocate_host(nbytes, "host"), gpu.allocate(nbytes, "device"), gpu.stream("bus")
    start, end = gpu.event(timing=True), gpu.event(timing=True)
    for _ in range(2):
        gpu.record(start, stream)
        for _ in range(4):
            gpu.copy(device.address, host.address, nbytes, stream)
        gpu.record(end, stream)
        gpu.synchronize(stream)
    rate = 4 * nbytes / end.elapsed_ms(start) * 1e3
    host.close()
    device.close()
    return rate


def measure(engine: Engine, tokens: int, prompt: int) -> tuple[float, float]:
    """(prefill tokens per second, decode tokens per second) at a depth of `prompt` tokens."""
    ids = np.random.default_rng(2).integers(0, engine.config.vocab_size, prompt).tolist()
    warm = engine.new_sequence()
    engine.prefill(warm, ids[:600])
    warm.close()
    sequence = engine.new_sequence()
    started = time.perf_counter()
    engine.prefill(sequence, ids)
    prefill = prompt / (time.perf_counter() - started)
    times = []
    for token in ids[: tokens + 3]:
        started = time.perf_counter()
        result = engine.step([Chunk(sequence, [token], "decode", "last")])
        assert result is not None
        result.logits()
        times.append(time.perf_counter() - started)
    sequence.close()
    return prefill, 1 / statistics.median(times[3:])


def report(mode: str, plan: Plan, engine: Engine, head_bytes: int, bus: float, depth: int, tokens: int) -> None:
    prefill, decode = measure(engine, tokens, depth)
    per_token = plan.streamed_bytes
    if plan.kv == "host":
        per_token += depth * sum(layer.tile_bytes // 512 for layer in engine.state_shape.layers)
    line = (
        f"{mode:9} arena {plan.arena_bytes / 2**20:8.1f} MiB  prefill {prefill:8.0f} tok/s  decode {decode:7.2f} tok/s"
    )
    if per_token:
        limit = bus / per_token
        line += f"  {per_token / 2**20:.0f} MiB a token over the bus: at most {limit:.2f} tok/s, {decode / limit:.0%}"
    if plan.head == "cpu":
        line += f"  lm_head {head_bytes / 2**20:.0f} MiB on the CPU"
    print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("modes", nargs="*", metavar="MODE", help=", ".join(MODES))
    parser.add_argument("--depth", type=int, default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--threads", type=int, default=16)
    parser.add_argument("--plain", action="store_true", help="the path of cards without tensor cores")
    parser.add_argument("--fast-prefill", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        path = write_model(Path(folder) / arguments.shape, SHAPES[arguments.shape])
        for mode in arguments.modes or MODES:
            checkpoint = open_checkpoint(path)
            spec = read_model(checkpoint)
            gpu = CudaGpu(forced_capability=(7, 5) if arguments.plain else None)
            bus = bus_rate(gpu)
            weights = HostWeights(checkpoint, spec, arguments.threads)
            options = GpuOptions(MODES[mode], arguments.depth + 1024, fast_prefill=arguments.fast_prefill)
            engine, plan = open_gpu_engine(
                gpu, checkpoint, spec, weights, CpuBackend(arguments.threads), DType.BF16, options
            )
            report(mode, plan, engine, weights.head.layout.nbytes, bus, arguments.depth, arguments.tokens)
            engine.close()
            checkpoint.close()
        print(f"bus {bus / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
