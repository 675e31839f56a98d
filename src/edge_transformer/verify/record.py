"""What is kept of the logits of a run, and how two of them are compared.

Bounds are those of the correctness chain: |difference of a logit| <= 1e-5 * max(1, largest |logit|) between executors;
for the ten likeliest tokens of a position |difference of log-probability| < 1e-4, for the token that follows < 1e-3.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edge_transformer.verify.link import Outcome, judged

Logits = npt.NDArray[np.float32]

LOGIT_BOUND = 1e-5
TOP10_BOUND = 1e-4
NLL_BOUND = 1e-3

KEPT_NUMBERS = 1 << 24
"""Logits that a record keeps as numbers, about; of the other positions it keeps digests."""

KEPT_LAST = 16
"""Positions at the end that it keeps in any case."""


@dataclass(slots=True)
class Record:
    """Of a prompt's positions: a digest of each one's logits, and the logits of some: spread evenly, and the last."""

    tokens: list[int]
    vocabulary: int
    digests: dict[int, bytes] = field(default_factory=dict)
    logits: dict[int, Logits] = field(default_factory=dict)
    _kept: frozenset[int] = field(init=False)

    def __post_init__(self) -> None:
        count, last = max(KEPT_LAST, KEPT_NUMBERS // self.vocabulary), len(self.tokens) - 1
        evenly = np.linspace(0, last, min(count, last + 1)).astype(int).tolist()
        self._kept = frozenset([*evenly, *range(max(0, last + 1 - KEPT_LAST), last + 1)])

    def add(self, position: int, row: Logits) -> None:
        self.digests[position] = hashlib.blake2b(row.tobytes(), digest_size=16).digest()
        if position in self._kept:
            self.logits[position] = row.copy()


def same_bits(expected: Sequence[Record], got: Sequence[Record]) -> Outcome:
    """Every position of every prompt has the same bits."""
    pairs = list(zip(expected, got, strict=True))
    positions = sum(len(record.digests) for record in got)
    different = sum(a.digests.get(at) != digest for a, b in pairs for at, digest in b.digests.items())
    error = max((_relative_error(a, b) for a, b in pairs), default=0.0)
    text = f"{positions} positions, bit for bit"
    if different:
        text = f"{different} of {positions} positions differ, logits by {error:.1e}, where no bit may"
    return judged(different == 0 and positions > 0, text, error, 0.0)


def same_to_rounding(expected: Sequence[Record], got: Sequence[Record]) -> Outcome:
    """Positions whose logits both have kept agree within the bounds of the chain."""
    pairs = list(zip(expected, got, strict=True))
    error = max(_relative_error(a, b) for a, b in pairs)
    probabilities = [_probability_errors(a, b) for a, b in pairs]
    top10, nll = (max(column) for column in zip(*probabilities, strict=True))
    positions = sum(len(a.logits.keys() & b.logits.keys()) for a, b in pairs)
    text = (
        f"logits {error:.1e} of {LOGIT_BOUND:.0e}, top 10 {top10:.1e} of {TOP10_BOUND:.0e}, "
        f"likelihood {nll:.1e} of {NLL_BOUND:.0e} at {positions} positions"
    )
    return judged(error <= LOGIT_BOUND and top10 < TOP10_BOUND and nll < NLL_BOUND, text, error, LOGIT_BOUND)


def mean_divergence(expected: Record, got: Record) -> float:
    """Mean Kullback-Leibler divergence from `expected` to `got`, in nats, over the kept positions."""
    divergences = [
        float((np.exp(exact) * (exact - log_probabilities(got.logits[at]))).sum())
        for at, exact in ((at, log_probabilities(row)) for at, row in expected.logits.items())
    ]
    return float(np.mean(divergences))


def log_probabilities(logits: Logits) -> npt.NDArray[np.float64]:
    """f64 [V], of logits f32 [V]."""
    wide = logits.astype(np.float64)
    wide -= wide.max()
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def _relative_error(expected: Record, got: Record) -> float:
    """Largest |difference| over max(1, largest |logit|), at the positions that both have kept."""
    both = expected.logits.keys() & got.logits.keys()
    largest = max([1.0, *(float(np.abs(expected.logits[at]).max()) for at in both)])
    return max([0.0, *(float(np.abs(expected.logits[at] - got.logits[at]).max()) for at in both)]) / largest


def _probability_errors(expected: Record, got: Record) -> tuple[float, float]:
    """Largest difference of log-probability of the ten likeliest tokens, and of the token that follows."""
    top10 = nll = 0.0
    for at in expected.logits.keys() & got.logits.keys():
        exact, ours = log_probabilities(expected.logits[at]), log_probabilities(got.logits[at])
        difference = np.abs(exact - ours)
        likeliest = np.argpartition(exact, -min(10, len(exact)))[-10:]
        top10 = max(top10, float(difference[likeliest].max()))
        if at + 1 < len(expected.tokens):
            nll = max(nll, float(difference[expected.tokens[at + 1]]))
    return top10, nll
