"""`ete pull`: download a model."""

from __future__ import annotations

import click

from edge_transformer.cli.console import progress_bar


@click.command("pull", short_help="Download a model, or bring it up to date.")
@click.argument("name")
def command(name: str) -> None:
    """Download NAME and print where it lies.

    NAME is `demo`, or a hub id: org/name, org/name:FILE.gguf or org/name:FORMAT (such as Q4_K_M). A download that was
    cut off goes on where it stopped.
    """
    from edge_transformer import hub

    with progress_bar() as progress:
        path = hub.pull(name, progress=progress)
    click.echo(path)
