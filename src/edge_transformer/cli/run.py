"""`ete run`: one prompt, one answer."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from edge_transformer.cli.answer import write_answer
from edge_transformer.cli.console import note, peak_memory, progress_bar, statistics
from edge_transformer.cli.expectation import expectation
from edge_transformer.cli.ledger import ledger_of
from edge_transformer.cli.main import INTERRUPTED
from edge_transformer.cli.options import (
    PromptText,
    engine_options,
    generation_config,
    generation_options,
    load_model,
)
from edge_transformer.cli.prompt_command import PromptCommand
from edge_transformer.cli.turn_input import MAX_BYTES

if TYPE_CHECKING:
    from edge_transformer import Generation


@click.command("run", cls=PromptCommand, short_help="Answer one prompt.")
@click.argument("model")
@click.argument("prompt", required=False, type=PromptText())
@click.option("--prompt-file", metavar="FILE", type=click.File("rb"), help="Read the prompt from a file.")
@click.option("--system", metavar="TEXT", type=PromptText(), help="System message of the chat.")
@click.option("--raw", is_flag=True, help="Continue the prompt as plain text, without the chat template.")
@generation_options
@click.option(
    "--logprobs",
    metavar="N",
    type=click.IntRange(0, 100),
    help="With --json: log-probabilities of the tokens and N others.",
)
@click.option("--ignore-eos", is_flag=True, help="Go on after the model's end token.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done, instead of text as it is made.")
@engine_options
@click.pass_context
def command(
    context: click.Context,
    /,
    model: str,
    prompt: str | None,
    prompt_file: BinaryIO | None,
    system: str | None,
    raw: bool,
    logprobs: int | None,
    ignore_eos: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Answer PROMPT with MODEL (a folder, a .gguf file, a hub id, or `demo`).

    PROMPT is read from standard input when it is left out or `-`; one line end at its very end is dropped. A
    PROMPT that begins with a dash comes last, after `--`. The answer goes to standard output, statistics to standard
    error. Ctrl-C ends the answer where it is (exit code 130).
    """
    if raw and system is not None:
        raise click.UsageError("--system needs the chat template, which --raw leaves out.")
    if logprobs is not None and not as_json:
        raise click.UsageError("--logprobs needs --json.")
    text = read_prompt(prompt, prompt_file)
    config = generation_config(options, logprobs=logprobs, ignore_eos=ignore_eos)
    with contextlib.ExitStack() as stack:
        with progress_bar() as progress:
            llm = stack.enter_context(load_model(model, options, progress))
        if (placed := ledger_of(llm)) is not None:
            note(placed)
        if (expected := expectation(llm)) is not None:
            note(expected)
        messages = [{"role": "system", "content": system}] if system is not None else []
        messages.append({"role": "user", "content": text})
        generation = write_answer(llm, text if raw else messages, config, raw=raw, show=not as_json)
    if as_json:
        click.echo(json.dumps(_as_object(generation)))
    else:
        note(statistics(generation))
    if generation.finish_reason == "interrupted":
        context.exit(INTERRUPTED)


def read_prompt(argument: str | None, file: BinaryIO | None) -> str:
    """The prompt's text, from the argument, a file or standard input."""
    if file is not None and argument is not None:
        raise click.UsageError("Give the prompt as an argument or with --prompt-file, not both.")
    if file is None and argument not in (None, "-"):
        text = argument
    else:
        if file is None and sys.stdin.isatty():
            if argument is None:
                raise click.UsageError("No prompt: give it as an argument, with --prompt-file, or on standard input.")
            note("Type the prompt; Ctrl-D on a line of its own ends it.")
        name = "standard input" if file is None else file.name
        data = (file or sys.stdin.buffer).read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise click.UsageError(f"The prompt in {name} is longer than {MAX_BYTES >> 20} MiB.")
        text = _decoded(data, name)
    if not text:
        raise click.UsageError("The prompt is empty.")
    return text


def _decoded(data: bytes, name: str) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"The prompt in {name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}."
        ) from error
    return text.removesuffix("\n").removesuffix("\r") if text.endswith("\n") else text


def _as_object(generation: Generation) -> dict[str, Any]:
    """What --json prints; the keys are documented in docs/command-line.md."""
    timings = generation.timings
    result: dict[str, Any] = {
        "prompt_ids": generation.prompt_ids,
        "ids": generation.ids,
        "text": generation.text,
        "finish_reason": generation.finish_reason,
        "seed": generation.seed,
        "timings": {
            "load_s": timings.load_s,
            "prefill_s": timings.prefill_s,
            "decode_s": timings.decode_s,
            "prompt_tokens": timings.prompt_tokens,
            "generated_tokens": timings.generated_tokens,
            "prefill_tokens_per_s": timings.prefill_tokens_per_s,
            "decode_tokens_per_s": timings.decode_tokens_per_s,
        },
        "peak_memory_bytes": peak_memory(),
    }
    if generation.logprobs is not None:
        result["logprobs"] = [dataclasses.asdict(token) for token in generation.logprobs]
    return result
