"""A choice of a request that a scheduler has taken on: its answer, and the sequence that the answer is made with."""

from __future__ import annotations

from dataclasses import dataclass

from edge_transformer.engine.answer import Answer
from edge_transformer.engine.request import Request
from edge_transformer.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Live:
    """One choice of a request. `number` orders by arrival. A request's first choice reads the prompt for all
    (`others` then join with their own copies of its sequence).
    """

    request: Request
    answer: Answer
    choice: int
    number: int
    others: list[Live]
    sequence: Sequence | None = None
    moved_bytes: int = 0  # of its state, while that waits in host memory
    cached: int = 0
    last_token: float = 0.0

    @property
    def tokens(self) -> int:
        """Tokens that there are: the prompt's and the answer's."""
        return len(self.request.prompt_ids) + len(self.answer.ids)

    @property
    def in_prompt(self) -> bool:
        return self.sequence is None or len(self.sequence) < len(self.request.prompt_ids)

    @property
    def processed(self) -> int:
        """Tokens that the sequence covers."""
        return 0 if self.sequence is None else len(self.sequence)
