"""One answer in the making: logits come in, the next token is taken, and text that is certain goes out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.sampling import GenerationConfig, TokenLogprobs, sample, token_logprobs
from edge_transformer.text.stop import StopStrings
from edge_transformer.text.stream import StreamDecoder

if TYPE_CHECKING:
    from edge_transformer.text.tokenizer import Tokenizer

FloatArray = npt.NDArray[np.float32]


class Constraint(Protocol):
    """Says which tokens may come next: a grammar, say. One per answer."""

    def restrict(self, logits: FloatArray) -> FloatArray:
        """Logits f32 [V] with minus infinity for every token that may not come next."""
        ...

    def accept(self, token: int) -> None:
        """Take note of the token that was taken."""
        ...


@dataclass(frozen=True, slots=True)
class Piece:
    """What one token added. `text` may be empty; `logprobs` are those of tokens whose text is out now.

    finish_reason: None, or "stop" (end token or stop string), "length" (max_tokens), "context" (the context is full).
    """

    token: int
    text: str
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None


class Answer:
    """The tokens and the text of one answer. `ids`: all new tokens, an end token included."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        end_token_ids: Sequence[int],
        config: GenerationConfig,
        context_length: int,
        seed: int,
        constraint: Constraint | None = None,
    ) -> None:
        self.ids: list[int] = []
        self._prompt_ids = prompt_ids
        self._config = config
        self._seed = seed
        self._constraint = constraint
        self._context_length = context_length
        self._end_token_ids = frozenset() if config.ignore_eos else frozenset(end_token_ids)
        self._decoder = StreamDecoder(tokenizer, prompt_ids)
        self._stops = StopStrings(config.stop)
        self._decoded = self._given = 0  # characters, before and after what stop strings keep back
        self._pending: list[tuple[int, TokenLogprobs]] = []

    @property
    def takes_likeliest(self) -> bool:
        """Whether nothing but the likeliest token is asked of the logits: `push_token` then does."""
        return self._config.plain_greedy and self._config.logprobs is None and self._constraint is None

    def push(self, logits: FloatArray) -> Piece:
        """Take the next token from logits f32 [V]. Raises UsageError when no token can be taken."""
        config = self._config
        allowed = logits if self._constraint is None else self._constraint.restrict(logits)
        token = sample(allowed, config, self._seed, self._prompt_ids, self.ids)
        if self._constraint is not None:
            self._constraint.accept(token)
        if config.logprobs is not None and token not in self._end_token_ids:
            self._pending.append((self._decoded, token_logprobs(logits, token, config.logprobs)))
        return self.push_token(token)

    def push_token(self, token: int) -> Piece:
        """Take this token next."""
        config = self._config
        self.ids.append(token)
        ended = token in self._end_token_ids
        reason: str | None = None
        text, hit = ("", False) if ended else self._decode(self._decoder.push(token))
        if ended or hit:
            reason = "stop"
        elif config.max_tokens is not None and len(self.ids) >= config.max_tokens:
            reason = "length"
        elif len(self._prompt_ids) + len(self.ids) >= self._context_length:
            reason = "context"
        if reason is not None and not hit:
            rest, hit = self._decode(self._decoder.finish())
            text += rest + self._stops.flush()
            reason = "stop" if hit else reason
        self._given += len(text)
        return Piece(token, text, self._certain(everything=reason is not None and not hit), reason)

    def _decode(self, decoded: str) -> tuple[str, bool]:
        self._decoded += len(decoded)
        return self._stops.push(decoded)

    def _certain(self, everything: bool) -> tuple[TokenLogprobs, ...]:
        """Log-probabilities of tokens whose text has begun to go out; those of a stop string's tokens never do."""
        count = len(self._pending)
        if not everything:
            count = next((index for index, (start, _) in enumerate(self._pending) if start >= self._given), count)
        released, self._pending = self._pending[:count], self._pending[count:]
        return tuple(logprobs for _, logprobs in released)
