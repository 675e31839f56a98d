"""`ete verify`: is what this machine computes with a model right?"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from edge_transformer.cli.console import note, progress_bar

if TYPE_CHECKING:
    from edge_transformer.verify.chain import Finding

MISSED = 1


@click.command("verify", short_help="Check that a model is computed right on this machine.")
@click.argument("model")
@click.option("--quick", is_flag=True, help="Fewer tokens, and no link that takes minutes: the demo model in a minute.")
@click.option("--threads", metavar="N", type=click.IntRange(1), help="CPU threads (default: all there are).")
@click.option("--device", metavar="N", type=click.IntRange(0), default=0, show_default=True, help="Which GPU.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object when done, instead of lines.")
@click.option("--offline", is_flag=True, help="Use only what is on this machine.")
@click.pass_context
def command(
    context: click.Context, /, model: str, quick: bool, threads: int | None, device: int, as_json: bool, offline: bool
) -> None:
    """Run every link of the correctness chain that this machine can run with MODEL (a folder, a .gguf file, a hub id,
    or `demo`): transformers, numpy, the CPU, the emulated GPU, the GPU in every placement.

    Each link computes the same tokens in two ways and compares all logits; one line says how far they were apart, what
    is allowed, and whether that was kept. A link that cannot run here says why. The exit code is 1 when a link was
    missed.
    """
    from edge_transformer import LLM
    from edge_transformer.verify.chain import find_links, run_link, summary

    findings: list[Finding] = []
    with progress_bar() as progress:
        llm = LLM(model, kv_dtype="f32", threads=threads, offline=offline, progress=progress)
    with llm:
        links = find_links(llm, threads, quick, device)
        width = max(len(link.name) for link in links)
        for link in links:
            with progress_bar(in_bytes=False) as progress:
                finding = run_link(link, progress)
            findings.append(finding)
            if not as_json:
                click.echo(_line(finding, width))
    if as_json:
        click.echo(json.dumps(_as_object(model, findings)))
    else:
        note(summary(findings))
    if any(finding.missed for finding in findings):
        context.exit(MISSED)


def _line(finding: Finding, width: int) -> str:
    from edge_transformer.verify.link import Status

    outcome = finding.outcome
    took = "" if outcome.status is Status.NOT_RUN else f", {finding.seconds:.1f} s"
    return f"{outcome.status:<8} {finding.name:<{width}}  {outcome.text}{took}"


def _as_object(model: str, findings: list[Finding]) -> dict[str, Any]:
    """What --json prints; the keys are documented in docs/verify.md."""
    links = [
        {
            "name": finding.name,
            "status": str(finding.outcome.status),
            "figure": finding.outcome.figure,
            "bound": finding.outcome.bound,
            "text": finding.outcome.text,
            "seconds": round(finding.seconds, 3),
        }
        for finding in findings
    ]
    return {"model": model, "passed": not any(finding.missed for finding in findings), "links": links}
