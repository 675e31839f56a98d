"""`ete info`: what a model is, from the headers of its files."""

from __future__ import annotations

import json
from typing import Any

import click

from edge_transformer.cli.console import size


@click.command("info", short_help="Say what a model is and whether it can run, without loading it.")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(context: click.Context, /, model: str, as_json: bool) -> None:
    """Describe MODEL: architecture, layers, formats and bytes of each part, KV cache, tokenizer, and whether it runs.

    Reads headers, configuration and tokenizer, no weights; downloads nothing. When the model would be refused, the
    reason is given and the exit code is that of the refusal (4: not supported, 6: tokenizer).
    """
    from edge_transformer import hub
    from edge_transformer.cli.description import describe

    description, refusal = describe(hub.resolve(model, offline=True))
    if as_json:
        click.echo(json.dumps({"model": model, **description}))
    else:
        click.echo("\n".join(_lines({"model": model, **description})))
    if refusal is not None:
        context.exit(refusal.exit_code)


def _lines(description: dict[str, Any]) -> list[str]:
    """The description for people: one fact a line."""
    rows: list[tuple[str, str]] = [
        ("model", f"{description['model']}  ({description['path']})"),
        (
            "files",
            f"{description['container']}, {description['files']} with {description['tensors']} tensors, "
            f"{size(description['bytes'])}",
        ),
    ]
    if description["quantization"] is not None:
        rows.append(("quantized", f"{description['quantization']}, by ete quantize"))
    if "architecture" in description:
        rows += _architecture_rows(description)
    for part, formats in description["parts"].items():
        rows.append((part, ", ".join(f"{name} {size(nbytes)}" for name, nbytes in formats.items())))
    if left_out := description.get("left_out"):
        more = f" and {len(left_out) - 1} more" if len(left_out) > 1 else ""
        rows.append(("", f"(not loaded: {left_out[0]}{more})"))
    if "tokenizer" in description:
        rows.append(("tokenizer", description["tokenizer"]))
        rows.append(("chat template", "yes" if description["chat_template"] else "no (only --raw)"))
    rows.append(("verdict", "runs" if description["runs"] else f"refused: {description['reason']}"))
    return [f"{name:<14} {value}" for name, value in rows]


def _architecture_rows(description: dict[str, Any]) -> list[tuple[str, str]]:
    kv = description["kv_bytes_per_token"]
    windows = [window for window in description["layer_windows"] if window is not None]
    rows = [
        ("architecture", f"{description['architecture']}, {description['parameters'] / 1e6:,.1f} M parameters"),
        (
            "layers",
            f"{description['layers']} x hidden {description['hidden_size']}, MLP {description['intermediate_size']}",
        ),
        (
            "attention",
            f"{description['heads']} heads, {description['kv_heads']} KV heads, head size {description['head_dim']}",
        ),
        ("vocabulary", f"{description['vocab_size']:,}{', tied embeddings' if description['tied_embeddings'] else ''}"),
        ("context", f"{description['context_length']:,} tokens"),
        ("KV cache", f"{size(kv['bf16'])} a token in bf16, {size(kv['f32'])} in f32"),
    ]
    if description["gated_delta_layers"]:
        recurrent = f"{description['gated_delta_layers']} of {description['layers']} layers, gated delta rule"
        rows.append(("recurrent", f"{recurrent}; {size(description['recurrent_bytes'])} a sequence"))
    if windows:
        rows.append(("windows", f"{len(windows)} of {description['layers']} layers see {min(windows):,} tokens back"))
    return rows
