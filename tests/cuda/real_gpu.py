"""For scripts that check a real GPU: one GPU that outlives engines, and checks that run as processes side by side."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

from edge_transformer.cuda.driver import CudaGpu


class KeptGpu(CudaGpu):
    """Stays open when an engine on it is closed, which gives back the memory: kernels are loaded once.

    refuses: the host page-locks nothing that is there already.
    """

    refuses = False

    def register_host(self, address: int, nbytes: int, read_only: bool) -> AbstractContextManager[None] | None:
        return None if self.refuses else super().register_host(address, nbytes, read_only)

    def close(self) -> None:
        self.synchronize()
        for memory in list(self._memories):
            memory.close()

    def end(self) -> None:
        super().close()


def run_side_by_side(script: str, checks: Sequence[Sequence[str]], limit_s: float, at_once: int | None = None) -> bool:
    """Run `script` once with each list of arguments, each a process; print what they say as they end. Whether all of
    them ended with status 0 within the limit.
    """
    # The processes share the cores: one thread each for numpy.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}

    def run(arguments: Sequence[str]) -> bool:
        started = time.perf_counter()
        command = [sys.executable, script, *arguments]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=limit_s, env=environment
            )
        except subprocess.TimeoutExpired as late:
            said = (late.stdout or b"").decode(errors="replace").rstrip()
            print(said, end="\n" * bool(said))
            print(f"FAILED  {' '.join(arguments)}: no end within {limit_s:.0f} s", flush=True)
            return False
        took = time.perf_counter() - started
        print(f"{done.stdout.rstrip()}  [{took:.1f} s]", flush=True)
        if done.returncode and "FAILED" not in done.stdout:
            lines = done.stderr.strip().splitlines()
            print(f"FAILED  {' '.join(arguments)}: status {done.returncode}: {' | '.join(lines[-3:])}", flush=True)
        return done.returncode == 0

    with ThreadPoolExecutor(at_once or len(os.sched_getaffinity(0))) as pool:
        return all(list(pool.map(run, checks)))
