"""A link of the chain, and what came of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from edge_transformer.hub.progress import Progress


class Status(StrEnum):
    PASSED = "passed"
    MISSED = "missed"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class Outcome:
    """figure, bound: numbers where there are some; text: both in words, or why the link did not run."""

    status: Status
    text: str
    figure: float | None = None
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class Link:
    """`run` computes it; it may raise an EdgeTransformerError, which is a miss."""

    name: str
    run: Callable[[Progress], Outcome]


def not_run(reason: str) -> Outcome:
    """A link that this machine or this model cannot run."""
    return Outcome(Status.NOT_RUN, reason)


def judged(passed: bool, text: str, figure: float, bound: float) -> Outcome:
    """A link that ran."""
    return Outcome(Status.PASSED if passed else Status.MISSED, text, figure, bound)
