"""Weights and text of a model, loaded side by side."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from edge_transformer.engine.weights import HostWeights
from edge_transformer.hub.progress import Progress

if TYPE_CHECKING:
    from edge_transformer.formats.checkpoint import Checkpoint
    from edge_transformer.models.config import ModelSpec
    from edge_transformer.text.load import ModelText


class _Stopped(Exception):  # noqa: N818 - a request, not an error
    """The other side has failed or was interrupted."""


def load_weights_and_text(
    checkpoint: Checkpoint, spec: ModelSpec, threads: int, progress: Progress | None
) -> tuple[HostWeights, ModelText]:
    """Weights in a thread of their own (mostly native code that runs without the interpreter), tokenizer and chat
    template in this one. `progress` is called from that thread.

    An error or an interrupt on either side ends both before it is raised.
    """
    stop = threading.Event()
    outcome: list[HostWeights | BaseException] = []

    def report(stage: str, done: int, total: int) -> None:
        if stop.is_set():
            raise _Stopped
        if progress is not None:
            progress(stage, done, total)

    def load_weights() -> None:
        try:
            outcome.append(HostWeights(checkpoint, spec, threads, report))
        except BaseException as error:  # noqa: BLE001 - raised again by the thread that waits
            outcome.append(error)

    thread = threading.Thread(target=load_weights, name="ete-weights")
    thread.start()
    try:
        text = _load_text(checkpoint)
        thread.join()
    except BaseException:
        stop.set()
        thread.join()
        if outcome and isinstance(outcome[0], HostWeights):
            outcome[0].close()
        raise
    weights = outcome[0]
    if isinstance(weights, BaseException):
        raise weights
    return weights, text


def _load_text(checkpoint: Checkpoint) -> ModelText:
    # Imported here, and the modules that generate with it, so that this too takes no time before the weights' start.
    from edge_transformer.engine import generation
    from edge_transformer.text.load import load_text

    del generation
    return load_text(checkpoint)
