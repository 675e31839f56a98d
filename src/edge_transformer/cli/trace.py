"""`ete trace`: one answer on a GPU, and what happened when, as a file and in three shares."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO

import click

from edge_transformer.cli.answer import write_answer
from edge_transformer.cli.console import note, progress_bar, statistics
from edge_transformer.cli.ledger import ledger_of
from edge_transformer.cli.main import INTERRUPTED
from edge_transformer.cli.options import PromptText, generation_config, load_model, trace_options
from edge_transformer.cli.prompt_command import PromptCommand
from edge_transformer.cli.run import read_prompt
from edge_transformer.errors import storage_error


@click.command("trace", cls=PromptCommand, short_help="Record what a GPU does while it answers one prompt.")
@click.argument("model")
@click.argument("prompt", required=False, type=PromptText())
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    default="trace.json",
    show_default=True,
    help="Where the trace goes, for ui.perfetto.dev or chrome://tracing.",
)
@click.option("--prompt-file", metavar="FILE", type=click.File("rb"), help="Read the prompt from a file.")
@click.option("--system", metavar="TEXT", type=PromptText(), help="System message of the chat.")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, without the chat template.")
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token.")
@trace_options
@click.pass_context
def command(
    context: click.Context,
    /,
    model: str,
    prompt: str | None,
    output: Path,
    prompt_file: BinaryIO | None,
    system: str | None,
    raw: bool,
    ignore_eos: bool,
    **options: Any,
) -> None:
    """Answer PROMPT with MODEL as `ete run --backend cuda` does, and record the GPU's streams and the CPU.

    What comes out is a trace file, and on standard output how busy the bus was while the answer was made, how much
    compute no copy covered, and how long compute waited for copies. The answer itself is not shown.
    """
    from edge_transformer.cuda.chrome_trace import chrome_trace
    from edge_transformer.cuda.timeline import Timeline
    from edge_transformer.cuda.timeline_summary import summarize, summary_text

    if not output.parent.is_dir():
        raise click.UsageError(f"The folder of --output {output} does not exist.")
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, which --raw leaves out.")
    text = read_prompt(prompt, prompt_file)
    config = generation_config(options, ignore_eos=ignore_eos)
    timeline = Timeline()
    with progress_bar() as progress:
        llm = load_model(model, options | {"backend": "cuda"}, progress, timeline)
    with llm:
        if (placed := ledger_of(llm)) is not None:
            note(placed)
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        generation = write_answer(llm, text if raw else messages, config, raw=raw, show=False)
        spans = timeline.finish()
    try:
        output.write_text(json.dumps(chrome_trace(spans, timeline.device)), encoding="utf-8")
    except OSError as error:
        raise storage_error(error, f"the trace cannot be written to {output}", "name another --output") from error
    note(statistics(generation))
    summary = summarize(spans)
    nothing = "no decode pass was traced: the answer has one token (see --max-tokens and --ignore-eos)"
    click.echo(nothing if summary is None else summary_text(summary))
    note(f"{output}: {len(spans)} spans")
    if generation.finish_reason == "interrupted":
        context.exit(INTERRUPTED)
