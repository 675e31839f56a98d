"""How many processors this process may use: its affinity, cut by the CPU quota of its control groups (v1 and v2).

A pool with more threads than the quota pays for would be stopped by the kernel in the middle of a job, again and again.
"""

from __future__ import annotations

import os
from pathlib import Path

from edge_transformer.control_groups import limiting_groups, read_text

MAX_THREADS = 1024


def usable_processors(root: Path = Path("/")) -> int:
    """Processors this process may keep busy, at least 1. `root` holds proc/ and sys/ (another folder in tests)."""
    quota = cgroup_quota(root)
    processors = len(os.sched_getaffinity(0))
    # A quota of 1.5 processors keeps one thread busy all the time; two would be stopped for a quarter of it.
    return processors if quota is None else max(1, min(processors, int(quota)))


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Processors that the tightest quota of this process's control groups and their parents allows; None: no quota."""
    quota_of = {1: _quota_v1, 2: _quota_v2}
    quotas = [quota_of[version](folder) for folder, version in limiting_groups("cpu", root)]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota_v2(folder: Path) -> float | None:
    """cpu.max holds "quota period" in microseconds, or "max period"."""
    fields = (read_text(folder / "cpu.max") or "").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return _ratio(fields[0], fields[1])


def _quota_v1(folder: Path) -> float | None:
    """cpu.cfs_quota_us is -1 without a quota."""
    quota, period = read_text(folder / "cpu.cfs_quota_us"), read_text(folder / "cpu.cfs_period_us")
    return None if quota is None or period is None else _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    try:
        allowed, length = int(quota), int(period)
    except ValueError:
        return None
    return allowed / length if allowed > 0 and length > 0 else None
