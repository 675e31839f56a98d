"""Positions of strings by content, for vocabularies of 10^5 strings: built by native code in a few milliseconds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_transformer._native import StringIndex
from edge_transformer.formats.gguf_types import StringArray

_GAP = b"\0" * 8  # where files have the length of the next string


def string_index(strings: Sequence[str]) -> StringIndex:
    """The index of `strings`: those of a GGUF file where they lie, others copied."""
    if isinstance(strings, StringArray):
        return StringIndex(strings.data, strings.starts)
    encoded = [string.encode() for string in strings]
    starts = np.cumsum([len(_GAP), *(len(string) + len(_GAP) for string in encoded)], dtype=np.int64)
    return StringIndex(_GAP + b"".join(string + _GAP for string in encoded), starts)
