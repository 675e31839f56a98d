"""Stages of gpu_figures.py that run scripts of their own and keep what these say."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from figures import Figure, at_most, stated
from gpu_session import Session, Stage

REPOSITORY = Path(__file__).resolve().parents[1]
FAULTY = 9
"""Status with which compute-sanitizer ends when it has found something."""

ERRORS_SEEN = {
    4096: "design, three terms promoted 2.2e-7, numpy fp32 2.7e-7",
    12288: "design, three terms promoted 5.0e-7, numpy fp32 4.3e-7",
}
ERROR_BOUND = 1e-6
"""Of full accuracy, over the largest |y|: two terms give 2.2e-6, one 1.3e-3."""

_ERROR_LINE = re.compile(r"(\w+) +(\d+): GEMM, --fast-prefill, GEMV: +(\S+) +(\S+) +(\S+)")
_SUMMARY_LINE = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: (\d+)")


def script(*command: str, seconds: float = 460) -> Stage:
    """A stage that runs a script which prints a line for each check, "ok" or "FAILED" first."""

    def run(session: Session) -> Iterator[Figure]:
        code, lines = _output([sys.executable, *command], seconds)
        yield from _verdicts(" ".join(command), code, lines)

    run.__doc__ = f"`{' '.join(command)}`"
    return run


def golden(*options: str) -> Stage:
    """A stage that checks real models against their golden answers in every placement."""

    def run(session: Session) -> Iterator[Figure]:
        if not session.real:
            raise FileNotFoundError("a real model is needed: --smollm2 FILE or another")
        files = [part for name, path in session.real.items() for part in (f"--{name}", str(path.resolve()))]
        code, lines = _output([sys.executable, "tests/cuda/gpu_golden.py", *files, *options], 460)
        yield from _verdicts(f"golden ids of {', '.join(session.real)} {' '.join(options)}".rstrip(), code, lines)

    run.__doc__ = "Real models against their golden answers, in every placement"
    return run


def product_errors(*options: str) -> Stage:
    """A stage that measures the error of products with weights in every format."""

    def run(session: Session) -> Iterator[Figure]:
        code, lines = _output([sys.executable, "benchmarks/gpu_linear.py", "error", *options], 460)
        path = "sm_75 path, " * ("--plain" in options)
        found = [match.groups() for line in lines if (match := _ERROR_LINE.match(line))]
        for name, cols, gemm, fast, gemv in found:
            terms = f"GEMV {gemv}, --fast-prefill {fast}; {ERRORS_SEEN.get(int(cols), '')}"
            what = f"{path}{name}, K = {cols}: error of the GEMM over the largest |y|"
            yield at_most(what, float(gemm), ERROR_BOUND, "", terms)
        if code or not found:
            raise RuntimeError(f"gpu_linear.py ended with {code}: {' | '.join(lines[-3:])}")

    run.__doc__ = "Errors of products with weights against fp64, by format"
    return run


def sanitizer(tool: str, models: Sequence[str]) -> Stage:
    """A stage that runs tiny models under a tool of compute-sanitizer: a few placements on both paths, side by side."""

    def run(session: Session) -> Iterator[Figure]:
        # Errors of calls are part of how the engine asks what a host can do.
        options = ["--report-api-errors", "no"] if tool == "memcheck" else []
        head = ["compute-sanitizer", "--tool", tool, *options, "--error-exitcode", str(FAULTY), sys.executable]
        checks = [(model, path) for model in models for path in ("--tensor", "--plain")]

        def output(check: tuple[str, str]) -> tuple[int, list[str]]:
            model, path = check
            return _output([*head, "tests/cuda/gpu_modes.py", "--only", model, path, "--short", "--tokens", "40"], 200)

        with ThreadPoolExecutor(len(checks)) as pool:
            for (model, path), (code, lines) in zip(checks, pool.map(output, checks), strict=True):
                found = [int(match[1]) for line in lines if (match := _SUMMARY_LINE.search(line))]
                said = [line for line in lines if line.startswith(("ok", "FAILED")) or "SUMMARY" in line]
                what = f"{tool}, {model}, {'sm_75' if path == '--plain' else 'own'} path"
                if code or not found:
                    said += [line for line in lines if line.startswith("=========")][:6]
                yield at_most(f"{what}: findings", max([*found, int(code != 0)]), 0, "", " ; ".join(said))
                if not found:
                    raise RuntimeError(f"{what}: no summary, status {code}: {' | '.join(lines[-3:])}")

    run.__doc__ = f"compute-sanitizer's {tool} on tiny models that are streamed and offloaded"
    return run


def _output(command: Sequence[str], seconds: float) -> tuple[int, list[str]]:
    """Status and lines of a command, which is run in the repository's folder."""
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def _verdicts(what: str, code: int, lines: Sequence[str]) -> Iterator[Figure]:
    """How many checks passed, and the lines of all; how many failed, and their lines."""
    passed = [line for line in lines if line.startswith("ok")]
    failed = [line for line in lines if line.startswith("FAILED")]
    yield stated(f"{what}: checks passed", len(passed), "", " ; ".join(line[2:].strip() for line in passed))
    if code and not failed:
        failed = [f"status {code}: {' | '.join(lines[-3:])}"]
    yield at_most(f"{what}: checks failed", len(failed), 0, "", " ; ".join(failed))
