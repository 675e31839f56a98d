"""Graphs of decode passes: a pass of a new kind is recorded, later ones of the kind are replayed at one launch.

What a graph holds reaches from the upload of the batch to the selection of the logit rows. Positions and lengths are
read from device memory, so a graph needs no patching.
"""

from __future__ import annotations

from contextlib import ExitStack
from enum import Enum

from edge_transformer.cuda.runtime import Gpu, Graph, Stream

PassKind = tuple[int, int, int]
"""(decode rows, KV tiles of the longest sequence, logit rows) that a pass's launches are made for."""


class _Mode(Enum):
    """What the ops of the pass at hand do: queue their work, queue it into a graph, or nothing, since a graph has
    it.
    """

    EAGER = "eager"
    CAPTURING = "capturing"
    REPLAYING = "replaying"


class DecodeGraphs:
    """The graphs there are, and what the pass at hand does with them: nothing, unless `begin` was called for it."""

    def __init__(self, gpu: Gpu, compute: Stream) -> None:
        self._gpu = gpu
        self._compute = compute
        self._graphs: dict[PassKind, Graph] = {}
        self._kind: PassKind = (0, 0, 0)
        self._mode = _Mode.EAGER

    @property
    def replaying(self) -> bool:
        """Whether a graph has the work of the ops of the pass at hand: they queue nothing."""
        return self._mode is _Mode.REPLAYING

    def begin(self, kind: PassKind) -> None:
        """The pass at hand is of this kind: replay its graph, or record it from now on where there is none."""
        self._kind = kind
        self._mode = _Mode.REPLAYING if kind in self._graphs else _Mode.CAPTURING
        if self._mode is _Mode.CAPTURING:
            self._gpu.begin_capture(self._compute)

    def replay(self) -> None:
        """Launch the graph of the pass at hand; all that it reads must be in place."""
        self._graphs[self._kind].launch(self._compute)

    def end(self) -> None:
        """The last op that a graph holds is queued. What was recorded is kept, and launched for this pass too."""
        mode, self._mode = self._mode, _Mode.EAGER
        if mode is _Mode.CAPTURING:
            graph = self._gpu.end_capture(self._compute)
            self._graphs[self._kind] = graph
            graph.launch(self._compute)

    def drop(self) -> None:
        """Forget what a pass that was given up has left unfinished."""
        mode, self._mode = self._mode, _Mode.EAGER
        if mode is _Mode.CAPTURING:
            self._gpu.drop_capture(self._compute)

    def close(self) -> None:
        """Release all graphs."""
        with ExitStack() as last:
            for graph in self._graphs.values():
                last.callback(graph.close)
