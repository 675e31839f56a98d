"""The turns of a chat, and what happens when they no longer fit in the context. No terminal here.

Nothing is forgotten silently: a turn that does not fit is refused, or, where that was asked for, the oldest turns are
dropped and it is said how many.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edge_transformer.errors import ContextLengthError

if TYPE_CHECKING:
    from edge_transformer import LLM, Generation

# A turn with less room than this for its answer is refused: a few words cut off help nobody.
LEAST_ANSWER_TOKENS = 16

Message = dict[str, str]


@dataclass(slots=True)
class Conversation:
    """Messages so far. `drop_oldest`: forget old turns when the context is full, instead of refusing the new one."""

    llm: LLM
    max_tokens: int
    system: str | None = None
    drop_oldest: bool = False
    turns: list[tuple[str, str]] = field(default_factory=list)
    used_tokens: int = 0  # of the context, after the last answer

    def open_turn(self, text: str) -> tuple[list[Message], int, int]:
        """Messages to answer, tokens of room for the answer, and how many old turns were dropped to make it.

        Raises ContextLengthError when the turn does not fit; the conversation is then as before.
        """
        limit = self.llm.context_length
        wanted = min(self.max_tokens, limit // 4) if self.drop_oldest else 0
        dropped = 0
        while True:
            messages = self._messages(self.turns[dropped:], text)
            room = limit - len(self.llm.encode(messages))
            if room >= max(wanted, LEAST_ANSWER_TOKENS) or not self.drop_oldest or dropped == len(self.turns):
                break
            dropped += 1
        if room < min(LEAST_ANSWER_TOKENS, self.max_tokens):
            left = f"{room} tokens are too few" if room > 0 else "no room is left"
            raise ContextLengthError(
                f"the conversation has {limit - room} tokens with this turn, and the context holds {limit}: {left} "
                "for an answer. Shorten the turn, /drop the oldest turn, /reset, or start with a longer --ctx"
            )
        del self.turns[:dropped]
        return messages, room, dropped

    def close_turn(self, text: str, generation: Generation) -> None:
        """Keep a turn and its answer, as far as the answer came. An empty answer is not kept."""
        self.used_tokens = len(generation.prompt_ids) + len(generation.ids)
        if generation.text:
            self.turns.append((text, generation.text))

    def drop(self) -> bool:
        """Forget the oldest turn; False when there is none."""
        if not self.turns:
            return False
        del self.turns[0]
        return True

    def reset(self) -> None:
        """Forget all turns; the system message stays."""
        self.turns.clear()
        self.used_tokens = 0

    def nearly_full(self) -> bool:
        """Whether the next answer may be cut off by the end of the context."""
        return self.llm.context_length - self.used_tokens < self.max_tokens

    def _messages(self, turns: list[tuple[str, str]], text: str) -> list[Message]:
        messages = [{"role": "system", "content": self.system}] if self.system is not None else []
        for question, answer in turns:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return [*messages, {"role": "user", "content": text}]
