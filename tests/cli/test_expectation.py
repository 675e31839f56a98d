"""What is said before a big model answers."""

from types import SimpleNamespace
from typing import Any

import pytest

from edge_transformer.cli import expectation as module
from edge_transformer.cli.expectation import available_memory, expectation, read_rate
from edge_transformer.placement.plan import Rates, RingCost


def model(mapped: int, rearranged: int) -> Any:
    return SimpleNamespace(plan=None, memory={"weights_mapped": mapped, "weights_rearranged": rearranged})


def test_a_small_model_needs_no_word_and_costs_no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "read_rate", lambda: pytest.fail("measured"))
    assert expectation(model(1 << 30, 1 << 29)) is None


def test_a_big_model_has_its_rate_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 10 << 30)
    monkeypatch.setattr(module, "read_rate", lambda: 10e9)
    said = expectation(model(4 << 30, 0))
    assert said is not None
    assert "about 2.3 tok/s" in said  # 10e9 / 4.29e9
    assert "4.00 GiB" in said


def test_a_model_bigger_than_memory_says_what_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 10 << 30)
    said = expectation(model(14 << 30, 0))
    assert said is not None
    assert "about 4.00 GiB are read from the disk again for every token" in said
    assert "do not fit" not in (expectation(model(6 << 30, 14 << 30)) or "")


def on_a_gpu(streamed: int, bus: float | None, ring: bool = False) -> Any:
    rates = None if bus is None else Rates(bus, 1e9)
    plan = SimpleNamespace(streamed_bytes=streamed, rates=rates, ring=RingCost(1, 1, 0.5) if ring else None)
    return SimpleNamespace(plan=plan, memory={"weights_mapped": 20 << 30, "weights_rearranged": 1 << 30})


def test_a_model_streamed_to_a_gpu_has_its_rate_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights are page-locked: they take no memory that is still available."""
    monkeypatch.setattr(module, "available_memory", lambda: 1 << 30)
    said = expectation(on_a_gpu(7 << 30, 12e9))
    assert said is not None
    assert "up to 1.6 tok/s" in said  # 12e9 / 7.52e9
    assert "7.00 GiB" in said
    assert expectation(on_a_gpu(1 << 20, 12e9)) is None
    assert expectation(on_a_gpu(0, None)) is None
    assert expectation(on_a_gpu(7 << 30, None)) is None


def test_weights_beyond_memory_that_a_gpu_cannot_lock_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "available_memory", lambda: 4 << 30)
    said = expectation(on_a_gpu(7 << 30, None, ring=True))
    assert said is not None
    assert "about 2.00 GiB are read from the disk again for every token" in said
    assert expectation(on_a_gpu(3 << 30, None, ring=True)) is None


def test_the_measurements_are_of_this_machine() -> None:
    assert 1 << 20 < available_memory() < 1 << 50
    assert 1e8 < read_rate() < 1e12
