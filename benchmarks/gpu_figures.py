"""Every figure that is asked of the GPU engine, measured: python benchmarks/gpu_figures.py RESULTS [options]

    --only STAGE ...     these stages, also where a result is stored already
    --peer LLAMA_BENCH   llama.cpp's llama-bench, to stand beside on the same files in the same run
    --models FOLDER      keep the random models here for the next call (default: a temporary folder in /dev/shm)
    --smollm2 FILE, --gemma3 FILE, --hybrid24m FOLDER, --hybrid24m_q8_0 FILE
                         real models, for the stages "golden" and "golden-sm75"
    --traces FOLDER      keep the timelines of the stage "trace" for ui.perfetto.dev
    --table              print the table of the stored results and measure nothing

A stage runs in a process of its own, ends after 8 minutes at most, and leaves RESULTS/STAGE.json. What is stored
without an error is not measured again, so the same call goes on where the last one was ended. A stage that fails stores
its error and the figures it had, and the others follow.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from figures import Figure, StageResult, load, save, summary, table
from gpu_session import Session, Stage
from gpu_stages import STAGES

STAGE_SECONDS = 480
INTERRUPTED = 130
REAL_MODELS = ("smollm2", "gemma3", "hybrid24m", "hybrid24m_q8_0")


def main() -> int:
    options = parse_arguments()
    names = list(STAGES)
    unknown = set(options.only or ()) - set(names)
    if unknown:
        raise SystemExit(f"no stage {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    try:
        if options.in_this_process:
            return run_here(options.only[0], options)
        if not options.table:
            run_stages(options, names)
    except KeyboardInterrupt:
        if not options.in_this_process:
            print("ended by the user; stored results stay", file=sys.stderr)
        return INTERRUPTED
    print(table(options.results, names))
    results = [result for name in names if (result := load(options.results, name)) is not None]
    print(f"\n{summary(results)}")
    return 0 if all(not result.error for result in results) else 1


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="folder of the stored results")
    parser.add_argument("--only", nargs="+", metavar="STAGE")
    parser.add_argument("--peer", type=Path, metavar="LLAMA_BENCH")
    parser.add_argument("--models", type=Path, metavar="FOLDER")
    parser.add_argument("--traces", type=Path, metavar="FOLDER")
    for name in REAL_MODELS:
        parser.add_argument(f"--{name}", type=Path, metavar="FILE")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run_stages(options: argparse.Namespace, names: list[str]) -> None:
    """Every stage that is asked and not stored, each in a fresh process."""
    todo = [name for name in names if _to_be_run(name, options)]
    with tempfile.TemporaryDirectory(prefix="figures-", dir=_large_memory()) as temporary:
        models = options.models or Path(temporary)
        for name in todo:
            command = [sys.executable, __file__, str(options.results), "--only", name, "--in-this-process"]
            command += ["--models", str(models), "--threads", str(options.threads)]
            for option in ("peer", "traces", *REAL_MODELS):
                value = getattr(options, option)
                command += [f"--{option}", str(value)] if value is not None else []
            started = time.perf_counter()
            print(f"{name} ...", file=sys.stderr, flush=True)
            error = run_process(command, STAGE_SECONDS)
            seconds = time.perf_counter() - started
            stored = load(options.results, name)
            if error or stored is None:
                figures = stored.figures if stored is not None else []
                stored = StageResult(name, seconds, figures, error or "it ended without a result")
                save(options.results, stored)
            print(f"{name}: {seconds:.0f} s{f', FAILED: {stored.error}' if stored.error else ''}", file=sys.stderr)


def run_process(command: list[str], seconds: float) -> str:
    """Run to the end, or for so long; what went wrong beyond what the process stored itself. Ends with it on Ctrl-C."""
    process = subprocess.Popen(command)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"ended after {seconds:.0f} s"
    except BaseException:
        process.terminate()
        process.wait()
        raise
    return f"the process ended with {code}" if code not in (0, 1) else ""


def run_here(name: str, options: argparse.Namespace) -> int:
    """One stage in this process; every figure is stored as soon as it is there."""
    real = {model: file for model in REAL_MODELS if (file := getattr(options, model)) is not None}
    session = Session(options.models, options.threads, options.peer, options.traces, real)
    return run_stage(name, STAGES[name], session, options.results)


def run_stage(name: str, stage: Stage, session: Session, folder: Path) -> int:
    """Store what `stage` yields, and its error where it ends with one: 0 or 1."""
    (folder / f"{name}.json").unlink(missing_ok=True)
    started, error = time.perf_counter(), ""
    figures: list[Figure] = []
    try:
        for figure in stage(session):
            figures.append(figure)
            save(folder, StageResult(name, time.perf_counter() - started, figures, "it did not come to its end"))
    except Exception as caught:  # noqa: BLE001 - stored, and the other stages follow
        error = f"{type(caught).__name__}: {caught}"
    save(folder, StageResult(name, time.perf_counter() - started, figures, error))
    return 1 if error else 0


def _to_be_run(name: str, options: argparse.Namespace) -> bool:
    if options.only:
        return name in options.only
    stored = load(options.results, name)
    return stored is None or bool(stored.error)


def _large_memory() -> str | None:
    """Where files lie in memory, so that no disk is measured."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


if __name__ == "__main__":
    sys.exit(main())
