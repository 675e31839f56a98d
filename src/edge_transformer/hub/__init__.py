"""Model names to files: local paths, the demo model of the package registry, Hugging Face repositories, their caches.

Knows nothing of what is in the files beyond their names; needs neither the engine nor the command line.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from edge_transformer.hub.progress import Progress
from edge_transformer.hub.resolve import pull, resolve

if TYPE_CHECKING:
    from edge_transformer.hub.cached import CachedModel, list_models, remove, require_pulled

__all__ = ["CachedModel", "Progress", "list_models", "pull", "remove", "require_pulled", "resolve"]


def __getattr__(name: str) -> object:
    # On first use: what only `ete list` and `ete rm` need is not loaded before a first token.
    if name not in ("CachedModel", "list_models", "remove", "require_pulled"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("edge_transformer.hub.cached"), name)
