"""`ete list`: the downloaded models."""

from __future__ import annotations

import json

import click

from edge_transformer.cli.console import note, size


@click.command("list", short_help="List the downloaded models.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects with name, path and bytes.")
def command(as_json: bool) -> None:
    """List the models that are complete on this machine: the demo, and those in the Hugging Face cache."""
    from edge_transformer import hub

    models = hub.list_models()
    if as_json:
        listed = [{"name": model.name, "path": str(model.path), "bytes": model.nbytes} for model in models]
        click.echo(json.dumps(listed))
        return
    if not models:
        note("No models yet; `ete pull demo` downloads one.")
        return
    widest = max(len(model.name) for model in models)
    for model in models:
        click.echo(f"{model.name:<{widest}}  {size(model.nbytes):>10}  {model.path}")
