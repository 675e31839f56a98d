"""The GPU's kernels on the emulator, where this is a checkout of the repository: the emulator belongs to its tests."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import edge_transformer
from edge_transformer.hub.progress import Progress
from edge_transformer.verify.feed import Prompt, Way, feed
from edge_transformer.verify.gpu import Device, GpuLinks
from edge_transformer.verify.link import Link, Outcome, Status, not_run
from edge_transformer.verify.material import Material, layers_of_each_kind
from edge_transformer.verify.record import Record
from edge_transformer.verify.subject import Subject

TESTS = Path(edge_transformer.__file__).parents[2] / "tests"
PLACEMENTS = ("all resident", "all on the host")
MEMORY_BYTES = 16 << 30
ROWS = 192

MOST_PARAMETERS = 100_000_000
"""With an output projection. A link takes half a minute for a third of it."""


def emulated_links(subject: Subject, given: Material, quick: bool) -> Iterator[Link]:
    """A few tokens through the first layers: the emulator takes seconds for each."""
    reason = "takes minutes: without --quick" if quick else _missing_tools()
    if reason is not None:
        yield Link("emulated GPU", lambda _: not_run(reason))
        return
    part = subject.first(max(2, layers_of_each_kind(subject.spec)))
    if part.all_parameters > MOST_PARAMETERS:
        size = f"{part.all_parameters / 1e6:.0f} million parameters"
        yield Link("emulated GPU", lambda _: not_run(f"{size} in {part.description} would take hours"))
        return
    tokens = given.long.tokens
    prompts = [Prompt(tokens[:40], 3), Prompt(tokens[20:29], 2), Prompt(tokens[30:35], 1)]

    def on_cpu(progress: Progress) -> list[Record]:
        with part.on_cpu() as engine:
            return feed(engine, prompts, Way(), progress, "the CPU")

    links = GpuLinks(Device("emulated GPU", _open, rows=ROWS), part, prompts, on_cpu)
    for link in (*links.placements(PLACEMENTS), *links.ways(())):
        yield Link(link.name, _guarded(link.run, part))


def _guarded(run: Callable[[Progress], Outcome], part: Subject) -> Callable[[Progress], Outcome]:
    """What the emulator finds by itself (races, reads of what was never written) is a miss, with its words."""

    def guarded(progress: Progress) -> Outcome:
        try:
            outcome = run(progress)
        except AssertionError as error:
            outcome = Outcome(Status.MISSED, str(error).splitlines()[0])
        return replace(outcome, text=f"{outcome.text}; {part.description}")

    return guarded


def _missing_tools() -> str | None:
    """Why there is no emulator here; None where there is one."""
    if not (TESTS / "emulator" / "__init__.py").is_file():
        return "the emulator is part of the repository's tests, and this is an installed package"
    if shutil.which("g++") is None:
        return "the emulator needs g++, which is not on the PATH"
    return None


def _open() -> Any:
    if "emulator" not in sys.modules:
        sys.path.append(str(TESTS))
        try:
            importlib.import_module("emulator")
        finally:
            sys.path.remove(str(TESTS))
    return sys.modules["emulator"].EmulatedGpu(0, total_bytes=MEMORY_BYTES)
