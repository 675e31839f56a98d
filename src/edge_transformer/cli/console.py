"""What the terminal shows beside the answer: progress bars, statistics and notes, all on the error stream."""

from __future__ import annotations

import contextlib
import resource
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from edge_transformer import Generation
    from edge_transformer.hub import Progress

BAR_AFTER_SECONDS = 0.3
LINE_EVERY_SECONDS = 10.0  # where no terminal is
FIRST_LINE_AFTER_SECONDS = 2.0


def note(text: str) -> None:
    """A line for the person at the terminal."""
    click.echo(text, err=True)


@contextlib.contextmanager
def progress_bar(*, in_bytes: bool = True) -> Iterator[Progress]:
    """A Progress that draws one bar on the error stream while the block runs, and leaves nothing behind.

    Draws only what takes longer than BAR_AFTER_SECONDS: shorter work ends before rich is imported. Where the error
    stream is no terminal, work that takes longer than FIRST_LINE_AFTER_SECONDS leaves a line now and then.
    in_bytes: what is done is counted in bytes, and shown.
    """
    bar = _Bar(in_bytes=in_bytes) if sys.stderr.isatty() else _Lines(in_bytes=in_bytes)
    try:
        yield bar.report
    finally:
        bar.close()


class _Bar:
    """One rich progress bar, made when the work has proved long."""

    def __init__(self, *, in_bytes: bool) -> None:
        self._visible = True
        self._bytes = in_bytes
        self._started = time.monotonic()
        self._progress: Any = None
        self._task: Any = None
        self._what = ""

    def report(self, what: str, done: int, total: int) -> None:
        if not self._visible or (self._progress is None and time.monotonic() - self._started < BAR_AFTER_SECONDS):
            return
        if self._progress is None:
            self._progress = _rich_progress()
            self._task = self._progress.add_task(what, total=None, amount="")
            self._progress.start()
        amount = f"{size(done)} of {size(total)}" if self._bytes and total else ""
        state: dict[str, Any] = {"description": what, "completed": done, "total": total or None, "amount": amount}
        if what != self._what:  # new work: the time left counts from here
            self._progress.reset(self._task, **state)  # at once: the bar may be drawn after any call
            self._what = what
        else:
            self._progress.update(self._task, **state)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
        self._visible = False


class _Lines:
    """Progress for a log: a line when the work has proved long, and another every LINE_EVERY_SECONDS."""

    def __init__(self, *, in_bytes: bool) -> None:
        self._bytes = in_bytes
        self._next = time.monotonic() + FIRST_LINE_AFTER_SECONDS

    def report(self, what: str, done: int, total: int) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LINE_EVERY_SECONDS
        amount = f"{size(done)} of {size(total)}" if self._bytes and total else f"{done} of {total}" if total else ""
        note(f"{what}: {amount}" if amount else what)

    def close(self) -> None:
        """Nothing is left to take away."""


def _rich_progress() -> Any:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[amount]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def statistics(generation: Generation) -> str:
    """One line: tokens and rates of prompt and answer, load time, the process's peak memory."""
    timings = generation.timings
    if generation.finish_reason == "interrupted" and not timings.generated_tokens:
        prompt = f"prompt {timings.prompt_tokens} tokens, interrupted after reading {timings.processed_tokens}"
    else:
        kept = timings.prompt_tokens - timings.processed_tokens
        prompt = f"prompt {timings.prompt_tokens} tokens{f' ({kept} kept)' if kept else ''}"
    ended = {"length": " (ended by --max-tokens)", "context": " (ended by a full context)"}
    return (
        f"{prompt}, {timings.prefill_tokens_per_s:.1f} tok/s"
        f" | answer {timings.generated_tokens} tokens{ended.get(generation.finish_reason, '')}"
        f", {timings.decode_tokens_per_s:.1f} tok/s"
        f" | load {timings.load_s:.2f} s | peak memory {size(peak_memory())}"
    )


def peak_memory() -> int:
    """Most bytes that this process has had in memory, pages of mapped files included."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def size(nbytes: int) -> str:
    """Bytes for people: `94.1 MiB`."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"
