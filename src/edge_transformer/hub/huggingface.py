"""Models of Hugging Face repositories, in the cache that all Hugging Face tools share (HF_HOME, HF_HUB_CACHE).

A model that is complete in the cache is used without asking the network; `pull` asks for a newer revision. Tokens,
mirrors, resumed downloads and locks between processes are huggingface_hub's.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_transformer.errors import (
    DISK_FULL,
    EdgeTransformerError,
    ModelNotFoundError,
    UnsupportedModelError,
    storage_error,
)
from edge_transformer.formats.file_names import INDEX_FILE
from edge_transformer.formats.safetensors_index import read_index
from edge_transformer.hub.progress import Progress
from edge_transformer.hub.selection import (
    check_tokenizer,
    choose_gguf,
    has_safetensors,
    side_files,
    single_weights_file,
)
from edge_transformer.hub.storage import require_free_space

_NAME = re.compile(r"(?P<repository>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<selector>[^:]+))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, and after a colon a GGUF file or format of it."""

    repository: str
    selector: str | None

    def __str__(self) -> str:
        return self.repository if self.selector is None else f"{self.repository}:{self.selector}"


def parse_hub_name(name: str) -> HubName | None:
    """None when `name` has not the form of a hub id."""
    match = _NAME.fullmatch(name)
    if match is None or (match["selector"] is None and name.endswith((".gguf", ".safetensors"))):
        return None
    return HubName(match["repository"], match["selector"])


def cache_root() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def repository_folder(repository: str) -> Path:
    return cache_root() / f"models--{repository.replace('/', '--')}"


def current_snapshot(repository_folder: Path) -> Path | None:
    """The folder of the cached files of the branch `main`."""
    reference = repository_folder / "refs" / "main"
    if not reference.is_file():
        return None
    snapshot = repository_folder / "snapshots" / reference.read_text().strip()
    return snapshot if snapshot.is_dir() else None


def snapshot_files(snapshot: Path) -> list[str]:
    """Names, relative to the snapshot, of the files in it; links to blobs that are gone are left out."""
    return [str(path.relative_to(snapshot)) for path in sorted(snapshot.rglob("*")) if path.is_file()]


def cached_model(name: HubName) -> Path | None:
    """The folder or .gguf file of a model that is complete in the cache; None when it is not there or not complete.

    Raises ModelNotFoundError when several GGUF models are cached and `name` does not tell which.
    """
    snapshot = current_snapshot(repository_folder(name.repository))
    if snapshot is None:
        return None
    names = snapshot_files(snapshot)
    if name.selector is None and {"config.json", "tokenizer.json"}.issubset(names) and has_safetensors(names):
        if INDEX_FILE in names:
            weights = sorted(read_index(snapshot / INDEX_FILE))
        else:
            weights = [single_weights_file(names, name.repository)]
        return snapshot if set(weights).issubset(names) else None
    if name.selector is None and "config.json" in names and not any(n.endswith(".gguf") for n in names):
        return None
    if not any(n.endswith(".gguf") for n in names):
        return None
    try:
        files = choose_gguf(names, name.selector, name.repository)
    except ModelNotFoundError:
        if name.selector is None:
            raise
        return None
    return snapshot / files[0] if set(files).issubset(names) else None


def pull_model(name: HubName, progress: Progress) -> Path:
    """The folder or .gguf file of a model, brought up to date with the hub; what is already cached is not loaded again.

    Raises ModelNotFoundError (no such repository or file, no access, no network), UnsupportedModelError (only pickled
    weights, no tokenizer.json), CapacityError (no room on the disk), StorageError (the cache cannot be written).
    """
    from huggingface_hub import HfApi, errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # the HTTP client's, whichever it uses

    progress(f"asking the hub for {name.repository}", 0, 0)
    try:
        info = HfApi().model_info(name.repository, files_metadata=True)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        download = _Download(name.repository, info.sha, sizes, progress)
        return _fetch(name, sizes, download)
    except (HTTPError, errors.HFValidationError, OSError) as error:
        raise _explained(name, error) from error


def _fetch(name: HubName, sizes: Collection[str], download: _Download) -> Path:
    where = name.repository
    if name.selector is not None or not has_safetensors(sizes):
        files = choose_gguf(sizes, name.selector, where)
        return download.files(files)[0]
    if "config.json" not in sizes:
        raise UnsupportedModelError(f"{where} has .safetensors files but no config.json that says what model they are")
    check_tokenizer(sizes, where)
    side = download.files(side_files(sizes))
    folder = side[0].parent
    weights = sorted(read_index(folder / INDEX_FILE)) if INDEX_FILE in sizes else [single_weights_file(sizes, where)]
    download.files(weights)
    return folder


class _Download:
    """Files of one revision of a repository, fetched one after another with the bytes of all of them as the total."""

    def __init__(self, repository: str, revision: str | None, sizes: dict[str, int], progress: Progress) -> None:
        self._repository = repository
        self._revision = revision
        self._sizes = sizes
        self._progress = progress

    def files(self, names: Sequence[str]) -> list[Path]:
        """Paths of the named files in the cache. Raises ModelNotFoundError when one is not in the repository."""
        from huggingface_hub import hf_hub_download, try_to_load_from_cache

        if missing := [name for name in names if name not in self._sizes]:
            raise ModelNotFoundError(f"{self._repository} lacks {missing[0]}, a part of the model that was asked for")
        wanted = [
            name
            for name in names
            if not isinstance(try_to_load_from_cache(self._repository, name, revision=self._revision), str)
        ]
        total = sum(self._sizes[name] for name in wanted)
        require_free_space(cache_root(), total, f"{self._repository}", "set HF_HOME to another folder")
        paths = []
        done = 0
        for name in names:
            bar = _progress_class(f"downloading {name}", done, total, self._progress)
            # The branch is named, not the revision, so that the cache records what `main` is.
            paths.append(Path(hf_hub_download(self._repository, name, tqdm_class=bar)))
            done += self._sizes[name] if name in wanted else 0
        return paths


def _progress_class(what: str, done_before: int, total: int, progress: Progress) -> Any:
    """A tqdm class, since that is what huggingface_hub reports to, which draws nothing and passes the bytes on."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Reporter(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})  # type: ignore[no-untyped-call]
            self._bytes = int(options.get("initial") or 0)

        def update(self, n: float | None = 1) -> bool | None:
            self._bytes += int(n or 0)
            progress(what, min(done_before + self._bytes, total), total)
            return None

    return Reporter


def _explained(name: HubName, error: Exception) -> EdgeTransformerError:
    from huggingface_hub import errors

    # Of this machine: what the network does names no file.
    if isinstance(error, OSError) and (error.filename is not None or error.errno in DISK_FULL):
        return storage_error(
            error,
            f"the cache of all Hugging Face tools, {cache_root()}, cannot be used",
            "set HF_HOME to another folder",
        )
    repository = name.repository
    if isinstance(error, errors.GatedRepoError):
        text = (
            f"{repository} is gated: accept its terms on its hub page, log in (`hf auth login`, or set HF_TOKEN) and "
            "try again"
        )
    elif isinstance(error, errors.RepositoryNotFoundError):
        text = (
            f"no model {repository!r}: there is no such folder here, and the hub has no such repository, or it is "
            "private (then log in with `hf auth login` or set HF_TOKEN)"
        )
    elif isinstance(error, errors.HFValidationError):
        text = f"{repository!r} is no valid repository name ({error})"
    elif isinstance(error, errors.OfflineModeIsEnabled):
        text = f"{repository} is not complete in the cache {cache_root()}, and HF_HUB_OFFLINE forbids asking the hub"
    else:
        reason = " ".join(str(error).split()) or type(error).__name__
        text = (
            f"{repository} is not complete in the cache {cache_root()}, and the hub did not answer ({reason}); "
            "check the network (HF_ENDPOINT names another hub) and run the command again: a download goes on where it "
            "stopped"
        )
    return ModelNotFoundError(text)
