"""What a model folder holds."""

from __future__ import annotations

import os
from pathlib import Path

from edge_transformer.errors import FormatError


def list_folder(folder: Path) -> list[str]:
    """The names in a folder, sorted. Raises FormatError when it cannot be read."""
    try:
        return sorted(os.listdir(folder))
    except OSError as error:
        raise FormatError(folder, f"cannot be read: {error.strerror}") from error
