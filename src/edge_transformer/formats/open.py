"""One door for model files: decides by what lies at a path which reader opens it."""

from __future__ import annotations

from pathlib import Path

from edge_transformer.formats.checkpoint import Checkpoint


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a .gguf file (any part of a split one), a .safetensors file, or a folder that holds either.

    Raises FormatError when the files are corrupt or of an unread kind, UnsupportedModelError when config.json asks for what
    is refused (quantization_config, auto_map).
    """
    raise NotImplementedError(path)
