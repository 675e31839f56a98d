"""How many rows of each kind a launch is made for: grids follow these buckets, the kernels read the true numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LaunchRows:
    """Bounds of a pass's rows, and `counts`, the device address of int32 {prompt rows, rows, sequences, logit rows}.

    prompt, decode, logits: the most rows of a kind the launches serve; 0 leaves the kind's launches out. Blocks beyond
    the rows that `counts` tells end at once, so a captured graph serves every pass within the bounds.
    """

    prompt: int
    decode: int
    logits: int
    counts: int
