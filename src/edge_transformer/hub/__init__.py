"""Model names to files: local paths, the demo model of the package registry, Hugging Face repositories, their caches.

Knows nothing of what is in the files beyond their names; needs neither the engine nor the command line.
"""

from edge_transformer.hub.cached import CachedModel, list_models, remove
from edge_transformer.hub.progress import Progress
from edge_transformer.hub.resolve import pull, resolve

__all__ = ["CachedModel", "Progress", "list_models", "pull", "remove", "resolve"]
