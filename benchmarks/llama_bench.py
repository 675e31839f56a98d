"""llama.cpp's llama-bench beside this engine: run on the same file, its JSON read."""

from __future__ import annotations

import json
import statistics
import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PeerResult:
    """One test of llama-bench. rate: tokens per second, the median of its samples."""

    rate: float
    prompt: int
    generated: int
    depth: int
    flash_attention: bool
    options: str


def peer_rate(bench: Path, model: Path, *options: str, timeout: float = 300) -> PeerResult:
    """The best test of a call with these options, flash attention off and on unless they say.

    Raises RuntimeError with the end of what llama-bench printed when it fails or tests nothing.
    """
    command = [str(bench), "-m", str(model), *options, "-o", "json"]
    if "-fa" not in options:
        command += ["-fa", "0,1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    results = parse(done.stdout)
    if done.returncode or not results:
        raise RuntimeError(f"llama-bench ended with {done.returncode}: {(done.stderr or done.stdout)[-600:]}")
    return max(results, key=lambda result: result.rate)


def parse(text: str) -> list[PeerResult]:
    """All tests of llama-bench's `-o json`. An array that was cut off (a call that was ended) gives none."""
    try:
        tests = json.loads(text)
    except ValueError:
        return []
    return [
        PeerResult(
            rate=statistics.median(test["samples_ts"]),
            prompt=test["n_prompt"],
            generated=test["n_gen"],
            depth=test["n_depth"],
            # -1 is auto, which takes it where the GPU can.
            flash_attention=int(test["flash_attn"]) != 0,
            options=f"-ngl {test['n_gpu_layers']}, fa {int(test['flash_attn'])}, load {test.get('load_mode', 'mmap')}",
        )
        for test in tests
    ]
