"""Anonymous host memory."""

from pathlib import Path

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


def test_a_limit_of_the_address_space_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("edge_transformer.memory.resource.getrlimit", lambda _: (3 << 20, 5 << 20))
    with pytest.raises(CapacityError, match=r"MiB are available, and 3\.0 MiB of address space \(ulimit -v\): use"):
        HostMemory(1 << 60)


def test_memory_of_this_machine() -> None:
    assert 1 << 20 < memory.available_memory() < 1 << 50
    assert 0 <= memory.free_swap() < 1 << 50


MEMINFO = "MemTotal: 900 kB\nMemAvailable:     800 kB\nSwapFree:        7 kB\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def group(folder: Path, version: int, limit: str, usage: int, files: tuple[int, int]) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    prefix = "total_" if version == 1 else ""
    write(folder / names[0], f"{limit}\n")
    write(folder / names[1], f"{usage}\n")
    write(folder / "memory.stat", f"anon 5\n{prefix}inactive_file {files[0]}\n{prefix}active_file {files[1]}\n")


def test_memory_without_control_groups(tmp_path: Path) -> None:
    write(tmp_path / "proc/meminfo", MEMINFO)
    assert memory.available_memory(tmp_path) == 800 * 1024
    assert memory.free_swap(tmp_path) == 7 * 1024


@pytest.mark.parametrize("version", [1, 2])
def test_memory_that_control_groups_leave(tmp_path: Path, version: int) -> None:
    """The tightest on the path counts; pages of files can be given up."""
    write(tmp_path / "proc/meminfo", MEMINFO)
    line, mount = ("4:memory:/user/app", "memory") if version == 1 else ("0::/user/app", "")
    write(tmp_path / "proc/self/cgroup", f"9:name=systemd:/\n{line}\n")
    folder = tmp_path / "sys/fs/cgroup" / mount
    unlimited = "9223372036854771712" if version == 1 else "max"
    group(folder / "user", version, unlimited, 10_000, (0, 0))
    assert memory.available_memory(tmp_path) == 800 * 1024
    group(folder / "user/app", version, "300000", 250_000, (40_000, 5_000))
    assert memory.available_memory(tmp_path) == 300_000 - (250_000 - 45_000)
    group(folder / "user", version, "260000", 250_000, (0, 0))
    assert memory.available_memory(tmp_path) == 10_000
    group(folder / "user", version, "200000", 250_000, (10, 0))
    assert memory.available_memory(tmp_path) == 0
    group(folder / "user", version, "a lot", 1, (0, 0))
    write(folder / "user/app/memory.stat", "anon\n\n")
    assert memory.available_memory(tmp_path) == 800 * 1024


def test_two_memories_do_not_overlap() -> None:
    a, b = HostMemory(10000), HostMemory(10000)
    bytes_at(a.address, 10000)[:] = 1
    assert not bytes_at(b.address, 10000).any()
    assert np.abs(a.address - b.address) >= 10000
    a.close()
    b.close()
