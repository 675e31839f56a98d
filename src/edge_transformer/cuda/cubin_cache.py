"""Compiled kernels on disk: one file per kernel and architecture, named by a hash of all that went into it.

Any number of processes may read and write at once: files are written beside and renamed. A file that is not what was
written (a disk that was full, a copy that was cut) is deleted and counts as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

from edge_transformer.hub.storage import cache_folder

SUFFIX = ".kernel"
_MAGIC = b"ETE-KERNEL-1\n"
_DIGEST_BYTES = 32
_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, slots=True)
class CachedKernel:
    path: Path
    name: str  # the kernel's entry point and architecture
    nbytes: int


class KernelCache:
    """The cache in `folder` (None: `kernels` in the user's cache folder), which need not exist yet."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder() / "kernels" if folder is None else folder

    def get(self, name: str, key: str) -> bytes | None:
        """What `put` stored under this name and key, or None."""
        path = self._path(name, key)
        try:
            stored = path.read_bytes()
        except OSError:  # absent, or out of reach: it is compiled again
            return None
        header = len(_MAGIC) + _DIGEST_BYTES
        content = stored[header:]
        if stored[:header] == _MAGIC + hashlib.sha256(content).digest():
            return content
        with contextlib.suppress(OSError):  # another process saw it too
            path.unlink()
        return None

    def put(self, name: str, key: str, content: bytes) -> None:
        """Store `content`. Raises OSError when the folder cannot be written."""
        self.folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.folder, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(_MAGIC + hashlib.sha256(content).digest() + content)
            os.replace(temporary, self._path(name, key))
        except BaseException:
            os.unlink(temporary)
            raise

    def entries(self) -> list[CachedKernel]:
        """What is stored, by name."""
        found = []
        for path in sorted(self.folder.glob(f"*{SUFFIX}")):
            with contextlib.suppress(FileNotFoundError):  # cleared at this moment
                found.append(CachedKernel(path, path.name.rsplit("-", 1)[0], path.stat().st_size))
        return found

    def clear(self) -> int:
        """Delete everything, what crashed writers left included. Returns the bytes freed."""
        freed = 0
        for pattern in (f"*{SUFFIX}", "*.tmp"):
            for path in self.folder.glob(pattern):
                with contextlib.suppress(FileNotFoundError):
                    nbytes = path.stat().st_size
                    path.unlink()
                    freed += nbytes
        return freed

    def _path(self, name: str, key: str) -> Path:
        if not _NAME.fullmatch(name) or not _NAME.fullmatch(key):
            raise ValueError(f"not a name for a file: {name!r}, {key!r}")
        return self.folder / f"{name}-{key}{SUFFIX}"
