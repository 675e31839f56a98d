"""Rows of a scheduler's next pass: the next token of every answer in the making, tokens that are computed again since
their memory was taken away, and pieces of the prompts that are being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from edge_transformer.engine.chunk import Chunk, last_border
from edge_transformer.engine.live import Live
from edge_transformer.engine.prompt_shares import Reading, share_budget

RECOMPUTED_ROWS = 32
"""Rows of a pass at most that repeat tokens an answer had before its memory was taken away."""


def plan_rows(choices: Sequence[Live], max_rows: int, pass_tokens: int) -> list[tuple[Live, int]]:
    """How many tokens of which choices the next pass is to take, ordered by arrival.

    max_rows: of a pass. pass_tokens: prompt tokens at most where answers are in the making.
    """
    answering = [live for live in choices if not live.in_prompt]
    rows = 0
    planned: list[tuple[Live, int]] = []
    recompute = RECOMPUTED_ROWS
    for live in answering:
        missing = live.tokens - live.processed
        count = 1 if missing == 1 else min(missing, max(recompute, 1))
        recompute -= count if missing > 1 else 0
        planned.append((live, count))
        rows += count
    budget = max_rows - rows
    if answering:
        budget = min(budget, pass_tokens)
    planned += _prompt_pieces(choices, budget)
    return sorted(planned, key=lambda item: item[0].number)


def _prompt_pieces(choices: Sequence[Live], budget: int) -> list[tuple[Live, int]]:
    """The prompts being read, the oldest first, and how many tokens of each come next."""
    reading = [live for live in choices if live.in_prompt]
    prompts = [Reading(live.processed, len(live.request.prompt_ids)) for live in reading]
    return [(reading[index], count) for index, count in share_budget(prompts, budget)]


def next_chunk(live: Live, count: int) -> Chunk:
    """The next `count` tokens of a choice that has its sequence."""
    assert live.sequence is not None
    start = len(live.sequence)
    prompt = live.request.prompt_ids
    logits: Literal["none", "last"] = "last" if start + count == live.tokens else "none"
    border = last_border(len(prompt))
    if start < len(prompt):
        return Chunk(live.sequence, prompt[start : start + count], "prompt", logits, border)
    answered = start - len(prompt)
    return Chunk(live.sequence, live.answer.ids[answered : answered + count], "decode", logits, border)
