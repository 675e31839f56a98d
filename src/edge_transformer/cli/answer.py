"""One answer, written to standard output as it is made; Ctrl-C ends it where it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from edge_transformer.cli.console import progress_bar
from edge_transformer.cli.interrupt import first_interrupt

if TYPE_CHECKING:
    from edge_transformer import LLM, Generation, GenerationConfig


def write_answer(
    llm: LLM,
    prompt: str | Sequence[dict[str, str]],
    config: GenerationConfig,
    *,
    raw: bool = False,
    show: bool = True,
) -> Generation:
    """Generate; while the prompt is read a bar shows how far that is, then (when `show`) the text appears.

    The text ends with a line end. An interrupted answer is returned as far as it came.
    """
    with progress_bar(in_bytes=False) as progress:
        stream = llm.stream(
            prompt, config, raw=raw, prefill_progress=lambda done, total: progress("reading the prompt", done, total)
        )
        with first_interrupt(stream.cancel):
            piece = next(stream, None)
    with stream, first_interrupt(stream.cancel):
        while piece is not None:
            if show:
                click.echo(piece, nl=False)
            piece = next(stream, None)
    if show and not stream.result.text.endswith("\n"):
        click.echo()
    return stream.result
