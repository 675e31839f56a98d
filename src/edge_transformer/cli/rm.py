"""`ete rm`: delete a downloaded model."""

from __future__ import annotations

import sys

import click

from edge_transformer.cli.console import note, size


@click.command("rm", short_help="Delete a downloaded model.")
@click.argument("name")
@click.option("--yes", "-y", is_flag=True, help="Do not ask.")
def command(name: str, yes: bool) -> None:
    """Delete NAME, as `ete list` shows it, from this machine.

    A hub id is deleted from the cache that all Hugging Face tools share; without a colon, all of the repository goes.
    Files that you named by a path are never touched. Asks first, unless --yes is given.
    """
    from edge_transformer import hub

    hub.require_pulled(name)
    if not yes:
        where = "this machine" if name == "demo" else "the cache that all Hugging Face tools share"
        if not sys.stdin.isatty():
            raise click.UsageError(f"This deletes {name} from {where}, and nobody is there to be asked; say --yes.")
        click.confirm(f"Delete {name} from {where}?", abort=True, err=True)
    note(f"deleted {name}: {size(hub.remove(name))} freed")
