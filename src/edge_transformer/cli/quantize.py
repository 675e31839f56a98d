"""`ete quantize`: a smaller model, whose weights are used where they lie in the file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edge_transformer.cli.console import note, progress_bar, size

if TYPE_CHECKING:
    from edge_transformer.engine.quantize import QuantizationReport, TensorReport


@click.command("quantize", short_help="Make a smaller model of int8 or int4 weights.")
@click.argument("model")
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_name",
    type=click.Choice(["int8", "int8-row", "int4"]),
    required=True,
    help="int8: a scale for 32 columns, 8.5 bits a weight. int8-row: a scale for a row, 8.0 bits. int4: a scale for "
    "--group columns, 4.25 bits with 64.",
)
@click.option(
    "--group",
    metavar="N",
    type=click.Choice(["32", "64", "128"]),
    help="With int4: columns that share a scale, 32, 64 or 128 (default: 64).",
)
@click.option(
    "--minimums",
    is_flag=True,
    help="With int4 and groups of 32: a minimum beside each scale, 5 bits a weight.",
)
@click.option("--threads", metavar="N", type=click.IntRange(1), help="CPU threads (default: all there are).")
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
def command(
    model: str,
    out: Path,
    format_name: str,
    group: str | None,
    minimums: bool,
    threads: int | None,
    as_json: bool,
    offline: bool,
) -> None:
    """Quantize the weights of MODEL into the new folder OUT.

    OUT is a model that every command takes. Embeddings and output projection become int8 in groups of 32 whatever the
    format; norms, biases and the small matrices of a recurrent state stay f32. A report of every tensor's error is in
    OUT/quantization.json.

    Interrupted, the same command goes on where it stopped (in OUT.partial). Nothing is overwritten.
    """
    from edge_transformer import hub
    from edge_transformer.engine.quantize import quantize_model, require_new_folder
    from edge_transformer.engine.quantize_plan import Quantization

    def planned(source_bytes: int, nbytes: int) -> None:
        if nbytes >= source_bytes:
            note(
                f"{out} will be no smaller than {model}, whose weights have few bits already: {format_name} takes more "
                "room and makes nothing more exact"
            )

    choice = Quantization(format_name, None if group is None else int(group), minimums)
    require_new_folder(out)
    with progress_bar() as progress:
        path = hub.resolve(model, offline=offline, progress=progress)
        try:
            report = quantize_model(path, out, choice, threads, progress, planned)
        except KeyboardInterrupt:
            note(f"interrupted; the same command goes on with {out}.partial")
            raise
    if as_json:
        click.echo(json.dumps({"path": str(out), **report.as_json()}))
        return
    click.echo("\n".join(_table(report)))
    for name in report.left_out[:5]:
        note(f"left out: {name}")
    if len(report.left_out) > 5:
        note(f"left out: {len(report.left_out) - 5} more, all in {out}/quantization.json")
    sizes = f"weights of {size(report.source_bytes)} became a file of {size(report.nbytes)}"
    click.echo(f"{out}: {report.quantization.description}; {sizes}")


def _table(report: QuantizationReport) -> list[str]:
    """A line for each role of a matrix: format, bytes, mean and largest error over the layers."""
    by_role: dict[tuple[str, str], list[TensorReport]] = {}
    for tensor in report.tensors:
        by_role.setdefault((tensor.role or "vectors", tensor.format), []).append(tensor)
    lines = [f"{'tensors':<12} {'format':<8} {'number':>6} {'size':>10}  {'relative RMS error':<22} largest error"]
    for (role, name), tensors in by_role.items():
        amount = f"{role:<12} {name:<8} {len(tensors):>6} {size(sum(tensor.nbytes for tensor in tensors)):>10}"
        errors = [tensor.error for tensor in tensors if tensor.error is not None]
        if not errors:
            lines.append(f"{amount}  as they were")
            continue
        relative = [error.relative_rms for error in errors]
        worst = max(error.largest for error in errors)
        lines.append(f"{amount}  {_mean(relative):.2e}, at most {max(relative):.2e}  {worst:.2e}")
    return lines


def _mean(values: Iterable[float]) -> float:
    numbers = list(values)
    return sum(numbers) / len(numbers)
