"""Checksums of the tensors of a quantized file: kept when it is made, compared when somebody asks (`ete verify`).

Reading gigabytes at every start would take too long.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

from edge_transformer.errors import FormatError
from edge_transformer.formats.json_file import read_settings
from edge_transformer.hub.progress import Progress

REPORT_FILE = "quantization.json"
"""Beside the weights: of each tensor its format, its errors and the sha256 of its bytes, padding of planes included."""

CHECKSUM = "sha256"

_PIECE_BYTES = 4 << 20


class Place(NamedTuple):
    """Where a tensor lies in the file."""

    offset: int
    nbytes: int


def checksums(path: Path, places: Mapping[str, Place], threads: int, progress: Progress) -> dict[str, str]:
    """sha256 of each tensor in the file at `path`, in hexadecimal. Raises FormatError where the file ends before."""
    found: dict[str, str] = {}
    done, total = 0, sum(place.nbytes for place in places.values())
    with path.open("rb") as file, ThreadPoolExecutor(threads, "ete-checksums") as pool:
        for name, checksum in zip(places, pool.map(partial(_checksum, file.fileno()), places.values()), strict=True):
            if checksum is None:
                raise FormatError(path, "the file ends before it does", tensor=name)
            found[name] = checksum
            done += places[name].nbytes
            progress("checksums", done, total)
    return found


def recorded_checksums(folder: Path) -> dict[str, str]:
    """What quantization.json in `folder` has; nothing where it was made without. Raises FormatError when it is damaged
    or not there.
    """
    path = folder / REPORT_FILE
    tensors = read_settings(path).get("tensors")
    if not isinstance(tensors, list) or not all(isinstance(tensor, dict) for tensor in tensors):
        raise FormatError(path, "has no list of tensors")
    return {str(tensor.get("name")): str(tensor[CHECKSUM]) for tensor in tensors if CHECKSUM in tensor}


def _checksum(descriptor: int, place: Place) -> str | None:
    digest = hashlib.sha256()
    position, end = place.offset, place.offset + place.nbytes
    while position < end:
        piece = os.pread(descriptor, min(_PIECE_BYTES, end - position), position)
        if not piece:
            return None
        digest.update(piece)
        position += len(piece)
    return digest.hexdigest()
