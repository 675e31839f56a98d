"""EdgeTransformerEngine: language models bigger than the GPU's memory, with the right answer.

from edge_transformer import LLM

with LLM("demo") as llm:
    print(llm.generate("What is a KV cache?").text)
    for piece in llm.stream("And a token?", temperature=0.7, seed=1):
        print(piece, end="", flush=True)
"""

from __future__ import annotations

import importlib

# True for type checkers; `typing` would lengthen the time in which Ctrl-C gives a traceback (see cli/entry.py).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from edge_transformer.engine.generation import Generation, Stream, Timings
    from edge_transformer.engine.gpu import GpuSettings
    from edge_transformer.engine.llm import LLM
    from edge_transformer.engine.sampling import GenerationConfig, TokenLogprobs
    from edge_transformer.errors import EdgeTransformerError

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "EdgeTransformerError",
    "Generation",
    "GenerationConfig",
    "GpuSettings",
    "Stream",
    "Timings",
    "TokenLogprobs",
    "__version__",
]

_HOMES = {
    "LLM": "edge_transformer.engine.llm",
    "Generation": "edge_transformer.engine.generation",
    "Stream": "edge_transformer.engine.generation",
    "Timings": "edge_transformer.engine.generation",
    "GpuSettings": "edge_transformer.engine.gpu",
    "GenerationConfig": "edge_transformer.engine.sampling",
    "TokenLogprobs": "edge_transformer.engine.sampling",
    "EdgeTransformerError": "edge_transformer.errors",
}


def __getattr__(name: str) -> object:
    # Imported on first use, so that `ete --help` and tools that only ask for the version load nothing heavy.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    # For the completion of names: those that are not imported yet are there too.
    return sorted({*globals(), *__all__})
