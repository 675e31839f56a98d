"""POST /v1/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from edge_transformer.engine.llm import LLM
from edge_transformer.engine.request import Request
from edge_transformer.engine.sampling import TokenLogprobs
from edge_transformer.server.chat import FINISH
from edge_transformer.server.errors import invalid
from edge_transformer.server.inbox import ChoicePiece, Inbox, Progress
from edge_transformer.server.job import STREAM_WAIT_S, Job, NumberedListener
from edge_transformer.server.logprobs import completion_logprobs
from edge_transformer.server.parameters import generation_config, prompts_of, seeds, too_long
from edge_transformer.server.prompt_text import encode_prompt
from edge_transformer.server.schema import CompletionRequest
from edge_transformer.server.service import Running

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_PROMPTS = 128


def completion_prompts(llm: LLM, request: CompletionRequest) -> list[list[int]]:
    """Token ids of each prompt. Raises ApiError, TextError."""
    if request.best_of not in (None, request.n or 1):
        raise invalid("best_of other than n is not supported; leave it out", "best_of", "unsupported_parameter")
    if request.echo and request.logprobs is not None:
        raise invalid("echo together with logprobs is not supported", "echo", "unsupported_parameter")
    asked = prompts_of(request)
    if len(asked) > MAX_PROMPTS:
        raise invalid(f"{len(asked)} prompts in one request; allowed: {MAX_PROMPTS}", "prompt")
    prompts = []
    for prompt in asked:
        ids = encode_prompt(llm, prompt, "prompt") if isinstance(prompt, str) else prompt
        if not ids:
            raise invalid("the prompt is empty: it has no token to start from", "prompt")
        if len(ids) + 1 > llm.context_length:
            raise too_long(len(ids), llm.context_length, "prompt")
        if (highest := max(ids)) >= llm.config.vocab_size:
            last = llm.config.vocab_size - 1
            raise invalid(f"token {highest} does not exist; this model's tokens are 0 to {last}", "prompt")
        prompts.append(ids)
    return prompts


class Completion:
    """One request's answers, whole or in chunks."""

    def __init__(self, running: Running, request: CompletionRequest, prompts: list[list[int]], model: str) -> None:
        """Submits; raises ApiError for a field at fault, and as Scheduler.submit."""
        choices = request.n or 1
        max_tokens = DEFAULT_MAX_TOKENS if request.max_tokens is None else request.max_tokens
        config = generation_config(request, max_tokens, request.logprobs, running.llm.config.vocab_size)
        inbox = Inbox()
        requests = [
            Request(ids, config, seeds(request, choices), NumberedListener(inbox, index * choices))
            for index, ids in enumerate(prompts)
        ]
        self._tokenizer = running.llm.tokenizer
        self._logprobs = request.logprobs is not None
        echo = [self._tokenizer.decode(ids, skip_special=True) if request.echo else "" for ids in prompts]
        self._echo = [echo[index // choices] for index in range(choices * len(prompts))]
        options = request.stream_options
        self._usage = bool(options and options.include_usage)
        self._progress = bool(options and options.include_progress)
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self.job = Job(running.scheduler, requests, inbox)

    async def whole(self) -> dict[str, Any]:
        """The object of type text_completion."""
        texts = list(self._echo)
        logprobs: list[list[TokenLogprobs]] = [[] for _ in texts]
        reasons = [""] * len(texts)
        async for event in self.job.events():
            if isinstance(event, ChoicePiece):
                texts[event.choice] += event.piece.text
                logprobs[event.choice] += event.piece.logprobs
                if event.piece.finish_reason is not None:
                    reasons[event.choice] = FINISH[event.piece.finish_reason]
        choices = [
            self._choice(index, text, logprobs[index], len(self._echo[index]), reasons[index])
            for index, text in enumerate(texts)
        ]
        return {**self._head, "choices": choices, "usage": self.job.usage}

    async def chunks(self) -> AsyncIterator[dict[str, Any] | None]:
        """The same in pieces: texts, a finish reason in one of its own, the usage where it was asked for."""
        offsets = [len(text) for text in self._echo]
        for index, text in enumerate(self._echo):
            if text:
                yield self._chunk(index, text, [], 0, None)
        async for event in self.job.events(STREAM_WAIT_S):
            if event is None:
                yield None
            elif isinstance(event, Progress):
                if self._progress:
                    progress = {"processed": event.done, "cached": event.cached, "total": event.total}
                    yield {**self._head, "choices": [], "prompt_progress": progress}
            elif isinstance(event, ChoicePiece):
                index, piece = event.choice, event.piece
                if piece.text or piece.logprobs:
                    yield self._chunk(index, piece.text, list(piece.logprobs), offsets[index], None)
                    offsets[index] += len(piece.text)
                if piece.finish_reason is not None:
                    yield self._chunk(index, "", [], offsets[index], FINISH[piece.finish_reason])
        if self._usage:
            yield {**self._head, "choices": [], "usage": self.job.usage}

    def _chunk(
        self, index: int, text: str, logprobs: list[TokenLogprobs], offset: int, reason: str | None
    ) -> dict[str, Any]:
        chunk = {**self._head, "choices": [self._choice(index, text, logprobs, offset, reason)]}
        return {**chunk, "usage": None} if self._usage else chunk

    def _choice(
        self, index: int, text: str, logprobs: list[TokenLogprobs], offset: int, reason: str | None
    ) -> dict[str, Any]:
        return {
            "text": text,
            "index": index,
            "logprobs": completion_logprobs(self._tokenizer, logprobs, offset) if self._logprobs else None,
            "finish_reason": reason,
        }
