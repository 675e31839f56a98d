"""The command `ete`: its list of subcommands, and how errors become messages and exit codes.

A subcommand's file is imported when it is run or asked for help, so that `ete --help` and `ete --version` load nothing
but click.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

import edge_transformer
from edge_transformer.cli.output import name_standard_output
from edge_transformer.errors import DISK_FULL, CapacityError, EdgeTransformerError, system_reason

INTERRUPTED = 130  # 128 + SIGINT, as shells report it
BROKEN_PIPE = 141  # 128 + SIGPIPE

# name: (module, one line of help); the line equals the command's own short_help
COMMANDS = {
    "run": ("edge_transformer.cli.run", "Answer one prompt."),
    "trace": ("edge_transformer.cli.trace", "Record what a GPU does while it answers one prompt."),
    "chat": ("edge_transformer.cli.chat", "Talk with a model, turn by turn."),
    "serve": ("edge_transformer.cli.serve", "Serve a model over HTTP, as OpenAI's interface."),
    "info": ("edge_transformer.cli.info", "Say what a model is and whether it can run, without loading it."),
    "verify": ("edge_transformer.cli.verify", "Check that a model is computed right on this machine."),
    "quantize": ("edge_transformer.cli.quantize", "Make a smaller model of int8 or int4 weights."),
    "pull": ("edge_transformer.cli.pull", "Download a model, or bring it up to date."),
    "list": ("edge_transformer.cli.list", "List the downloaded models."),
    "rm": ("edge_transformer.cli.rm", "Delete a downloaded model."),
    "cache": ("edge_transformer.cli.cache", "Show or clear the compiled GPU kernels."),
}

EPILOG = """\b
MODEL is a folder, a .gguf file, `demo` (SmolLM2-135M-Instruct, 94 MiB), or a hub
id: org/name, org/name:FILE.gguf or org/name:FORMAT (such as Q4_K_M).

\b
Exit codes:
    0  done                              6  tokenizer or chat template
    1  any other error                   7  prompt longer than the context
    2  wrong usage                       8  NaN or infinity in the model
    3  model file corrupt or not read    9  not enough memory or disk
    4  model refused: not supported     10  GPU, its driver or compiler
    5  model not found                 130  interrupted by Ctrl-C
                                       141  reader of the output has gone
A server that Ctrl-C ends while it serves is done: 0; while it starts: 130.

\b
Environment: ETE_CACHE (folder of the demo model and of compiled GPU kernels; without it
edge-transformer in XDG_CACHE_HOME, or in ~/.cache), HF_HOME, HF_TOKEN, HF_ENDPOINT,
HF_HUB_OFFLINE (hub models), ETE_THREADS (CPU threads, unless --threads says),
ETE_CPU_ISA (force an instruction set), ETE_API_KEY (of the server), NO_COLOR.
"""


@contextlib.contextmanager
def exit_codes() -> Iterator[None]:
    """Turn what ends a command early into a message, where there is something to say, and its exit code."""
    try:
        yield
    except EdgeTransformerError as error:
        click.echo(f"Error: {error}", err=True)
        raise click.exceptions.Exit(error.exit_code) from error
    except KeyboardInterrupt as error:
        raise click.exceptions.Exit(INTERRUPTED) from error
    except MemoryError as error:  # of Python, numpy or the tokenizer; the engine names what it asks for
        reason = f" ({error})" if str(error) else ""
        click.echo(
            f"Error: the system refused memory{reason}: free some, or use a smaller model or a shorter context (--ctx)",
            err=True,
        )
        raise click.exceptions.Exit(CapacityError.exit_code) from error
    except BrokenPipeError as error:
        _discard_output()
        raise click.exceptions.Exit(BROKEN_PIPE) from error
    except OSError as error:
        full = error.errno in DISK_FULL
        _discard_output()
        click.echo(f"Error: {system_reason(error)}{'; make room, or write elsewhere' if full else ''}", err=True)
        raise click.exceptions.Exit(CapacityError.exit_code if full else 1) from error


def _discard_output() -> None:
    """Send what is still buffered nowhere: without this the interpreter would fail at exit to write it."""
    if sys.stdout is sys.__stdout__ and sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(COMMANDS[cmd_name][0]).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        with exit_codes():
            return super().make_context(info_name, args, parent, **extra)

    def invoke(self, ctx: click.Context) -> object:
        with exit_codes():
            return super().invoke(ctx)


@click.group(
    cls=LazyGroup,
    epilog=EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(edge_transformer.__version__, prog_name="ete", message="%(prog)s %(version)s")
def ete() -> None:
    """Run language models in fp32 arithmetic, in little memory.

    \b
    ete run demo "Why is the sky blue?"
    ete chat demo
    """


def main() -> None:
    """Run the command that sys.argv gives."""
    _open_missing_streams()
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a character shows a question mark, and the program goes on.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
    name_standard_output()
    ete(prog_name="ete")


def _open_missing_streams() -> None:
    """A program started without standard input, output or error has them at /dev/null, also for native code.

    Otherwise the next file that is opened, a model say, would become one of them.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115  open until the end
