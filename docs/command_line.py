"""Writes docs/command-line.md from the commands: `python docs/command_line.py`. A test checks that it is current."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import click

from edge_transformer.cli.main import EPILOG, ete

PAGE = Path(__file__).with_name("command-line.md")

INTRODUCTION = """\
# The command `ete`

This page is written by `docs/command_line.py`. Every command tells the same with `--help`.
"""

JSON_KEYS = """\
### What `ete run --json` prints

One object:

| key | value |
|---|---|
| `prompt_ids` | token ids of the prompt, as the model was given them |
| `ids` | token ids of the answer, an end token or the tokens of a stop string included |
| `text` | the answer, without them |
| `finish_reason` | `stop` (end token or stop string), `length` (`--max-tokens`), `context` (it is full), \
`interrupted` (Ctrl-C; the exit code is then 130) |
| `seed` | seed of the draws; with it the same text comes again |
| `timings` | `load_s`, `prefill_s`, `decode_s` in seconds; `prompt_tokens`, `generated_tokens`; \
`prefill_tokens_per_s`, `decode_tokens_per_s` |
| `peak_memory_bytes` | most bytes the process had in memory, pages of mapped files included |
| `logprobs` | only with `--logprobs`: for each token `token`, `logprob`, and `top`, a list of (token, logprob) |
"""


def page() -> str:
    """The whole page, in Markdown."""
    context = click.Context(ete, info_name="ete")
    parts = [INTRODUCTION, _block(EPILOG)]
    for name in ete.list_commands(context):
        command = ete.get_command(context, name)
        if command is not None:
            parts.append(_command(command, click.Context(command, info_name=name, parent=context)))
            if name == "run":
                parts.append(JSON_KEYS)
    return "\n".join(parts)


def _command(command: click.Command, context: click.Context) -> str:
    usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
    lines = [f"## `{context.command_path}`", "", f"`{usage}`", "", inspect.cleandoc(command.help or ""), ""]
    options = [parameter for parameter in command.params if isinstance(parameter, click.Option)]
    if options:
        lines += ["| option | meaning |", "|---|---|"]
        lines += [f"| {_names(option)} | {_meaning(option)} |" for option in options]
        lines.append("")
    return "\n".join(lines)


def _names(option: click.Option) -> str:
    value = ""
    if isinstance(option.type, click.Choice):
        value = " " + r"\|".join(option.type.choices)
    elif not option.is_flag:
        value = f" {option.metavar}"
    names = ", ".join([*option.opts, *option.secondary_opts])
    return f"`{names}{value}`".replace(r"\|", "\\|")


def _meaning(option: click.Option) -> str:
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    default = f" Default: {shown}." if option.show_default else ""
    return f"{option.help}{default}"


def _block(text: str) -> str:
    """Text whose line ends are meant, without click's marks for that."""
    lines = text.replace("\b\n", "").splitlines()
    return "\n".join(["```text", *lines, "```", ""])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"{PAGE}\n")
