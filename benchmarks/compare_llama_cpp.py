"""llama.cpp and this engine side by side on one GGUF file: same file, same threads, interleaved rounds.

    python benchmarks/compare_llama_cpp.py --peer-python PEER/bin/python [MODEL.gguf]

PEER is an environment with `llama-cpp-python` (benchmarks/README.md says how to build it); this script runs in the
environment of the engine. Every measurement is a fresh process, the page cache is warm, and the sides alternate. Each
cell is the median over the rounds with the best in brackets; `ratio` is ours over the better of llama.cpp's two
medians (flash attention off and on), and `asked` is what the project holds itself to.

Measured: decode of 96 tokens after a 16-token prompt; prefill of 512 tokens with logits for the last; time from the
start of the process to the first token of the 16-token prompt at context 2048; peak resident memory with mapped
pages, up to that first token and up to the end of prefill and decode.
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
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
PREFILL_TOKENS = 512
DECODE_TOKENS = 96
CONTEXT = 2048


@dataclass(frozen=True)
class Side:
    name: str
    command: tuple[str, ...]
    flash_attention: bool = False


@dataclass(frozen=True)
class Measure:
    title: str
    key: str
    unit: str
    asked: str
    higher_is_better: bool


MEASURES = (
    Measure(f"decode, {DECODE_TOKENS} tokens", "decode", "tok/s", ">= 1.2 x", True),
    Measure(f"prefill, {PREFILL_TOKENS} tokens", "prefill", "tok/s", ">= 1.5 x", True),
    Measure("process start to first token", "first", "s", "<= 1.0 x", False),
    Measure("peak memory at first token", "first_peak", "MiB", "<= 1.2 x", False),
    Measure("peak memory after decode", "peak", "MiB", "<= 1.2 x", False),
)


def main() -> None:
    arguments = parse_arguments()
    model = arguments.model or demo_model()
    ours = Side("edge-transformer", (sys.executable, str(FOLDER / "worker_edge_transformer.py")))
    peer_command = (arguments.peer_python, str(FOLDER / "worker_llama_cpp.py"))
    peers = (Side("llama.cpp", peer_command), Side("llama.cpp flash attention", peer_command, flash_attention=True))
    sides = (*peers, *(() if arguments.peer_only else (ours,)))

    figures: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    for _ in range(arguments.rounds):
        for threads in arguments.threads:
            for full in (True, False):
                for side in sides:
                    for key, value in measure(side, model, threads, full).items():
                        figures[side.name, threads, key].append(value)

    print(f"{model.name}, {arguments.rounds} rounds, median (best)\n")
    for row in table(figures, [side.name for side in peers], ours.name, arguments.threads):
        print(row)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?", help="a .gguf file; the demo model without one")
    parser.add_argument("--peer-python", required=True, help="interpreter that has llama-cpp-python")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer-only", action="store_true", help="measure llama.cpp alone")
    return parser.parse_args()


def demo_model() -> Path:
    sys.path.insert(0, str(FOLDER.parent / "tests"))
    from paths import smollm2_path

    return smollm2_path()


def measure(side: Side, model: Path, threads: int, full: bool) -> dict[str, float]:
    """One fresh process. `full` also runs prefill and decode; without it the process ends at its first token."""
    ids = random.Random(1)
    task = {
        "model": str(model),
        "threads": threads,
        "context": CONTEXT,
        "flash_attention": side.flash_attention,
        "short": [ids.randrange(1000, 40000) for _ in range(16)],
        "long": [ids.randrange(1000, 40000) for _ in range(PREFILL_TOKENS)],
        "decode_tokens": DECODE_TOKENS,
        "full": full,
    }
    # Installed packages have their bytecode on disk; an editable install has it after the first run, unless forbidden.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    command = [*side.command, json.dumps(task)]
    start = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True, env=environment)
    result = json.loads(done.stdout)
    if full:
        return {
            "decode": DECODE_TOKENS / result["decode_s"],
            "prefill": PREFILL_TOKENS / result["prefill_s"],
            "peak": result["peak_bytes"] / 2**20,
        }
    return {"first": result["first_token_at"] - start, "first_peak": result["first_peak_bytes"] / 2**20}


def table(
    figures: dict[tuple[str, int, str], list[float]], peers: list[str], ours: str, thread_counts: list[int]
) -> list[str]:
    columns = ["measure", "threads", *peers, ours, "ratio", "asked"]
    rows = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for item in MEASURES:
        for threads in thread_counts:
            cells = [cell(figures.get((side, threads, item.key)), item) for side in [*peers, ours]]
            best_peer = [statistics.median(figures[side, threads, item.key]) for side in peers]
            peer = max(best_peer) if item.higher_is_better else min(best_peer)
            mine = figures.get((ours, threads, item.key))
            ratio = f"{statistics.median(mine) / peer:.2f} x" if mine else "-"
            rows.append(f"| {item.title} ({item.unit}) | {threads} | " + " | ".join([*cells, ratio, item.asked]) + " |")
    return rows


def cell(values: list[float] | None, item: Measure) -> str:
    if not values:
        return "-"
    best = max(values) if item.higher_is_better else min(values)
    digits = 3 if item.unit == "s" else 1 if item.unit == "tok/s" else 0
    return f"{statistics.median(values):.{digits}f} ({best:.{digits}f})"


if __name__ == "__main__":
    main()
