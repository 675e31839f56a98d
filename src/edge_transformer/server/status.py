"""What lies where and what is going on, for the chat page's panel."""

from __future__ import annotations

import os
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_transformer.server.metrics import resident_bytes
from edge_transformer.server.service import Running, Service

WINDOW_S = 5.0
PROBE_BYTES = 32 << 20
PROBES = 4  # others may use the memory too: the best counts


@dataclass(frozen=True, slots=True)
class _Sample:
    time: float
    passes: int
    answer_tokens: int
    prompt_tokens: int


class Status:
    """Rates are means over the time since an earlier look, up to WINDOW_S."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._samples: deque[_Sample] = deque(maxlen=64)
        self._seen: Running | None = None
        self._read_rate = host_read_rate()

    def read(self) -> dict[str, Any]:
        """A JSON object; sizes in bytes, rates per second."""
        service = self._service
        running = service.newest
        status: dict[str, Any] = {
            "model": service.name,
            "status": "ok" if service.ready else "draining" if service.draining else "restarting",
        }
        if running is None:
            return status | {"reason": service.reason}
        scheduler, llm = running.scheduler, running.llm
        status["context_length"] = llm.context_length
        status["running"] = scheduler.running
        status["waiting"] = scheduler.waiting
        status["ledger"] = _ledger(running)
        status["rates"] = self._rates(running)
        return status

    def _rates(self, running: Running) -> dict[str, Any]:
        counts = running.scheduler.statistics
        if running is not self._seen:
            self._seen = running
            self._samples.clear()
        now = _Sample(time.monotonic(), counts.passes, counts.answer_tokens, counts.prompt_tokens)
        while len(self._samples) > 1 and now.time - self._samples[0].time > WINDOW_S:
            self._samples.popleft()
        first = self._samples[0] if self._samples else now
        self._samples.append(now)
        seconds = max(now.time - first.time, 1e-9)
        passes = (now.passes - first.passes) / seconds
        rates: dict[str, Any] = {
            "passes": passes,
            "answer_tokens": (now.answer_tokens - first.answer_tokens) / seconds,
            "prompt_tokens": (now.prompt_tokens - first.prompt_tokens) / seconds,
        }
        plan = running.llm.plan
        if plan is not None:
            rates["bus_bytes"] = passes * plan.streamed_bytes
            if plan.rates is not None and plan.streamed_bytes:
                rates["bound"] = "bus"
                rates["bound_share"] = rates["bus_bytes"] / plan.rates.bus
        else:
            memory = running.llm.memory
            rates["weight_bytes"] = passes * (memory["weights_mapped"] + memory["weights_rearranged"])
            self._read_rate = max(self._read_rate, rates["weight_bytes"])
            rates["bound"] = "memory bandwidth"
            rates["bound_share"] = rates["weight_bytes"] / self._read_rate
        return rates


def host_read_rate() -> float:
    """Bytes per second at which this process's cores together sum memory that is in no cache."""
    threads = len(os.sched_getaffinity(0))
    numbers = [np.ones(PROBE_BYTES // 4, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(PROBES):
            started = time.perf_counter()
            list(pool.map(np.sum, numbers))
            best = max(best, threads * PROBE_BYTES / (time.perf_counter() - started))
    return best


def _ledger(running: Running) -> list[dict[str, Any]]:
    """Where, what, and how many bytes."""
    llm, scheduler, memory = running.llm, running.scheduler, running.scheduler.memory
    lines = []
    if llm.plan is not None:
        lines += [{"place": "GPU", "what": label, "bytes": nbytes} for label, nbytes in llm.plan.ledger if nbytes]
    host = llm.memory
    states = scheduler.running * host["recurrent_state"] if llm.plan is None else 0  # on a GPU it is in the plan
    lines += [
        {"place": "host", "what": "weights, used where the file lies", "bytes": host["weights_mapped"]},
        {"place": "host", "what": "weights, re-arranged", "bytes": host["weights_rearranged"]},
        {"place": "host", "what": "workspace", "bytes": host["workspace"]} if llm.plan is None else {},
        {"place": "host", "what": "recurrent state of answers in the making", "bytes": states},
        {"place": "KV", "what": "KV caches in use", "bytes": memory.used_bytes, "of": memory.budget_bytes},
        {"place": "host", "what": "this process in memory", "bytes": resident_bytes()},
    ]
    return [line for line in lines if line.get("bytes")]
