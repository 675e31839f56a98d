"""The line of statistics behind an answer: what was read, what was kept, and why the answer ended."""

import pytest

from edge_transformer.cli.console import statistics
from edge_transformer.engine.generation import Generation, Timings


@pytest.mark.parametrize(
    ("reason", "processed", "generated", "beginning"),
    [
        ("stop", 700, 5, "prompt 700 tokens, 350.0 tok/s | answer 5 tokens, 2.0 tok/s | load"),
        ("stop", 100, 5, "prompt 700 tokens (600 kept), 50.0 tok/s | answer 5 tokens, 2.0 tok/s | load"),
        (
            "length",
            700,
            5,
            "prompt 700 tokens, 350.0 tok/s | answer 5 tokens (ended by --max-tokens), 2.0 tok/s",
        ),
        (
            "context",
            700,
            5,
            "prompt 700 tokens, 350.0 tok/s | answer 5 tokens (ended by a full context), 2.0 tok/s | load",
        ),
        ("interrupted", 512, 0, "prompt 700 tokens, interrupted after reading 512, 256.0 tok/s | answer 0 tokens"),
        ("interrupted", 700, 3, "prompt 700 tokens, 350.0 tok/s | answer 3 tokens, 1.0 tok/s | load"),
    ],
)
def test_statistics(reason: str, processed: int, generated: int, beginning: str) -> None:
    timings = Timings(0.5, 2.0, 2.0, 700, processed, generated)
    assert statistics(Generation((), (), "", reason, None, 0, timings)).startswith(beginning)
