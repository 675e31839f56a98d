"""POST /v1/chat/completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from edge_transformer.engine.request import Request
from edge_transformer.engine.sampling import TokenLogprobs
from edge_transformer.server.answer_format import AnswerFormat, Delta, Parser
from edge_transformer.server.chat_prompt import ChatPrompt
from edge_transformer.server.inbox import ChoicePiece, Inbox, Progress
from edge_transformer.server.job import STREAM_WAIT_S, Job, NumberedListener
from edge_transformer.server.logprobs import chat_logprobs
from edge_transformer.server.parameters import chat_max_tokens, generation_config, seeds
from edge_transformer.server.schema import ChatRequest
from edge_transformer.server.service import Running

FINISH = {"stop": "stop", "length": "length", "context": "length"}


@dataclass(slots=True)
class _Whole:
    """A choice as far as it has come."""

    content: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str = ""


class ChatCompletion:
    """One request's answer, whole or in chunks."""

    def __init__(self, running: Running, request: ChatRequest, prompt: ChatPrompt, model: str) -> None:
        """Submits the request; raises ApiError for a field at fault, and as Scheduler.submit."""
        choices = request.n or 1
        logprobs = (request.top_logprobs or 0) if request.logprobs else None
        vocabulary = running.llm.config.vocab_size
        config = generation_config(request, chat_max_tokens(request), logprobs, vocabulary)
        inbox = Inbox()
        engine_request = Request(
            prompt.ids,
            config,
            seeds(request, choices),
            NumberedListener(inbox, 0),
            prompt.format.constraints,
        )
        self.job = Job(running.scheduler, [engine_request], inbox)
        self._tokenizer = running.llm.tokenizer
        self._format: AnswerFormat = prompt.format
        self._logprobs = request.logprobs or False
        options = request.stream_options
        self._usage = bool(options and options.include_usage)
        self._progress = bool(options and options.include_progress)
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def whole(self) -> dict[str, Any]:
        """The object of type chat.completion."""
        choices = [_Whole() for _ in range(self.job.choices)]
        parsers = self._parsers()
        async for event in self.job.events():
            if isinstance(event, ChoicePiece):
                choice, piece = choices[event.choice], event.piece
                choice.logprobs += piece.logprobs
                for delta in _deltas(parsers[event.choice], piece.text, piece.finish_reason):
                    _add(choice, delta)
                if piece.finish_reason is not None:
                    choice.finish_reason = parsers[event.choice].finish_reason(FINISH[piece.finish_reason])
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": self.job.usage,
        }

    async def chunks(self) -> AsyncIterator[dict[str, Any] | None]:
        """Objects of type chat.completion.chunk: for each choice its role, its text, its finish reason in one of its
        own; then the usage where it was asked for. None where nothing came for a while.
        """
        parsers = self._parsers()
        roles_given = False
        async for event in self.job.events(STREAM_WAIT_S):
            if not roles_given and not (isinstance(event, Progress) and not self._progress):
                roles_given = True
                for index in range(self.job.choices):
                    yield self._chunk(index, {"role": "assistant", "content": ""})
            if event is None:
                yield None
            elif isinstance(event, Progress):
                if self._progress:
                    progress = {"processed": event.done, "cached": event.cached, "total": event.total}
                    yield {**self._chunk_head, "choices": [], "prompt_progress": progress}
            elif isinstance(event, ChoicePiece):
                index, piece = event.choice, event.piece
                deltas = _deltas(parsers[index], piece.text, piece.finish_reason)
                if piece.logprobs and not deltas:
                    deltas = [Delta(content="")]
                for number, delta in enumerate(deltas):
                    logprobs = piece.logprobs if number == 0 else ()
                    yield self._chunk(index, delta.fields, logprobs)
                if piece.finish_reason is not None:
                    reason = parsers[index].finish_reason(FINISH[piece.finish_reason])
                    yield self._chunk(index, {}, (), reason)
        if self._usage:
            yield {**self._chunk_head, "choices": [], "usage": self.job.usage}

    def _parsers(self) -> list[Parser]:
        return [self._format.parser() for _ in range(self.job.choices)]

    @property
    def _chunk_head(self) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk"}

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        if logprobs:
            choice["logprobs"] = chat_logprobs(self._tokenizer, logprobs)
        chunk = {**self._chunk_head, "choices": [choice]}
        return {**chunk, "usage": None} if self._usage else chunk

    def _choice(self, index: int, choice: _Whole) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.reasoning:
            message["reasoning_content"] = choice.reasoning
        if choice.calls:
            message["tool_calls"] = choice.calls
            message["content"] = choice.content or None
        return {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(self._tokenizer, choice.logprobs) if self._logprobs else None,
            "finish_reason": choice.finish_reason,
        }


def _deltas(parser: Parser, text: str, finish_reason: str | None) -> list[Delta]:
    deltas = parser.push(text) if text else []
    return deltas if finish_reason is None else deltas + parser.finish()


def _add(choice: _Whole, delta: Delta) -> None:
    choice.content += delta.content or ""
    choice.reasoning += delta.reasoning or ""
    for call in delta.calls:
        if "id" in call:
            started = {**call, "function": dict(call["function"])}
            del started["index"]
            choice.calls.append(started)
        else:
            choice.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
