"""What the server counts, as Prometheus reads it (text format 0.0.4)."""

from __future__ import annotations

import resource
from collections.abc import Iterator

from edge_transformer.engine.scheduler_statistics import Histogram
from edge_transformer.server.service import Service

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics(service: Service) -> str:
    """One line per figure, each with its help and type. Counts begin anew when the engine is restarted."""
    return "".join(_lines(service))


def _lines(service: Service) -> Iterator[str]:
    yield from _one("ete_ready", "gauge", "1 while requests are taken.", int(service.ready))
    yield from _one("ete_engine_restarts_total", "counter", "Restarts after a fault.", service.restarts)
    yield from _one("ete_host_memory_bytes", "gauge", "Bytes of this process in memory.", resident_bytes())
    running = service.newest
    if running is None:
        return
    scheduler, llm = running.scheduler, running.llm
    counts = scheduler.statistics
    yield from _one("ete_requests_running", "gauge", "Answers in the making.", scheduler.running)
    yield from _one("ete_requests_waiting", "gauge", "Requests that wait.", scheduler.waiting)
    yield from _one("ete_requests_cancelled_total", "counter", "Requests whose client went away.", counts.cancelled)
    yield from _one("ete_passes_total", "counter", "Passes over the weights.", counts.passes)
    yield from _one("ete_passes_given_up_total", "counter", "Passes left in the middle.", counts.passes_given_up)
    yield from _one("ete_prompt_tokens_total", "counter", "Prompt tokens computed.", counts.prompt_tokens)
    yield from _one("ete_prompt_tokens_cached_total", "counter", "Prompt tokens found.", counts.cached_tokens)
    yield from _one("ete_answer_tokens_total", "counter", "Tokens of answers.", counts.answer_tokens)
    yield from _one("ete_preemptions_total", "counter", "Answers that lost their memory.", counts.preemptions)
    yield from _one("ete_kv_bytes", "gauge", "Bytes of KV caches in use.", scheduler.memory.used_bytes)
    yield from _one("ete_kv_budget_bytes", "gauge", "Bytes KV caches may take.", scheduler.memory.budget_bytes)
    yield from _one("ete_kept_prefixes", "gauge", "Prompts kept for requests to come.", scheduler.kept_prefixes)
    if llm.plan is not None:
        moved = counts.passes * llm.plan.streamed_bytes
        yield from _one("ete_arena_bytes", "gauge", "Bytes of GPU memory in the arena.", llm.plan.arena_bytes)
        yield from _one("ete_bus_bytes_total", "counter", "Bytes of weights moved over the bus.", moved)
    yield from _histogram("ete_batch_sequences", "Sequences in a pass.", counts.batch_sequences)
    yield from _histogram("ete_pass_seconds", "Seconds of a pass.", counts.pass_seconds)
    yield from _histogram("ete_first_token_seconds", "Seconds to the first token.", counts.first_token_seconds)
    yield from _histogram("ete_token_seconds", "Seconds between tokens of an answer.", counts.token_seconds)


def resident_bytes() -> int:
    """Bytes that this process has in memory now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def _one(name: str, kind: str, text: str, value: float) -> Iterator[str]:
    yield f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name} {value}\n"


def _histogram(name: str, text: str, histogram: Histogram) -> Iterator[str]:
    yield f"# HELP {name} {text}\n# TYPE {name} histogram\n"
    counts, total = list(histogram.counts), 0
    for bound, count in zip(histogram.bounds, counts, strict=False):
        total += count
        yield f'{name}_bucket{{le="{bound:g}"}} {total}\n'
    total += counts[-1]
    yield f'{name}_bucket{{le="+Inf"}} {total}\n{name}_sum {histogram.sum}\n{name}_count {total}\n'
