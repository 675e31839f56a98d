"""Anonymous host memory."""

import numpy as np
import pytest

from edge_transformer import memory
from edge_transformer.engine.kv import HostTileMemory
from edge_transformer.errors import CapacityError
from edge_transformer.memory import HUGE_PAGE_BYTES, HostMemory, bytes_at


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4095, 4097, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_memory_is_zero_writable_and_aligned(nbytes: int, huge_pages: bool) -> None:
    room = HostMemory(nbytes, huge_pages)
    assert room.nbytes == nbytes
    assert room.address % (HUGE_PAGE_BYTES if huge_pages and nbytes >= HUGE_PAGE_BYTES else 4096) == 0
    view = bytes_at(room.address, nbytes)
    assert not view.any()
    view[:] = 7
    assert (view == 7).all()
    room.close()
    room.close()


def test_refusals_name_the_bytes_asked() -> None:
    with pytest.raises(CapacityError, match=str(1 << 60)):
        HostMemory(1 << 60)
    with pytest.raises(CapacityError, match=str(1 << 70)):
        HostMemory(1 << 70)
    with pytest.raises(ValueError, match="at least 1 byte"):
        HostMemory(0)


def test_refusals_name_what_it_is_for_what_is_free_and_what_to_lower(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_memory", lambda: 5 << 20)
    with pytest.raises(CapacityError, match=r"^KV cache: .* 5\.0 MiB are available: .*--ctx"):
        HostTileMemory().allocate(1 << 60)
    with pytest.raises(CapacityError, match=r"^recurrent state: the system refused 1152921504606846976 bytes"):
        HostTileMemory("recurrent state").allocate(1 << 60)


def test_memory_of_this_machine() -> None:
    assert 1 << 20 < memory.available_memory() < 1 << 50
    assert 0 <= memory.free_swap() < 1 << 50


def test_two_memories_do_not_overlap() -> None:
    a, b = HostMemory(10000), HostMemory(10000)
    bytes_at(a.address, 10000)[:] = 1
    assert not bytes_at(b.address, 10000).any()
    assert np.abs(a.address - b.address) >= 10000
    a.close()
    b.close()
