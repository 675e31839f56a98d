"""A few seconds of fuzz.py; it says what it does."""

import pytest

from server.fuzz import FAMILIES, run


@pytest.mark.parametrize("family", FAMILIES)
def test_aborts_at_random_times_disturb_nobody(family: str) -> None:
    run(family, seed=7, seconds=2.5, report=lambda line: None)
