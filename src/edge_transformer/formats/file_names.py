"""Names that model files go by: what the readers look for in a folder and the hub in a repository's list."""

from __future__ import annotations

import re

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLED_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

_PART = re.compile(r"(?P<stem>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf|\.safetensors)", re.DOTALL)


def split_name(name: str) -> tuple[str, int, int] | None:
    """(stem, number, count) of a file STEM-00001-of-0000N.gguf or .safetensors, None for any other name."""
    match = _PART.fullmatch(name)
    return None if match is None else (match["stem"], int(match["number"]), int(match["count"]))


def gguf_part_names(stem: str, count: int) -> list[str]:
    """The files of a split GGUF model, in order."""
    return [f"{stem}-{number:05d}-of-{count:05d}.gguf" for number in range(1, count + 1)]
