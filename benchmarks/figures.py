"""Figures: what was asked beside what was measured, kept as one JSON file a stage, and shown as one table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

NOT_RUN = "not run"
SHOWN_ERROR = 300


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. asked: in words, empty when it is only stated. met: None when nothing is asked, or what it
    is compared with was not run. terms: what the number is made of.
    """

    what: str
    value: float
    unit: str
    asked: str = ""
    met: bool | None = None
    terms: str = ""


def stated(what: str, value: float, unit: str, terms: str = "") -> Figure:
    """A figure that nothing is asked of."""
    return Figure(what, value, unit, terms=terms)


def at_least(what: str, value: float, least: float, unit: str, terms: str = "") -> Figure:
    return Figure(what, value, unit, f">= {least:g} {unit}".rstrip(), value >= least, terms)


def at_most(what: str, value: float, most: float, unit: str, terms: str = "") -> Figure:
    return Figure(what, value, unit, f"<= {most:g} {unit}".rstrip(), value <= most, terms)


def beside(what: str, ours: float, peer: float | None, least: float, unit: str, terms: str = "") -> list[Figure]:
    """Our figure, the peer's, and their ratio, of which at least `least` is asked."""
    if peer is None:
        return [Figure(what, ours, unit, f">= {least:g} x llama.cpp", None, terms)]
    ratio = ours / peer
    return [
        stated(what, ours, unit),
        stated(f"{what}: llama.cpp", peer, unit, terms),
        Figure(f"{what}: ratio", ratio, "x", f">= {least:g} x llama.cpp", ratio >= least),
    ]


@dataclass(frozen=True, slots=True)
class StageResult:
    """What a stage left. error: empty when it ended well; figures measured before an error are kept."""

    stage: str
    seconds: float
    figures: list[Figure] = field(default_factory=list)
    error: str = ""
    notes: str = ""


def save(folder: Path, result: StageResult) -> None:
    """One JSON file for the stage, written whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{result.stage}.partial"
    partial.write_text(json.dumps(asdict(result), indent=1))
    partial.rename(folder / f"{result.stage}.json")


def load(folder: Path, stage: str) -> StageResult | None:
    """What was stored of a stage; None when nothing readable was."""
    try:
        raw = json.loads((folder / f"{stage}.json").read_text())
        figures = [Figure(**figure) for figure in raw.pop("figures")]
        return StageResult(figures=figures, **raw)
    except (OSError, ValueError, TypeError, KeyError):
        return None


def table(folder: Path, stages: Sequence[str]) -> str:
    """A Markdown table, asked beside measured, of all stages in order; then what failed or was not run."""
    lines = ["| stage | figure | asked | measured | met | terms |", "|---|---|---|---|---|---|"]
    missing, errors = [], []
    for stage in stages:
        result = load(folder, stage)
        if result is None:
            missing.append(stage)
            continue
        if result.error:
            errors.append(f"- {stage}, after {result.seconds:.0f} s: {_line(result.error)[:SHOWN_ERROR]}")
        lines += [_row(stage, figure) for figure in result.figures]
    if errors:
        lines += ["", "Failed:", "", *errors]
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    return "\n".join(lines)


def summary(results: Iterable[StageResult]) -> str:
    """One line: stages, figures asked, met, missed."""
    results = list(results)
    asked = [figure for result in results for figure in result.figures if figure.met is not None]
    missed = [figure for figure in asked if not figure.met]
    failed = [result for result in results if result.error]
    return f"{len(results)} stages, {len(failed)} failed; {len(asked)} figures asked, {len(missed)} missed"


def number(value: float) -> str:
    """Three significant digits, or all digits of a larger number."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _row(stage: str, figure: Figure) -> str:
    met = {None: "", True: "yes", False: "**no**"}[figure.met]
    if figure.asked and figure.met is None:
        met = NOT_RUN
    cells = (stage, figure.what, figure.asked, f"{number(figure.value)} {figure.unit}".rstrip(), met, figure.terms)
    return "| " + " | ".join(_line(cell).replace("|", "\\|") for cell in cells) + " |"


def _line(text: str) -> str:
    return " ".join(text.split())
