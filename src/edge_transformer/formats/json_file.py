"""JSON settings files that nobody vouches for: bounded, without duplicate keys, and every failure names the file."""

from __future__ import annotations

import json
import stat
from collections import Counter
from pathlib import Path

from edge_transformer.errors import FormatError

MAX_SETTINGS_BYTES = 4 << 20


def read_bounded(path: Path, limit: int) -> bytes:
    """The content of a file of at most `limit` bytes. Raises FormatError."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise FormatError(path, "is not a regular file")
        with path.open("rb") as file:
            content = file.read(min(status.st_size, limit) + 1)
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror}") from error
    if len(content) > limit:
        raise FormatError(path, f"is longer than the {limit} bytes that are read of such a file")
    return content


def read_settings(path: Path) -> dict[str, object]:
    """The JSON object that a settings file (config.json) of at most 4 MiB holds. Raises FormatError."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            raise FormatError(path, f"has the key {counts.most_common(1)[0][0][:200]!r} twice")
        return found

    try:
        value = json.loads(read_bounded(path, MAX_SETTINGS_BYTES).decode("utf-8"), object_pairs_hook=unique)
    except RecursionError as error:
        raise FormatError(path, "is nested too deeply to be read") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise FormatError(path, f"is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(path, f"is a JSON {type(value).__name__}, not an object")
    return value
