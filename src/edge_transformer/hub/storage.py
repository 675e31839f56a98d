"""The user's cache folder: where it is, whether there is room, and one writer at a time."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from edge_transformer.errors import CapacityError, ModelNotFoundError, storage_error
from edge_transformer.hub.progress import Progress

# A file system that is filled to its last byte breaks other programs.
FREE_SPACE_MARGIN = 64 << 20


def cache_folder() -> Path:
    """ETE_CACHE, else XDG_CACHE_HOME/edge-transformer, else ~/.cache/edge-transformer. It need not exist.

    Raises ModelNotFoundError when there is no home folder.
    """
    if named := os.environ.get("ETE_CACHE"):
        return Path(named)
    if base := os.environ.get("XDG_CACHE_HOME"):
        return Path(base) / "edge-transformer"
    try:
        return Path.home() / ".cache" / "edge-transformer"
    except RuntimeError as error:  # a user without an entry in the password file, as containers have them
        raise ModelNotFoundError("no home folder is known to keep models in; set ETE_CACHE or HOME") from error


@contextlib.contextmanager
def using_cache() -> Iterator[None]:
    """What the system refuses in the block is laid to the cache folder, which the block uses.

    Raises StorageError, or CapacityError where the disk is full, that says how to name another folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:  # not of the system
            raise
        named = next((f" of {name}" for name in ("ETE_CACHE", "XDG_CACHE_HOME") if os.environ.get(name)), "")
        raise storage_error(
            error,
            f"the cache folder{named}, {cache_folder()}, cannot be used",
            "name one that can be written with ETE_CACHE (or XDG_CACHE_HOME, which counts where ETE_CACHE is not set)",
        ) from error


def require_free_space(folder: Path, nbytes: int, purpose: str, remedy: str) -> None:
    """Raise CapacityError when the file system of `folder` (which need not exist yet) has no room for `nbytes` more.

    `remedy` names the setting that moves the folder elsewhere.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    free = shutil.disk_usage(existing).free
    if free < nbytes + FREE_SPACE_MARGIN:
        raise CapacityError(
            f"{purpose} needs {_mib(nbytes)} in {folder} (and {_mib(FREE_SPACE_MARGIN)} left over), but only "
            f"{_mib(free)} are free there; make room or {remedy}"
        )


@contextlib.contextmanager
def exclusive(lock_file: Path, purpose: str, progress: Progress) -> Iterator[None]:
    """Hold an advisory lock on `lock_file` (made if missing); the kernel frees it when this process ends in any way."""
    lock_file.parent.mkdir(parents=True, exist_ok=True)
    with lock_file.open("a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"waiting for another process: {purpose}", 0, 0)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.0f} MiB"
