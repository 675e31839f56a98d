"""From what a user calls a model to the folder or file it lies in."""

from __future__ import annotations

from pathlib import Path

from edge_transformer.errors import ModelNotFoundError
from edge_transformer.hub.demo import DEMO_NAME, cached_demo
from edge_transformer.hub.progress import Progress, silent


def resolve(name: str | Path, *, offline: bool = False, progress: Progress | None = None) -> Path:
    """The folder or .gguf file of a model; downloads it when it is named by `demo` or a hub id and not complete here.

    name: a folder, a .gguf or .safetensors file, `demo`, `org/name`, `org/name:file.gguf` or `org/name:Q4_K_M`. What
    exists as a path wins over a hub id; `./demo` is a folder. offline: only what is on this machine.
    Raises ModelNotFoundError that says what was tried and what to do; CapacityError when the disk has no room;
    StorageError when a cache folder cannot be used.
    """
    progress = progress or silent
    if name == DEMO_NAME:
        if (found := cached_demo()) is not None:
            return found
        if offline:
            raise ModelNotFoundError(
                "the demo model is not on this machine; run `ete pull demo` while there is a network"
            )
        return _pull_demo(progress)
    if (local := _local(name)) is not None:
        return local
    # Imported here, so that a model on this machine opens without the code that talks to a hub.
    from edge_transformer.hub.huggingface import cache_root, cached_model, parse_hub_name, pull_model

    hub_name = parse_hub_name(str(name)) if isinstance(name, str) else None
    if hub_name is None:
        raise _not_found(name)
    if (found := cached_model(hub_name)) is not None:
        return found
    if offline:
        raise ModelNotFoundError(
            f"no model {str(name)!r}: there is no such path here, and it is not complete in the cache {cache_root()}; "
            f"run `ete pull {name}` with a network"
        )
    return pull_model(hub_name, progress)


def pull(name: str, *, progress: Progress | None = None) -> Path:
    """Like `resolve`, but a hub id is brought up to date even when a complete copy is cached.

    Raises ModelNotFoundError for what is a path or cannot be downloaded; CapacityError and StorageError as `resolve`.
    """
    progress = progress or silent
    if name == DEMO_NAME:
        return _pull_demo(progress)
    from edge_transformer.hub.huggingface import parse_hub_name, pull_model

    hub_name = parse_hub_name(name)
    if hub_name is None:
        if _local(name) is not None:
            raise ModelNotFoundError(f"{name} is here already, and no name of the hub: there is nothing to download")
        raise _not_found(name)
    return pull_model(hub_name, progress)


def _pull_demo(progress: Progress) -> Path:
    from edge_transformer.hub.demo_pull import pull_demo

    return pull_demo(progress)


def _local(name: str | Path) -> Path | None:
    if not str(name):
        raise ModelNotFoundError("the model's name is empty; give a folder, a .gguf file, a hub id or `demo`")
    try:
        path = Path(name).expanduser()
        return path if path.exists() else None
    # a name too long, with a NUL, or with the home of an unknown user: no path, and no hub id either
    except (OSError, ValueError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelNotFoundError(f"no model {str(name)[:200]!r}: {reason}") from error


def _not_found(name: str | Path) -> ModelNotFoundError:
    text = str(name)
    return ModelNotFoundError(
        f"no model {text[:200]!r}: no folder or file of that name is here, and it is neither `demo` nor a hub id "
        "(org/name, org/name:file.gguf or org/name:Q4_K_M)"
    )
