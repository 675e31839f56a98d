"""How many processors this process may use: its affinity, cut by the CPU quota of its control groups (v1 and v2).

A pool with more threads than the quota pays for would be stopped by the kernel in the middle of a job, again and again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

MAX_THREADS = 1024


def usable_processors(root: Path = Path("/")) -> int:
    """Processors this process may keep busy, at least 1. `root` holds proc/ and sys/ (another folder in tests)."""
    quota = cgroup_quota(root)
    processors = len(os.sched_getaffinity(0))
    # A quota of 1.5 processors keeps one thread busy all the time; two would be stopped for a quarter of it.
    return processors if quota is None else max(1, min(processors, int(quota)))


def cgroup_quota(root: Path = Path("/")) -> float | None:
    """Processors that the tightest quota of this process's control groups and their parents allows; None: no quota."""
    quotas = []
    for controllers, group in _groups(root):
        if controllers == "":
            quotas += _quotas_above(root / "sys/fs/cgroup", group, _quota_v2)
        elif "cpu" in controllers.split(","):
            for mount in ("cpu", "cpu,cpuacct", "cpuacct,cpu"):
                quotas += _quotas_above(root / "sys/fs/cgroup" / mount, group, _quota_v1)
    return min(quotas, default=None)


def _groups(root: Path) -> list[tuple[str, str]]:
    """(controllers, path) of each control group of this process; controllers are empty for version 2."""
    text = _read(root / "proc/self/cgroup")
    fields = [line.split(":", 2) for line in (text or "").splitlines()]
    return [(parts[1], parts[2]) for parts in fields if len(parts) == 3]


def _quotas_above(mount: Path, group: str, quota_of: Callable[[Path], float | None]) -> list[float]:
    """Quotas of `group` and of every group above it. Inside a container the mount's own files may be all there is."""
    folder = mount
    found = [quota_of(folder)]
    for name in Path(group).parts[1:]:
        folder = folder / name
        found.append(quota_of(folder))
    return [quota for quota in found if quota is not None]


def _quota_v2(folder: Path) -> float | None:
    """cpu.max holds "quota period" in microseconds, or "max period"."""
    fields = (_read(folder / "cpu.max") or "").split()
    if len(fields) != 2 or fields[0] == "max":
        return None
    return _ratio(fields[0], fields[1])


def _quota_v1(folder: Path) -> float | None:
    """cpu.cfs_quota_us is -1 without a quota."""
    quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
    return None if quota is None or period is None else _ratio(quota, period)


def _ratio(quota: str, period: str) -> float | None:
    try:
        allowed, length = int(quota), int(period)
    except ValueError:
        return None
    return allowed / length if allowed > 0 and length > 0 else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
