"""Compiling kernels and keeping them, with real NVRTC where it is installed; no GPU."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from cuda.cache_writer import write_and_read
from cuda.kernel_sources import basic
from edge_transformer.cuda import compiler
from edge_transformer.cuda.compiler import KERNEL_FOLDER, compile_all, compile_kernel
from edge_transformer.cuda.cubin_cache import SUFFIX, KernelCache
from edge_transformer.cuda.runtime import KernelSource
from edge_transformer.errors import GpuError

# ---- the cache, by itself


def test_cache_gives_back_what_was_put(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path / "new" / "folder")
    assert cache.get("norm-sm_90", "abc") is None
    assert cache.entries() == []
    content = os.urandom(1000)
    cache.put("norm-sm_90", "abc", content)
    cache.put("norm-sm_90", "abd", b"")
    assert cache.get("norm-sm_90", "abc") == content
    assert cache.get("norm-sm_90", "abd") == b""
    assert cache.get("norm-sm_80", "abc") is None
    assert [entry.name for entry in cache.entries()] == ["norm-sm_90", "norm-sm_90"]
    assert cache.clear() == sum(entry.nbytes for entry in cache.entries()) or cache.entries() == []
    assert list(cache.folder.iterdir()) == []


@pytest.mark.parametrize("damage", ["cut", "empty", "bit", "header", "longer"])
def test_damaged_entries_are_absent(tmp_path: Path, damage: str) -> None:
    cache = KernelCache(tmp_path)
    cache.put("norm", "abc", bytes(range(200)))
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    stored = bytearray(path.read_bytes())
    if damage == "bit":
        stored[-7] ^= 4
    elif damage == "header":
        stored[3] ^= 1
    changed = {"cut": stored[:-1], "empty": b"", "longer": stored + b"x"}.get(damage, stored)
    path.write_bytes(changed)
    assert cache.get("norm", "abc") is None
    assert not path.exists()
    cache.put("norm", "abc", b"again")
    assert cache.get("norm", "abc") == b"again"


def test_processes_share_a_cache(tmp_path: Path) -> None:
    with ProcessPoolExecutor(3, multiprocessing.get_context("spawn")) as pool:
        assert list(pool.map(write_and_read, [tmp_path] * 3)) == [0, 0, 0]
    assert not list(tmp_path.glob("*.tmp"))


def test_names_stay_in_the_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a name"):
        KernelCache(tmp_path).put("../norm", "abc", b"")


def test_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ETE_CACHE", str(tmp_path))
    assert KernelCache().folder == tmp_path / "kernels"


# ---- what is said when something is missing


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(compiler, "_nvrtc", compiler._nvrtc.__wrapped__)
    with pytest.raises(GpuError, match=r"not installed .*pip install 'edge-transformer-engine\[cuda\]'"):
        compiler._nvrtc()


# ---- with NVRTC


@pytest.fixture
def nvrtc() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")


@pytest.mark.usefixtures("nvrtc")
def test_compiling_and_the_report(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    told: list[tuple[str, int, int]] = []

    def progress(what: str, done: int, total: int) -> None:
        told.append((what, done, total))

    sources = [basic("block_sum", 256), basic("scale_add")]
    first = compile_all(sources, 80, cache=cache, progress=progress)
    assert [kernel.source for kernel in first] == sources
    assert [kernel.target for kernel in first] == ["sm_80", "sm_80"]
    assert all(kernel.code.startswith(b"\x7fELF") for kernel in first)
    assert first[0].resources is not None
    assert first[0].resources.shared_bytes == 256 // 32 * 4
    assert 8 <= first[0].resources.registers <= 64
    assert first[0].resources.spill_store_bytes == 0
    assert told[0] == ("compiling block_sum", 0, 2)
    assert told[-1][1:] == (2, 2)

    told.clear()
    assert compile_all(sources, 80, cache=cache, progress=progress) == first
    assert told == []
    assert len(cache.entries()) == 2


@pytest.mark.usefixtures("nvrtc")
def test_a_forced_path_is_compiled_for_the_card(tmp_path: Path) -> None:
    source = KernelSource(str(tmp_path / "path.cu"), "path", 32)
    (tmp_path / "path.cu").write_text(
        '#include "prelude.cuh"\nextern "C" __global__ void ETE_LAUNCH_BOUNDS path(int *out) {\n'
        '#if ETE_ARCH != 75 || __CUDA_ARCH__ != 900\n#error "another path"\n#endif\n  out[0] = ETE_THREADS; }\n'
    )
    assert compile_kernel(source, 75, (9, 0)).target == "sm_90"
    with pytest.raises(GpuError, match=r"path.cu: path does not compile with -arch=sm_75 .*\n(.*\n)*.*another path"):
        compile_kernel(source, 75)


@pytest.mark.usefixtures("nvrtc")
@pytest.mark.parametrize(
    ("arch", "target"), [(75, "sm_75"), (87, "sm_87"), (90, "sm_90"), (85, "sm_80"), (199, "compute_")]
)
def test_targets(arch: int, target: str) -> None:
    assert compiler._target(arch).startswith(target)


@pytest.mark.usefixtures("nvrtc")
def test_a_card_that_is_too_old() -> None:
    with pytest.raises(GpuError, match=r"compute capability 6.1; the kernels need 7.5"):
        compile_kernel(basic("scale_add"), 61)


@pytest.mark.usefixtures("nvrtc")
def test_an_unknown_card_gets_ptx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "_supported", lambda: (75, 80, 90))
    kernel = compile_kernel(basic("scale_add"), 120)
    assert kernel.target == "compute_90"
    assert b".entry scale_add" in kernel.code
    assert kernel.resources is None


@pytest.mark.usefixtures("nvrtc")
def test_whatever_goes_in_changes_the_key(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    shutil.copytree(KERNEL_FOLDER, folder)
    (folder / "deep.cuh").write_text("// 1\n")
    (folder / "shallow.cuh").write_text('#include "deep.cuh"\n')
    main = '#include "prelude.cuh"\n#include "shallow.cuh"\nextern "C" __global__ void f(int *out) { out[0] = 1; }\n'
    (folder / "f.cu").write_text(main)
    cache = KernelCache(tmp_path / "cache")
    source = KernelSource("f.cu", "f", 32)

    def entries(changed: KernelSource = source, arch: int = 80, capability: tuple[int, int] | None = None) -> int:
        compile_kernel(changed, arch, capability, cache, folder)
        return len(cache.entries())

    assert entries() == 1
    assert entries() == 1
    (folder / "deep.cuh").write_text("// 2\n")
    assert entries() == 2
    (folder / "f.cu").write_text(main + "\n")
    assert entries() == 3
    assert entries(KernelSource("f.cu", "f", 64)) == 4
    assert entries(KernelSource("f.cu", "f", 32, (("ETE_X", "1"),))) == 5
    assert entries(arch=75, capability=(8, 0)) == 6
    assert entries() == 6


@pytest.mark.usefixtures("nvrtc")
def test_a_damaged_entry_is_compiled_again(tmp_path: Path) -> None:
    cache = KernelCache(tmp_path)
    first = compile_kernel(basic("scale_add"), 75, cache=cache)
    (path,) = (entry.path for entry in cache.entries())
    path.write_bytes(path.read_bytes()[:-100])
    assert compile_kernel(basic("scale_add"), 75, cache=cache) == first
    assert path.exists()


@pytest.mark.usefixtures("nvrtc")
def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="compiled at every start; ETE_CACHE names another folder"):
        kernel = compile_kernel(basic("scale_add"), 75, cache=KernelCache(tmp_path / "file" / "kernels"))
    assert kernel.code.startswith(b"\x7fELF")


@pytest.mark.usefixtures("nvrtc")
def test_a_missing_source() -> None:
    with pytest.raises(GpuError, match=r"absent.cu cannot be read"):
        compile_kernel(KernelSource("absent.cu", "f", 32), 75)
