"""What `ete quantize` has written against what is in the file now."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from edge_transformer.engine.quantize_checksums import REPORT_FILE, Place, checksums, recorded_checksums
from edge_transformer.formats.checkpoint import Checkpoint
from edge_transformer.hub.progress import Progress
from edge_transformer.verify.link import Link, Outcome, judged, not_run


def checksum_links(checkpoint: Checkpoint, threads: int) -> Iterator[Link]:
    """One for a model that was quantized here."""
    if any(tensor.layout is not None for tensor in checkpoint.tensors.values()):
        yield Link("checksums of the quantized file", partial(_compared, checkpoint, threads))


def _compared(checkpoint: Checkpoint, threads: int, progress: Progress) -> Outcome:
    path = next(iter(checkpoint.tensors.values())).file.path
    recorded = recorded_checksums(path.parent)
    if not recorded:
        return not_run(f"{REPORT_FILE} has none: the model was quantized before they were kept")
    places = {name: Place(tensor.offset, tensor.nbytes) for name, tensor in checkpoint.tensors.items()}
    found = checksums(path, places, threads, progress)
    wrong = [name for name, checksum in found.items() if recorded.get(name) != checksum]
    text = f"{len(found) - len(wrong)} of {len(found)} tensors have the bytes that were written"
    if wrong:
        text += f"; {wrong[0]!r} has others: copy the file again, or quantize the model again"
    return judged(not wrong, text, len(wrong), 0)
