"""Generating text from one sequence: prefill, then token by token, with end tokens, stop strings and streaming text."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from types import GeneratorType, TracebackType
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sampling import GenerationConfig, TokenLogprobs, sample, token_logprobs
from edge_transformer.engine.sequence import Sequence as EngineSequence
from edge_transformer.text.stop import StopStrings
from edge_transformer.text.stream import StreamDecoder

if TYPE_CHECKING:
    from edge_transformer.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds and counts. `prompt_tokens` are those of the prompt; `processed_tokens` those that had to be computed,
    the others were kept from an earlier call with the same beginning.
    """

    load_s: float
    prefill_s: float
    decode_s: float
    prompt_tokens: int
    processed_tokens: int
    generated_tokens: int

    @property
    def prefill_tokens_per_s(self) -> float:
        return self.processed_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Tokens after the first, per second."""
        return max(0, self.generated_tokens - 1) / self.decode_s if self.decode_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Generation:
    """A generated text. `ids` are all new tokens, an end token or the tokens of a stop string included; `text` has
    neither.

    finish_reason: "stop" (end token or stop string), "length" (max_tokens), "context" (the context is full),
    "interrupted" (cancelled before its end).
    """

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    finish_reason: str
    logprobs: tuple[TokenLogprobs, ...] | None
    seed: int
    timings: Timings

    def __str__(self) -> str:
        """The text, so that an answer can be printed as it is."""
        return self.text


@dataclass(slots=True)
class _State:
    """What there is so far."""

    ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    finish_reason: str = "interrupted"
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    processed_tokens: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class Stream(Iterator[str]):
    """The pieces of a text as they are made. `result` is there at any time: what has been generated so far.

    Iterating to the end, `cancel`, leaving a `with` block or dropping the stream ends the generation and frees its
    state.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        begin: Callable[[], EngineSequence],
        prompt_ids: Sequence[int],
        end_token_ids: Sequence[int],
        config: GenerationConfig,
        context_length: int,
        *,
        load_s: float = 0.0,
        finished: Callable[[EngineSequence], None] = EngineSequence.close,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """begin: called when the first piece is asked for; gives the sequence, which holds the prompt's first tokens or
        none, and is `finished` in the end. A stream that nobody iterates holds no memory.
        """
        self.config = config
        self.seed = int.from_bytes(os.urandom(8), "little") if config.seed is None else config.seed
        self._load_s = load_s
        # What makes the pieces does not refer to the stream, so that a stream that is dropped ends at once.
        self._making = _Making(
            engine, tokenizer, tuple(prompt_ids), end_token_ids, config, self.seed, context_length, progress
        )
        self._pieces = cast("GeneratorType[str, None, None]", self._making.run(begin, finished))

    def __next__(self) -> str:
        return next(self._pieces)

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    @property
    def result(self) -> Generation:
        """The generation, complete or as far as it has come."""
        state, prompt_ids = self._making.state, self._making.prompt_ids
        return Generation(
            prompt_ids=prompt_ids,
            ids=tuple(state.ids),
            text="".join(state.text),
            finish_reason=state.finish_reason,
            logprobs=None if self.config.logprobs is None else tuple(state.logprobs),
            seed=self.seed,
            timings=Timings(
                load_s=self._load_s,
                prefill_s=state.prefill_s,
                decode_s=state.decode_s,
                prompt_tokens=len(prompt_ids),
                processed_tokens=state.processed_tokens,
                generated_tokens=len(state.ids),
            ),
        )

    def cancel(self) -> None:
        """End the generation at the next layer border; may be called from another thread or a signal handler."""
        self._making.cancelled = True

    def close(self) -> None:
        """End the generation now, if it has not ended, and free its state. Another thread that iterates ends it."""
        self.cancel()
        if not self._pieces.gi_running:
            self._pieces.close()


class _Making:
    """How a stream's pieces are made."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        prompt_ids: tuple[int, ...],
        end_token_ids: Sequence[int],
        config: GenerationConfig,
        seed: int,
        context_length: int,
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.state = _State()
        self.cancelled = False
        self.prompt_ids = prompt_ids
        self._engine = engine
        self._tokenizer = tokenizer
        self._end_token_ids = frozenset() if config.ignore_eos else frozenset(end_token_ids)
        self._config = config
        self._seed = seed
        self._context_length = context_length
        self._progress = progress

    def run(
        self, begin: Callable[[], EngineSequence], finished: Callable[[EngineSequence], None]
    ) -> Generator[str, None, None]:
        state = self.state
        decoder = StreamDecoder(self._tokenizer, self.prompt_ids)
        stops = StopStrings(self._config.stop)
        sequence = begin()
        try:
            started = time.perf_counter()
            kept = len(sequence)
            todo = self.prompt_ids[kept:]
            logits = self._engine.prefill(sequence, todo, progress=self._progress, cancelled=lambda: self.cancelled)
            state.processed_tokens = len(sequence) - kept
            state.prefill_s = time.perf_counter() - started
            started = time.perf_counter()
            token = None if logits is None else self._choose(logits)
            while token is not None:
                state.ids.append(token)
                state.decode_s = time.perf_counter() - started
                ended = token in self._end_token_ids
                piece, hit = ("", False) if ended else stops.push(decoder.push(token))
                if ended or hit:
                    state.finish_reason = "stop"
                elif self._config.max_tokens is not None and len(state.ids) >= self._config.max_tokens:
                    state.finish_reason = "length"
                elif len(self.prompt_ids) + len(state.ids) >= self._context_length:
                    state.finish_reason = "context"
                if state.finish_reason != "interrupted" and not hit:
                    rest, hit = stops.push(decoder.finish())
                    piece += rest + stops.flush()
                    state.finish_reason = "stop" if hit else state.finish_reason
                if piece:
                    state.text.append(piece)
                    yield piece
                if state.finish_reason != "interrupted" or self.cancelled:
                    return
                token = self._next(sequence, token)
        finally:
            finished(sequence)

    def _choose(self, logits: npt.NDArray[np.float32]) -> int:
        """The next token; its log-probabilities are recorded where they are asked."""
        state = self.state
        token = sample(logits, self._config, self._seed, self.prompt_ids, state.ids)
        if self._config.logprobs is not None:
            state.logprobs.append(token_logprobs(logits, token, self._config.logprobs))
        return token

    def _next(self, sequence: EngineSequence, token: int) -> int | None:
        """The token after `token`, or None when cancelled."""
        # Recurrent state does not survive a pass that is given up, and a pass of one token is soon over.
        cancelled = None if sequence.recurrent is not None else lambda: self.cancelled
        with self._engine.lock:
            result = self._engine.step([Chunk(sequence, [token], "decode", "last")], cancelled)
            if result is None:
                return None
            if self._config.plain_greedy and self._config.logprobs is None:
                return result.likeliest()[0]
            logits = result.logits()[0]
        return self._choose(logits)
