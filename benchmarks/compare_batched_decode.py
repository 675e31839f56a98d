"""Decode of several requests at once, llama.cpp and the server's scheduler side by side on one GGUF file.

    python benchmarks/compare_batched_decode.py --peer-python PEER/bin/python [MODEL.gguf] [--streams 8] [--threads 1 2]

PEER is an environment with `llama-cpp-python` (benchmarks/README.md). llama.cpp decodes as its server does: one
llama_decode with a token of every sequence, at each of its settings (flash attention off and on, KV cache split or
unified); the best counts. Ours goes through the scheduler of `ete serve`. Every measurement is a fresh process, the
sides alternate. Tokens per second are of all requests together, greedy, prompts of 64 tokens; tokens per second of
processor time say the same where other work shares the machine (one thread: with more, waiting counts too).
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PROMPT_TOKENS = 64
CONTEXT = 256
PEERS = {
    f"llama.cpp{', flash attention' * flash}{', unified KV' * unified}": {"flash_attention": flash, "unified": unified}
    for flash in (False, True)
    for unified in (False, True)
}
OURS = "edge-transformer"


def main() -> None:
    arguments = parse_arguments()
    if arguments.worker:
        print(json.dumps(measure_ours(json.loads(arguments.worker))))
        return
    from compare_llama_cpp import demo_model

    model = arguments.model or demo_model()
    rates: dict[tuple[str, int], list[tuple[float, float]]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for threads in arguments.threads:
            for side in (*PEERS, OURS):
                rates[side, threads].append(measure(side, model, threads, arguments))
    for threads in arguments.threads:
        print(f"{model.name}, {arguments.streams} at once, {threads} threads, {arguments.rounds} rounds: median (best)")
        for side in (*PEERS, OURS):
            cells = [
                f"{statistics.median(values):.1f} ({max(values):.1f})"
                for values in zip(*rates[side, threads], strict=True)
            ]
            print(f"  {side:42s} {cells[0]} tok/s, {cells[1]} per second of processor time")
        for index, what in enumerate(("wall", "processor time")):
            ours, *peers = (statistics.median(pair[index] for pair in rates[side, threads]) for side in (OURS, *PEERS))
            print(f"  {what}: {ours / max(peers):.2f} x the best of llama.cpp")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="a .gguf file; the demo model without one")
    parser.add_argument("--peer-python", help="interpreter that has llama-cpp-python")
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not arguments.worker and not arguments.peer_python:
        parser.error("--peer-python is needed")
    return arguments


def measure(side: str, model: Path, threads: int, arguments: argparse.Namespace) -> tuple[float, float]:
    """Tokens per second and per second of processor time, in a fresh process."""
    draw = random.Random(1)
    prompts = [[draw.randrange(1000, 40000) for _ in range(PROMPT_TOKENS)] for _ in range(arguments.streams)]
    task = {"model": str(model), "threads": threads, "tokens": arguments.tokens, "context": CONTEXT, "prompts": prompts}
    if side == OURS:
        command = [sys.executable, str(FOLDER / "compare_batched_decode.py"), "--worker", json.dumps(task)]
    else:
        worker = str(FOLDER / "worker_llama_cpp_batched.py")
        command = [arguments.peer_python, worker, json.dumps(task | PEERS[side])]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    result = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment).stdout)
    tokens = result.get("tokens", arguments.streams * arguments.tokens)
    return tokens / result["seconds"], tokens / result["cpu_seconds"]


def measure_ours(task: dict[str, Any]) -> dict[str, float]:
    """From the time at which every request has its first token until one ends."""
    from server_concurrency import Heard, open_on_cpu

    from edge_transformer import GenerationConfig
    from edge_transformer.engine.request import Request

    prompts = task["prompts"]
    with open_on_cpu(task["model"], task["threads"], len(prompts), 256) as opened:
        config = GenerationConfig(max_tokens=task["tokens"] + 8, ignore_eos=True)
        heard = [Heard() for _ in prompts]
        for prompt, listener in zip(prompts, heard, strict=True):
            opened.scheduler.submit(Request(prompt, config, [0], listener))
        for listener in heard:
            listener.wait(listener.first)
        begun, cpu, had = time.perf_counter(), time.process_time(), sum(len(listener.times) for listener in heard)
        heard[0].wait(heard[0].done)
        seconds, cpu_seconds = time.perf_counter() - begun, time.process_time() - cpu
        tokens = sum(len(listener.times) for listener in heard) - had
    return {"seconds": seconds, "cpu_seconds": cpu_seconds, "tokens": float(tokens)}


if __name__ == "__main__":
    main()
