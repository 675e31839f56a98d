"""Anonymous host memory."""

import numpy as np
import pytest

from edge_transformer.errors import CapacityError
from edge_transformer.memory import HUGE_PAGE_BYTES, HostMemory, bytes_at


@pytest.mark.parametrize("huge_pages", [False, True])
@pytest.mark.parametrize("nbytes", [1, 4095, 4097, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_memory_is_zero_writable_and_aligned(nbytes: int, huge_pages: bool) -> None:
    memory = HostMemory(nbytes, huge_pages)
    assert memory.nbytes == nbytes
    assert memory.address % (HUGE_PAGE_BYTES if huge_pages and nbytes >= HUGE_PAGE_BYTES else 4096) == 0
    view = bytes_at(memory.address, nbytes)
    assert not view.any()
    view[:] = 7
    assert (view == 7).all()
    memory.close()
    memory.close()


def test_refusals_name_the_bytes_asked() -> None:
    with pytest.raises(CapacityError, match=str(1 << 60)):
        HostMemory(1 << 60)
    with pytest.raises(CapacityError, match=str(1 << 70)):
        HostMemory(1 << 70)
    with pytest.raises(ValueError, match="at least 1 byte"):
        HostMemory(0)


def test_two_memories_do_not_overlap() -> None:
    a, b = HostMemory(10000), HostMemory(10000)
    bytes_at(a.address, 10000)[:] = 1
    assert not bytes_at(b.address, 10000).any()
    assert np.abs(a.address - b.address) >= 10000
    a.close()
    b.close()
