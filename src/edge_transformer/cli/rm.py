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
    Files that you named by a path are never touched.
    """
    from edge_transformer import hub

    if not yes and name != "demo":
        if not sys.stdin.isatty():
            raise click.UsageError("Other programs may use the shared cache too; say --yes to delete from it.")
        click.confirm(f"Delete {name} from the cache that all Hugging Face tools share?", abort=True, err=True)
    note(f"deleted {name}: {size(hub.remove(name))} freed")
