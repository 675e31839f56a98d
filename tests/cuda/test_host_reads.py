"""Page-locked memory read by a kernel: every byte of every row arrives, and none beside them is written."""

from __future__ import annotations

import numpy as np
import pytest

from edge_transformer.cuda.host_reads import LOADS_OF_A_THREAD, THREADS, HostReads, Rows
from edge_transformer.ops.tensor import array_at
from emulator.gpu import EmulatedGpu

OF_A_BLOCK = THREADS * LOADS_OF_A_THREAD
POISON = 0xA5


@pytest.mark.parametrize("word", [4, 16])
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize(
    "words", [1, 31, THREADS - 1, THREADS, THREADS + 1, OF_A_BLOCK - 1, OF_A_BLOCK, OF_A_BLOCK + 1, 3 * OF_A_BLOCK + 7]
)
def test_rows_arrive(words: int, count: int, word: int) -> None:
    random = np.random.default_rng()
    gpu = EmulatedGpu(int(random.integers(1 << 30)), order="both")
    stream, reads = gpu.stream("compute"), HostReads(gpu)
    nbytes = words * word
    spare = [int(random.integers(4)) * word for _ in range(2)] if count > 1 else [0, 0]
    rows = Rows(count, nbytes, nbytes + spare[0], nbytes + spare[1])
    before = word  # so that neither side begins on a border of 256
    host = gpu.allocate_host(before + count * rows.source_pitch, "source")
    device = gpu.allocate(before + count * rows.destination_pitch + word, "destination")
    landing = gpu.allocate_host(device.nbytes, "what arrived")
    contents = random.integers(0, 256, host.nbytes, np.uint8)
    array_at(host.address, (host.nbytes,), np.uint8)[...] = contents
    gpu.fill(device.address, device.nbytes, POISON, stream)
    reads.read_rows(device.address + before, host.address + before, rows, stream)
    gpu.copy(landing.address, device.address, device.nbytes, stream)
    gpu.synchronize()

    expected = np.full(device.nbytes, POISON, np.uint8)
    for row in range(count):
        to, of = before + row * rows.destination_pitch, before + row * rows.source_pitch
        expected[to : to + nbytes] = contents[of : of + nbytes]
    assert np.array_equal(array_at(landing.address, (landing.nbytes,), np.uint8), expected)


def test_what_is_no_whole_words_is_refused() -> None:
    gpu = EmulatedGpu(1)
    host, device = gpu.allocate_host(64, "source"), gpu.allocate(64, "destination")
    with pytest.raises(ValueError, match="not all are multiples of 4"):
        HostReads(gpu).read(device.address, host.address, 6, gpu.stream("compute"))
