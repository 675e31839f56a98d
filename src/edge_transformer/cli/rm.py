"""`ete rm`: delete a downloaded model."""

from __future__ import annotations

import sys

import click

from edge_transformer.cli.console import note, size


@click.command("rm", short_help="Delete a downloaded model.")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask; needed where standard input is no terminal.")
@click.pass_context
def command(context: click.Context, /, name: str, yes: bool) -> None:
    """Delete NAME, as `ete list` shows it, from this machine.

    A hub id is deleted from the cache that all Hugging Face tools share; without a colon, all of the repository goes.
    Files that you named by a path are never touched.

    Asks first, which needs a terminal: an answer from a pipe is not read. --yes goes without. Where the answer is not
    yes, nothing is deleted, and the exit code is 1.
    """
    from edge_transformer import hub

    hub.require_pulled(name)
    if not yes:
        where = "this machine" if name == "demo" else "the cache that all Hugging Face tools share"
        if not sys.stdin.isatty():
            raise click.UsageError(
                f"This deletes {name} from {where}, and nobody is there to be asked: standard input is no terminal. "
                "Say --yes (-y)."
            )
        if not _confirmed(f"Delete {name} from {where}?"):
            note("nothing was deleted")
            context.exit(1)
    note(f"deleted {name}: {size(hub.remove(name))} freed")


def _confirmed(question: str) -> bool:
    """Raises KeyboardInterrupt for Ctrl-C, which click reports as it does Ctrl-D."""
    try:
        return click.confirm(question, err=True)
    except click.Abort as error:
        note("")  # the question's line has no end yet
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from None
        return False
