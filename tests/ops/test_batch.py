"""Prompt rows cut at the checkpoints of recurrent state."""

from __future__ import annotations

import numpy as np
import pytest

from edge_transformer.ops.batch import Batch, PromptSpan, StateCheckpoint, prompt_stages

NOWHERE = np.zeros(1, np.int64)
SPANS = (PromptSpan(0, 150, 0, 0), PromptSpan(150, 70, 61, 2), PromptSpan(220, 9, 5, 1))


def batch_of(*checkpoints: tuple[int, int], spans: tuple[PromptSpan, ...] = SPANS) -> Batch:
    rows = sum(span.row_count for span in spans)
    zeros = np.zeros(rows + 1, np.int32)
    copies = tuple(StateCheckpoint(sequence, position, NOWHERE) for sequence, position in checkpoints)
    return Batch(zeros, zeros, zeros, rows, spans, (), (), (), zeros[:0], (), copies)


def test_without_checkpoints_there_is_one_stage() -> None:
    (stage,) = prompt_stages(batch_of())
    assert (stage.spans, stage.checkpoints) == (SPANS, ())
    assert prompt_stages(batch_of(spans=())) == ()


def test_the_nth_checkpoint_of_a_sequence_ends_its_nth_stage() -> None:
    batch = batch_of((2, 128), (0, 64), (0, 128))
    first, second, third = prompt_stages(batch)
    assert first.spans == (PromptSpan(0, 64, 0, 0), PromptSpan(150, 67, 61, 2), SPANS[2])
    assert first.checkpoints == (batch.state_checkpoints[1], batch.state_checkpoints[0])
    assert second.spans == (PromptSpan(64, 64, 64, 0), PromptSpan(217, 3, 128, 2))
    assert second.checkpoints == (batch.state_checkpoints[2],)
    assert third.spans == (PromptSpan(128, 22, 128, 0),)
    assert third.checkpoints == ()


def test_a_checkpoint_at_the_end_leaves_no_rows() -> None:
    spans = (PromptSpan(0, 64, 64, 0),)
    (stage,) = prompt_stages(batch_of((0, 128), spans=spans))
    assert stage.spans == spans
    assert len(stage.checkpoints) == 1


@pytest.mark.parametrize(
    ("checkpoints", "named"),
    [
        (((0, 63),), "at 63; a multiple of 64 above 0, up to 150"),
        (((0, 0),), "at 0; a multiple of 64 above 0"),
        (((0, 192),), "at 192; a multiple"),
        (((2, 64), (2, 64)), "at 64; a multiple of 64 above 64, up to 131"),
        (((0, 128), (0, 64)), "at 64; a multiple of 64 above 128"),
        (((3, 64),), "sequence 3, which has no prompt rows"),
    ],
)
def test_checkpoints_elsewhere_are_refused(checkpoints: tuple[tuple[int, int], ...], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        prompt_stages(batch_of(*checkpoints))
