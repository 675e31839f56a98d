"""A host that refuses to page-lock the weights: a ring brings the same bits; a wait of it that is left out is found."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

from cuda.opened import MODES, ForgetfulGpu, model_path, open_on_gpu, pieces, tokens_of
from edge_transformer.cli.ledger import ledger
from edge_transformer.cuda import host_weights_feed, locked_ring
from edge_transformer.engine.core import Engine
from edge_transformer.errors import CapacityError, NumericError
from emulator import EmulatedGpu, RaceError
from emulator.memory import EmulatedMemory


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ring that even a tiny layer goes round several times; pieces of an odd size."""
    monkeypatch.setattr(
        host_weights_feed, "LockedRing", functools.partial(locked_ring.LockedRing, pieces=3, piece_bytes=5000)
    )


@pytest.mark.parametrize("wishes", ["all resident", "one resident, three slots", "all streamed, KV cache on the host"])
def test_a_host_that_refuses_page_locking_gives_the_same_bits(
    folder: Path, closing: list[Engine], small_ring: None, wishes: str
) -> None:
    path, tokens = model_path(folder, "gemma2"), tokens_of(40, 7)
    locked = open_on_gpu(path, MODES["all resident"])
    through_ring = open_on_gpu(path, MODES[wishes], gpu=EmulatedGpu(9, refuse_registration=True))
    closing += [locked.engine, through_ring.engine]
    assert np.array_equal(pieces(locked.engine, tokens, 64, 2), pieces(through_ring.engine, tokens, 17, 2))
    ring = through_ring.plan.ring
    assert locked.plan.ring is None
    assert ring is not None
    assert ring.ring_bytes == 3 * 5000
    assert ring.unlocked_bytes > 10000
    if wishes == "all resident":
        assert ring.bus_share is None
    else:
        assert ring.bus_share is not None
        assert 0 < ring.bus_share <= 1
    line = ledger(through_ring.plan).splitlines()[-1]
    assert "refuses to page-lock" in line
    assert "through a ring of 14.6 KiB" in line


def test_a_host_that_locks_only_a_part_gives_the_same_bits(
    folder: Path, closing: list[Engine], small_ring: None
) -> None:
    """Mapped files refused, re-arranged weights locked, as where a device cannot register read-only memory."""

    class _NoReadOnly(EmulatedGpu):
        def register_host(self, address, nbytes, read_only):  # type: ignore[no-untyped-def]
            return None if read_only else super().register_host(address, nbytes, read_only)

    path, tokens = model_path(folder, "llama"), tokens_of(40, 8)
    locked = open_on_gpu(path, MODES["all resident"])
    part = open_on_gpu(path, MODES["streamed by layers"], gpu=_NoReadOnly(2))
    closing += [locked.engine, part.engine]
    assert np.array_equal(pieces(locked.engine, tokens, 64, 2), pieces(part.engine, tokens, 64, 2))


@pytest.mark.parametrize(
    "forgotten", ["the ring for the slot", "the copy stream for the ring", "the host for the ring"]
)
@pytest.mark.parametrize("check_order", [True, False], ids=["by order", "by value"])
def test_a_wait_of_the_ring_left_out_is_found(
    folder: Path, small_ring: None, forgotten: str, check_order: bool
) -> None:
    """The host's own reads and writes are not among those whose order is checked: what it forgets shows by value."""
    tokens = tokens_of(24, 4)
    wishes = MODES["streamed by layers"]
    expected = pieces(open_on_gpu(model_path(folder, "llama"), wishes).engine, tokens, 64, 2)
    for seed in range(20):
        gpu = ForgetfulGpu(seed, check_order=check_order, refuse_registration=True)
        gpu.forgotten = {"the ring for the slot": "weight ring", "the copy stream for the ring": "weight copies"}.get(
            forgotten, ""
        )
        gpu.forgotten_by_host = "weight ring" if forgotten == "the host for the ring" else ""
        try:
            logits = pieces(open_on_gpu(model_path(folder, "llama"), wishes, gpu=gpu).engine, tokens, 64, 2)
        except (RaceError, NumericError):
            return
        if not np.array_equal(logits, expected):
            return
    pytest.fail(f"20 random orders without the waits of {forgotten} went unnoticed")


def test_a_host_that_refuses_even_the_ring_is_named(folder: Path) -> None:
    class _NoLockedMemory(EmulatedGpu):
        def allocate_host(self, nbytes: int, what: str) -> EmulatedMemory:
            if "ring" in what:
                raise CapacityError(f"{what}: the host refuses to page-lock {nbytes} bytes")
            return super().allocate_host(nbytes, what)

    gpu = _NoLockedMemory(1, refuse_registration=True)
    with pytest.raises(CapacityError, match=r"ring for weights that cannot be page-locked: .* 33554432 bytes"):
        open_on_gpu(model_path(folder, "llama"), MODES["streamed by layers"], gpu=gpu)
    assert "arena" not in gpu.open_memory()
