"""`ete cache`: the GPU kernels that were compiled on this machine."""

from __future__ import annotations

import json

import click

from edge_transformer.cli.console import note, size


@click.command("cache", short_help="Show or clear the compiled GPU kernels.")
@click.option("--clear", is_flag=True, help="Delete them; they are compiled again when next needed.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list of objects with name, path and bytes.")
def command(clear: bool, as_json: bool) -> None:
    """Show the GPU kernels that were compiled for this machine's cards, or clear them.

    Kernels are compiled when a model first needs them and kept under ETE_CACHE. A new version of the engine or of the
    compiler leaves old ones behind, which does no harm.
    """
    from edge_transformer.cuda.cubin_cache import KernelCache
    from edge_transformer.hub.storage import using_cache

    cache = KernelCache()
    if clear:
        with using_cache():
            freed = cache.clear()
        note(f"cleared {cache.folder}: {size(freed)} freed")
        return
    kernels = cache.entries()
    if as_json:
        listed = [{"name": kernel.name, "path": str(kernel.path), "bytes": kernel.nbytes} for kernel in kernels]
        click.echo(json.dumps(listed))
        return
    if not kernels:
        note(f"No compiled kernels in {cache.folder}; a model's first run on a GPU makes them.")
        return
    names = [kernel.name for kernel in kernels]
    widest = max(map(len, names))
    for name in dict.fromkeys(names):
        nbytes = sum(kernel.nbytes for kernel in kernels if kernel.name == name)
        click.echo(f"{name:<{widest}}  {names.count(name):>4} variants  {size(nbytes):>10}")
    note(f"{len(kernels)} kernels, {size(sum(kernel.nbytes for kernel in kernels))}, in {cache.folder}")
