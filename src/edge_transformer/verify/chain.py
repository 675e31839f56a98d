"""The links in their order: from the reference outwards, each executor against the one before."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

from edge_transformer.cpu.settings import cpu_settings
from edge_transformer.engine.generation import Generation
from edge_transformer.engine.llm import LLM
from edge_transformer.errors import CapacityError, EdgeTransformerError, GpuError, UsageError
from edge_transformer.hub.progress import Progress
from edge_transformer.memory import available_memory
from edge_transformer.verify.checksums import checksum_links
from edge_transformer.verify.conversation import conversation_links, without_kept
from edge_transformer.verify.cpu import CpuLinks
from edge_transformer.verify.emulated import emulated_links
from edge_transformer.verify.gpu import PLACEMENTS, Device, GpuLinks
from edge_transformer.verify.link import Link, Outcome, Status, not_run
from edge_transformer.verify.live_transformers import transformers_link
from edge_transformer.verify.material import Material, material
from edge_transformer.verify.subject import Subject

CONVERSATION_TOKENS = 4096
"""Context on a GPU of the links that are conversations: the built-in text has at most half as many bytes."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A link that was run, or found not to run here."""

    name: str
    outcome: Outcome
    seconds: float

    @property
    def missed(self) -> bool:
        return self.outcome.status is Status.MISSED


def find_links(llm: LLM, threads: int | None, quick: bool, device: int = 0) -> list[Link]:
    """All links for a model on the CPU with an f32 KV cache; those that cannot run here among them.

    threads: of the CPU (None: the cores this process may use). quick: fewer tokens, and no link that takes minutes.
    device: number of the GPU.
    """
    subject = Subject(llm.parts, cpu_settings(threads=threads).threads)
    given = material(llm.tokenizer, subject.spec, subject.parameters, quick)
    cpu = CpuLinks(subject, given)
    links = list(checksum_links(subject.parts.checkpoint, subject.threads))
    links += [transformers_link(subject, given), *cpu.links()]
    links += conversation_links("CPU", lambda _: nullcontext(llm), lambda prompt, _: without_kept(llm, prompt))
    links += emulated_links(subject, given, quick)
    return links + list(_gpu_links(llm, subject, given, cpu, device))


def run_link(link: Link, progress: Progress) -> Finding:
    """What came of it. An error of this package is a miss."""
    started = time.perf_counter()
    try:
        outcome = link.run(progress)
    except EdgeTransformerError as error:
        outcome = Outcome(Status.MISSED, f"{type(error).__name__}: {error}")
    return Finding(link.name, outcome, time.perf_counter() - started)


def _gpu_links(llm: LLM, subject: Subject, given: Material, cpu: CpuLinks, ordinal: int) -> Iterator[Link]:
    from edge_transformer.cuda import driver
    from edge_transformer.engine.gpu import GpuSettings

    try:
        gpu = driver.CudaGpu(ordinal)
        capability = gpu.properties.capability
        gpu.close()
    except (GpuError, UsageError) as error:
        reason = str(error)
        yield Link("GPU", lambda _: not_run(reason))
        return
    plain = partial(driver.CudaGpu, ordinal, (7, 5)) if capability > (7, 5) else None
    device = Device("GPU", partial(driver.CudaGpu, ordinal), plain)
    links = GpuLinks(device, subject, given.prompts, cpu.records)
    yield from links.placements(PLACEMENTS)
    yield from links.ways(given.chunks)

    def on_gpu(progress: Progress) -> LLM:
        """Its output projection has the same bits wherever the rest lies: it is not on the CPU."""
        rearranged, available = llm.memory["weights_rearranged"], available_memory()
        if rearranged > available:
            raise CapacityError(
                f"the weights take another {rearranged / 2**30:.1f} GiB, {available / 2**30:.1f} are free"
            )
        return LLM(
            llm.path,
            context_length=min(llm.context_length, CONVERSATION_TOKENS),
            threads=subject.threads,
            kv_dtype="f32",
            backend="cuda",
            gpu=GpuSettings(ordinal, lm_head="streamed"),
            progress=progress,
        )

    def from_nothing(prompt: str, progress: Progress) -> Generation:
        with on_gpu(progress) as fresh:
            return without_kept(fresh, prompt)

    yield from conversation_links("GPU", on_gpu, from_nothing)


def summary(findings: list[Finding]) -> str:
    """How many links passed, in a line."""
    counts = [sum(finding.outcome.status is status for finding in findings) for status in Status]
    seconds = sum(finding.seconds for finding in findings)
    return f"{counts[0]} links passed, {counts[1]} missed, {counts[2]} not run, in {seconds:.0f} s"
