"""The control groups (versions 1 and 2) that limit this process: of a container, of a service, of a user's session."""

from __future__ import annotations

from pathlib import Path

_MOUNTS_V1 = {"cpu": ("cpu", "cpu,cpuacct", "cpuacct,cpu"), "memory": ("memory",)}


def limiting_groups(controller: str, root: Path = Path("/")) -> list[tuple[Path, int]]:
    """(folder, version) of this process's group of `controller` ("cpu", "memory") and of every group above it. `root`
    holds proc/ and sys/ (another folder in tests). Inside a container the mount's own files may be all there is.
    """
    found: list[tuple[Path, int]] = []
    for controllers, group in _groups(root):
        if controllers == "":
            found += [(folder, 2) for folder in _down_to(root / "sys/fs/cgroup", group)]
        elif controller in controllers.split(","):
            for mount in _MOUNTS_V1[controller]:
                found += [(folder, 1) for folder in _down_to(root / "sys/fs/cgroup" / mount, group)]
    return found


def read_text(path: Path) -> str | None:
    """What a file of a group says; None where it is not there."""
    try:
        return path.read_text()
    except OSError:
        return None


def _groups(root: Path) -> list[tuple[str, str]]:
    """(controllers, path) of each control group of this process; controllers are empty for version 2."""
    text = read_text(root / "proc/self/cgroup")
    fields = [line.split(":", 2) for line in (text or "").splitlines()]
    return [(parts[1], parts[2]) for parts in fields if len(parts) == 3]


def _down_to(mount: Path, group: str) -> list[Path]:
    folders = [mount]
    for name in Path(group).parts[1:]:
        folders.append(folders[-1] / name)
    return folders
