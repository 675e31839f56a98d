"""What has been pulled: listing and removing it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from edge_transformer.errors import ModelNotFoundError, storage_error
from edge_transformer.hub.demo import DEMO_NAME, cached_demo, demo_folder
from edge_transformer.hub.huggingface import (
    HubName,
    cache_root,
    cached_model,
    current_snapshot,
    parse_hub_name,
    repository_folder,
    snapshot_files,
)
from edge_transformer.hub.progress import silent
from edge_transformer.hub.selection import gguf_groups
from edge_transformer.hub.storage import exclusive


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A complete model on this machine: what to call it, the folder or file it is, and its bytes on the disk."""

    name: str
    path: Path
    nbytes: int


def list_models() -> list[CachedModel]:
    """Every complete model in the caches, the demo first: what was pulled here or by any Hugging Face tool."""
    models = []
    if (demo := cached_demo()) is not None:
        models.append(CachedModel(DEMO_NAME, demo, demo.stat().st_size))
    for folder in sorted(cache_root().glob("models--*--*")):
        snapshot = current_snapshot(folder)
        if snapshot is None:
            continue
        repository = folder.name.removeprefix("models--").replace("--", "/", 1)
        models += _models_of(repository, snapshot)
    return models


def require_pulled(name: str) -> None:
    """Raises ModelNotFoundError when nothing of that name was pulled (a path is never removed)."""
    if name == DEMO_NAME:
        _pulled_demo()
    elif (hub_name := _pulled_repository(name)).selector is not None:
        _pulled_gguf(hub_name)


def remove(name: str) -> int:
    """Delete a pulled model; returns the bytes freed. A hub id without a colon removes its whole repository.

    Raises what `require_pulled` does; StorageError when the system refuses to delete.
    """
    try:
        return _remove(name)
    except OSError as error:
        raise storage_error(
            error,
            f"{name} cannot be deleted",
            "make its folder writable (chmod u+w), or let the user delete it whose it is",
        ) from error


def _remove(name: str) -> int:
    if name == DEMO_NAME:
        return _remove_demo()
    hub_name = _pulled_repository(name)
    if hub_name.selector is not None:
        return _remove_gguf(hub_name)
    folder = repository_folder(hub_name.repository)
    freed = _bytes_of(folder)
    shutil.rmtree(folder)
    return freed


def _pulled_demo() -> Path:
    demo = cached_demo()
    if demo is None:
        raise ModelNotFoundError(f"the demo model is not in {demo_folder()}; nothing to remove")
    return demo


def _pulled_repository(name: str) -> HubName:
    hub_name = parse_hub_name(name)
    if hub_name is None:
        raise ModelNotFoundError(
            f"{name!r} was not pulled: only `demo` and hub ids are removed, files of your own are left alone"
        )
    folder = repository_folder(hub_name.repository)
    if not folder.is_dir():
        raise ModelNotFoundError(f"{hub_name.repository} is not in the cache {cache_root()}; `ete list` shows what is")
    return hub_name


def _pulled_gguf(name: HubName) -> tuple[Path, Path]:
    """The newest snapshot's folder, and the model's first file in it."""
    path = cached_model(name)
    snapshot = current_snapshot(repository_folder(name.repository))
    if path is None or snapshot is None:
        raise ModelNotFoundError(f"{name} is not complete in the cache {cache_root()}; `ete list` shows what is")
    return snapshot, path


def _models_of(repository: str, snapshot: Path) -> list[CachedModel]:
    names = snapshot_files(snapshot)
    models = []
    if "config.json" in names and (path := cached_model(HubName(repository, None))) == snapshot:
        nbytes = sum((path / name).stat().st_size for name in names if not name.endswith(".gguf"))
        models.append(CachedModel(repository, path, nbytes))
    for selector, files in gguf_groups(names).items():
        if set(files).issubset(names):
            nbytes = sum((snapshot / file).stat().st_size for file in files)
            models.append(CachedModel(f"{repository}:{selector}", snapshot / selector, nbytes))
    return models


def _remove_demo() -> int:
    demo = _pulled_demo()
    with exclusive(demo_folder() / ".lock", "pull of the demo model", silent):
        freed = demo.stat().st_size
        demo.unlink()
    return freed


def _remove_gguf(name: HubName) -> int:
    """Delete the links of one GGUF model and the blobs behind them that no other revision links to."""
    snapshot, path = _pulled_gguf(name)
    revisions = repository_folder(name.repository) / "snapshots"
    freed = 0
    for file in gguf_groups(snapshot_files(snapshot))[str(path.relative_to(snapshot))]:
        link = snapshot / file
        blob = link.resolve()
        link.unlink()
        others = (other for other in revisions.rglob("*") if other.is_symlink())
        if blob != link and any(other.resolve() == blob for other in others):
            continue
        freed += blob.stat().st_size if blob != link else 0
        blob.unlink(missing_ok=True)
    return freed


def _bytes_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
