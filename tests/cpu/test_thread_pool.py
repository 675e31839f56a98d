"""The pool's threads, what decides their number, and what happens to them in odd processes."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from edge_transformer import _native
from edge_transformer.cpu.settings import cpu_settings
from edge_transformer.cpu.threads import cgroup_quota, usable_processors
from edge_transformer.errors import UsageError


def total(pool: _native.ThreadPool, blocks: int) -> int:
    words = np.ones(blocks * 512, np.uint64)
    return _native.read_memory(pool, words.ctypes.data, words.nbytes)


@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_every_part_is_done_once(threads: int) -> None:
    """Busy, after a pause long enough to park, and with fewer parts than threads."""
    pool = _native.ThreadPool(threads)
    assert pool.threads == threads
    for blocks in (1, 2, 3, 64, 65, 1000):
        assert total(pool, blocks) == blocks * 512
    time.sleep(0.02)
    for _ in range(300):
        assert total(pool, 33) == 33 * 512
    for pause in (0.0001, 0.0002, 0.0003, 0.001):  # around the time at which workers park
        for _ in range(50):
            time.sleep(pause)
            assert total(pool, 10) == 10 * 512


def test_threads_end_with_the_pool() -> None:
    def running() -> int:
        return len(os.listdir("/proc/self/task"))

    before = running()
    pool = _native.ThreadPool(4)
    assert running() == before + 3
    del pool
    assert running() == before


def test_pools_side_by_side() -> None:
    failures: list[int] = []

    def work() -> None:
        pool = _native.ThreadPool(2)
        failures.extend(i for i in range(100) if total(pool, 40) != 40 * 512)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_forked_child_neither_hangs_nor_fails() -> None:
    """A child process has no workers: it computes alone and can drop the pool."""
    pool = _native.ThreadPool(3)
    assert total(pool, 100) == 100 * 512
    child = os.fork()
    if child == 0:
        right = total(pool, 100) == 100 * 512
        del pool
        own = _native.ThreadPool(2)
        right = right and total(own, 100) == 100 * 512
        os._exit(0 if right else 1)
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            assert os.waitstatus_to_exitcode(status) == 0
            break
        time.sleep(0.01)
    else:
        os.kill(child, 9)
        pytest.fail("the child process hangs")
    assert total(pool, 100) == 100 * 512


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_quota_of_version_2_is_the_tightest_on_the_path(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "0::/user/app\n")
    write(tmp_path / "sys/fs/cgroup/user/cpu.max", "150000 100000\n")
    write(tmp_path / "sys/fs/cgroup/user/app/cpu.max", "max 100000\n")
    assert cgroup_quota(tmp_path) == 1.5
    write(tmp_path / "sys/fs/cgroup/user/app/cpu.max", "50000 100000\n")
    assert cgroup_quota(tmp_path) == 0.5
    assert usable_processors(tmp_path) == 1


def test_quota_inside_a_container(tmp_path: Path) -> None:
    """The path in /proc is the host's; the container's own group is at the root of its mount."""
    write(tmp_path / "proc/self/cgroup", "0::/../somewhere/else\n")
    write(tmp_path / "sys/fs/cgroup/cpu.max", "200000 100000\n")
    assert cgroup_quota(tmp_path) == 2.0


def test_quota_of_version_1(tmp_path: Path) -> None:
    write(tmp_path / "proc/self/cgroup", "5:cpuset:/\n4:cpu,cpuacct:/docker/x\n1:name=systemd:/\n")
    folder = tmp_path / "sys/fs/cgroup/cpu,cpuacct"
    write(folder / "cpu.cfs_quota_us", "-1\n")
    write(folder / "cpu.cfs_period_us", "100000\n")
    assert cgroup_quota(tmp_path) is None
    write(folder / "docker/x/cpu.cfs_quota_us", "300000\n")
    write(folder / "docker/x/cpu.cfs_period_us", "100000\n")
    assert cgroup_quota(tmp_path) == 3.0


def test_no_quota_leaves_the_affinity(tmp_path: Path) -> None:
    assert cgroup_quota(tmp_path) is None
    assert usable_processors(tmp_path) == len(os.sched_getaffinity(0))


def test_settings() -> None:
    available = _native.available_instruction_sets()
    assert cpu_settings(environment={}).isa == available[-1]
    assert cpu_settings(environment={"ETE_CPU_ISA": "plain", "ETE_THREADS": "3"}) == cpu_settings("plain", 3, {})
    busy = {"ETE_CPU_ISA": "plain", "ETE_THREADS": "9"}
    assert cpu_settings(isa=available[-1], threads=1, environment=busy).threads == 1
    with pytest.raises(UsageError, match=r"ETE_CPU_ISA is 'avx9'.*plain"):
        cpu_settings(environment={"ETE_CPU_ISA": "avx9"})
    for text in ("0", "-1", "two", "1.5", "100000"):
        with pytest.raises(UsageError, match="ETE_THREADS"):
            cpu_settings(environment={"ETE_THREADS": text})


@pytest.mark.parametrize(("threads", "count"), [(1, 5), (3, 1), (3, 5)])
def test_a_job_that_throws_ends_the_process(tmp_path: Path, threads: int, count: int) -> None:
    """On whatever thread, and also where the caller does it all: no exception may be lost, or leave others at work."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    native = Path(__file__).parents[2] / "native"
    (tmp_path / "job.cpp").write_text(_THROWING_JOB)
    command = ["g++", "-std=c++20", "-pthread", f"-I{native}", "job.cpp", str(native / "thread_pool.cpp"), "-o", "job"]
    subprocess.run(command, cwd=tmp_path, check=True)
    ended = subprocess.run([tmp_path / "job", str(threads), str(count)], capture_output=True, timeout=30)
    assert ended.returncode == -signal.SIGABRT
    assert b"terminate called after throwing" in ended.stderr
    assert ended.stdout == b""


_THROWING_JOB = """
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

#include "thread_pool.hpp"

int main(int, char** arguments) {
  ete::ThreadPool pool(std::atoi(arguments[1]));
  const int64_t count = std::atoi(arguments[2]);
  try {
    pool.run(count, 1, [&](int, int64_t, int64_t end) {
      if (end == count) throw std::runtime_error("in a job");
    });
  } catch (const std::exception&) {
    std::puts("caught");
  }
}
"""
