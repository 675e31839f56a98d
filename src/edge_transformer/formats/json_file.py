"""JSON from files that nobody vouches for: bounded, without duplicate keys, and every failure names the file."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from edge_transformer.errors import FormatError

MAX_JSON_BYTES = 64 << 20


def parse_json_object(path: Path, text: bytes, what: str) -> dict[str, object]:
    """The JSON object in `text`, found in file `path`; `what` names it in errors. Raises FormatError."""

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        found = dict(pairs)
        if len(found) != len(pairs):
            counts = Counter(name for name, _ in pairs)
            raise FormatError(path, f"{what} has the key {counts.most_common(1)[0][0][:200]!r} twice")
        return found

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError as error:
        raise FormatError(path, f"{what} is nested too deeply to be read") from error
    except ValueError as error:  # not UTF-8, not JSON, or a number of thousands of digits
        raise FormatError(path, f"{what} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise FormatError(path, f"{what} is a JSON {type(value).__name__}, not an object")
    return value


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object that file `path` holds. Raises FormatError when it is missing, over 64 MiB or not an object."""
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise FormatError(path, f"is {size} bytes long; at most {MAX_JSON_BYTES} are read as JSON")
        text = path.read_bytes()
    except OSError as error:
        raise FormatError(path, f"cannot be read: {error.strerror}") from error
    return parse_json_object(path, text, "the file")
