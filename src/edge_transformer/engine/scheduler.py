"""Continuous batching: many requests, one thread, one pass after the other over the weights.

A pass holds the next token of every answer in the making and, under a budget of rows, pieces of the prompts that are
still being read; requests join and leave between passes. Text does not depend on who shares a pass (rows are computed
alike whatever their neighbours are, and draws are a function of seed and position), so a request whose memory is taken
away for an older one is computed again later, to the same bits.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from edge_transformer.engine.answer import Answer, FloatArray
from edge_transformer.engine.chunk import CHUNK_BORDER, Chunk
from edge_transformer.engine.core import Engine, PassResult
from edge_transformer.engine.kv_budget import BudgetedTileMemory
from edge_transformer.engine.live import Live
from edge_transformer.engine.pass_rows import next_chunk, plan_rows
from edge_transformer.engine.prefix_cache import PrefixCache
from edge_transformer.engine.request import Limits, QueueFullError, Request, StoppedError
from edge_transformer.engine.scheduler_statistics import SchedulerStatistics
from edge_transformer.engine.sequence import Sequence as EngineSequence
from edge_transformer.errors import CapacityError, EdgeTransformerError, UsageError
from edge_transformer.ops.batch import KV_TILE_POSITIONS

if TYPE_CHECKING:
    from edge_transformer.text.tokenizer import Tokenizer

STATE_SHARE = 4
"""Checkpoints of recurrent state may take 1 / STATE_SHARE of the budget of KV caches, besides it: those of answers in
the making, and as much those of kept prefixes.
"""


class Scheduler:
    """Runs requests on an engine that nobody else uses. `failure` is what ended it, where something did."""

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer,
        end_token_ids: Sequence[int],
        context_length: int,
        limits: Limits,
        kv_budget_bytes: int,
        failed: Callable[[Exception], None] | None = None,
        shorten_context: bool = False,
    ) -> None:
        """kv_budget_bytes: what KV caches may take together. failed: called, in the scheduler's thread, when the engine
        has failed; the requests there were have been told then, and none is taken any more. shorten_context: where the
        budget does not hold one context, a shorter one will do; `context_length` says what it came to.

        Raises UsageError when the budget does not hold one sequence of the context, or more sequences are to run than
        a pass has rows.
        """
        self.statistics = SchedulerStatistics()
        self.failure: Exception | None = None
        self.limits = limits
        self.memory = BudgetedTileMemory(engine.state_shape.memory, kv_budget_bytes)
        engine.state_shape.memory = self.memory
        state_budget = kv_budget_bytes // STATE_SHARE
        if engine.state_shape.recurrent is not None:
            budget = state_budget // limits.sequences
            engine.state_shape.recurrent = replace(engine.state_shape.recurrent, budget_bytes=budget)
        self._engine = engine
        self._tokenizer = tokenizer
        self._end_token_ids = tuple(end_token_ids)
        self.context_length = context_length
        self._failed = failed
        self._check_limits(shorten_context)
        self._cache = PrefixCache(max_state_bytes=state_budget)
        self._live: list[Live] = []
        self._waiting: deque[Live] = deque()
        self._numbers = 0
        self._moved_bytes = 0
        self._tolerant = False
        self._stopping = False
        self._arrived: list[Request] = []
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="ete-scheduler", daemon=True)
        self._thread.start()

    @property
    def running(self) -> int:
        """Answers in the making."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Requests, and choices of requests, that wait."""
        return len(self._arrived) + len(self._waiting)

    @property
    def kept_prefixes(self) -> int:
        return len(self._cache)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises UsageError (more choices than run at once), QueueFullError, StoppedError."""
        if len(request.seeds) > self.limits.sequences:
            raise UsageError(f"n is {len(request.seeds)}; this server makes {self.limits.sequences} answers at once")
        with self._wake:
            if self._stopping or self.failure is not None:
                raise StoppedError("the engine is not running")
            if self.waiting >= self.limits.queue:
                raise QueueFullError(f"{self.limits.queue} requests are waiting already; try again later")
            self._arrived.append(request)
            self._wake.notify()

    def cancel(self, request: Request) -> None:
        """End a request; a pass of its rows is left at the next layer. Its listener hears no more of it."""
        with self._wake:
            request.cancelled = True
            self._wake.notify()

    def stop(self) -> None:
        """End the thread after the layer it is in; requests that are left fail with StoppedError."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_limits(self, shorten_context: bool) -> None:
        most = self._engine.max_rows - CHUNK_BORDER
        if self.limits.sequences > most:
            raise UsageError(f"{self.limits.sequences} sequences do not fit into a pass; allowed: {most} or fewer")
        budget = self.memory.budget_bytes
        if shorten_context:
            borders = range(KV_TILE_POSITIONS, self.context_length + KV_TILE_POSITIONS, KV_TILE_POSITIONS)
            fitting = bisect_right(borders, budget, key=self._kv_bytes)
            self.context_length = min(self.context_length, max(1, fitting) * KV_TILE_POSITIONS)
        needed = self._kv_bytes(self.context_length)
        if needed > budget:
            raise UsageError(
                f"one context of {self.context_length} tokens needs {needed} bytes ({needed / 2**20:.1f} MiB) of KV "
                f"cache; the budget (--kv-budget) is {budget}: raise it or shorten the context (--ctx)"
            )

    def _run(self) -> None:
        try:
            while self._next_round():
                pass
            self._end(StoppedError("the server is shutting down"))
        except Exception as error:  # noqa: BLE001 - whatever it is, requests must hear of it and the server live on
            self._end(error)
            if self._failed is not None:
                self._failed(error)

    def _end(self, error: Exception) -> None:
        """Tell all requests, and give their memory back, as far as an engine that may have failed takes it."""
        with self._wake:
            self.failure = error
            arrived, self._arrived = self._arrived, []
        requests = dict.fromkeys([*(live.request for live in (*self._live, *self._waiting)), *arrived])
        for request in requests:
            if not request.cancelled:
                request.listener.failed(error)
        left = [*self._live, *self._waiting]
        self._live.clear()
        self._waiting.clear()
        give_back: list[Callable[[], None]] = [partial(self._close, live) for live in left]
        for call in (*give_back, self._cache.clear):
            with suppress(EdgeTransformerError):
                call()

    def _next_round(self) -> bool:
        """One pass, or a wait for something to do; False when the thread is to end."""
        with self._wake:
            while not (self._stopping or self._arrived or self._waiting or self._live):
                self._wake.wait()
            if self._stopping:
                return False
            arrived, self._arrived = self._arrived, []
        for request in arrived:
            self._waiting.append(self._first_choice(request))
        self._drop_cancelled()
        self._admit()
        chunks = self._chunks()
        if chunks:
            self._pass(chunks)
        return True

    def _first_choice(self, request: Request) -> Live:
        choices = []
        for choice, seed in enumerate(request.seeds):
            answer = Answer(
                self._tokenizer,
                request.prompt_ids,
                self._end_token_ids,
                request.config,
                self.context_length,
                seed,
                request.constraints[choice] if request.constraints else None,
            )
            self._numbers += 1
            choices.append(Live(request, answer, choice, self._numbers, []))
        choices[0].others = choices[1:]
        return choices[0]

    def _drop_cancelled(self) -> None:
        for live in [live for live in self._live if live.request.cancelled]:
            self._leave(live)
        if any(live.request.cancelled for live in self._waiting):
            left = [live for live in self._waiting if live.request.cancelled]
            self.statistics.cancelled += len({id(live.request) for live in left})
            for live in left:
                self._close(live)
            self._waiting = deque(live for live in self._waiting if not live.request.cancelled)

    def _leave(self, live: Live) -> None:
        """A choice ends: its prompt's state is kept for requests to come."""
        self._live.remove(live)
        if live.request.cancelled and live.choice == 0:
            self.statistics.cancelled += 1
        if live.sequence is not None:
            self._cache.keep(live.sequence)
            live.sequence = None

    def _admit(self) -> None:
        """Let requests in, oldest first, while there is room for their answers and, as it looks, for their state."""
        while self._waiting:
            live = self._waiting[0]
            if len(self._live) + self._reserved() + 1 + len(live.others) > self.limits.sequences:
                return
            if not (self._bring_back(live) if live.moved_bytes else self._start(live)):
                return
            self._waiting.popleft()
            self._live.append(live)

    def _start(self, live: Live) -> bool:
        """Give a choice its sequence, begun where an earlier one is found; False when there is no room for it."""
        running = [other.sequence for other in self._live if other.sequence is not None]
        sequence = self._cache.take(live.request.prompt_ids, running) or self._engine.new_sequence()
        if self._live and not self._make_room(self._needed(live) - sequence.held_bytes):
            sequence.close()
            return False
        live.sequence = sequence
        if not live.answer.ids:
            live.cached = len(sequence)
            self.statistics.cached_tokens += live.cached
        return True

    def _bring_back(self, live: Live) -> bool:
        """Take a choice's state back from host memory; False when there is no room for it."""
        if live.sequence is None or (self._live and not self._make_room(self._needed(live))):
            return False
        while True:
            try:
                live.sequence.move_back()
            except CapacityError:
                if not self._cache.evict():
                    return False
            else:
                self._moved_bytes -= live.moved_bytes
                live.moved_bytes = 0
                return True

    def _needed(self, live: Live) -> int:
        """Bytes to have free before `live` comes in: its own, and what those that run have not taken yet of theirs,
        and of a next tile each.
        """
        next_tile = KV_TILE_POSITIONS
        running = sum(
            max(self._kv_bytes(other.tokens + next_tile) - other.sequence.held_bytes, 0)
            for other in self._live
            if other.sequence is not None
        )
        return self._kv_bytes(live.tokens + 1) + running

    def _kv_bytes(self, tokens: int) -> int:
        """Of a sequence of `tokens` tokens at most."""
        return self._engine.state_shape.kv_bytes(tokens, self._engine.max_rows)

    def _reserved(self) -> int:
        """Choices that will join once their prompt is read."""
        return sum(len(live.others) for live in self._live)

    def _make_room(self, nbytes: int) -> bool:
        """Whether `nbytes` are free, if need be after kept prefixes have been given up."""
        while self.memory.used_bytes + nbytes > self.memory.budget_bytes:
            if not self._cache.evict():
                return False
        return True

    def _chunks(self) -> list[tuple[Live, Chunk]]:
        """Rows of the next pass, with memory for each of them."""
        planned = plan_rows(self._live, self._engine.max_rows, self.limits.pass_tokens)
        prepared = [(live, count) for live, count in planned if self._prepare(live, count)]
        # An older one may have taken the memory of a younger one that was prepared before it.
        return [(live, next_chunk(live, count)) for live, count in prepared if live in self._live]

    def _prepare(self, live: Live, count: int) -> bool:
        """Have memory for `count` more tokens: kept prefixes give way, then the youngest answers. False when `live`
        itself had to.
        """
        while live.sequence is not None and live in self._live:
            try:
                live.sequence.prepare(count)
            except CapacityError:
                if self._cache.evict():
                    continue
                youngest = max(self._live, key=lambda other: other.number)
                if youngest is live and len(self._live) == 1:
                    raise
                self._preempt(youngest)
            else:
                return True
        return False

    def _preempt(self, live: Live) -> None:
        """Take a choice's memory; it goes on later where it is now, ahead of those that came after it. What lay on a
        GPU is kept in host memory as far as that may take it, else it is computed again.
        """
        self.statistics.preemptions += 1
        self._live.remove(live)
        if live.sequence is not None and self._may_move(live.sequence):
            live.moved_bytes = live.sequence.move_to_host()
            self._moved_bytes += live.moved_bytes
        else:
            self._close(live)
        self._waiting.appendleft(live)

    def _may_move(self, sequence: EngineSequence) -> bool:
        fits = self._moved_bytes + sequence.held_bytes <= self.memory.budget_bytes
        return not self.memory.on_host and len(sequence) > 0 and fits

    def _pass(self, chunks: list[tuple[Live, Chunk]]) -> None:
        statistics, started = self.statistics, time.perf_counter()
        engine = self._engine
        with engine.lock:
            result = engine.step([chunk for _, chunk in chunks], lambda: self._give_up(chunks))
            if result is None:
                statistics.passes_given_up += 1
                self._tolerant = True
                return
            self._tolerant = False
            statistics.count_pass(chunks_rows(chunks, "prompt"), chunks_rows(chunks, "decode"), len(chunks))
            self._after_prompts(chunks)
            self._take_tokens(chunks, result)
        statistics.pass_seconds.add(time.perf_counter() - started)

    def _give_up(self, chunks: list[tuple[Live, Chunk]]) -> bool:
        """Asked between layers. A pass is left when the scheduler stops, when nobody waits for it any more, or when a
        prompt in it is not wanted any more, which would hold up the others; but not twice in a row for that, so that
        those who come and go do not keep the others from getting on.
        """
        if self._stopping:
            return True
        if all(live.request.cancelled for live, _ in chunks):
            return True
        if self._tolerant or self._engine.state_shape.recurrent is not None:
            return False
        return any(live.request.cancelled for live, chunk in chunks if chunk.kind == "prompt")

    def _after_prompts(self, chunks: list[tuple[Live, Chunk]]) -> None:
        for live, chunk in chunks:
            if chunk.kind != "prompt" or live.request.cancelled:
                continue
            sequence, total = chunk.sequence, len(live.request.prompt_ids)
            if not live.answer.ids:
                live.request.listener.progress(len(sequence), live.cached, total)

    def _take_tokens(self, chunks: list[tuple[Live, Chunk]], result: PassResult) -> None:
        if all(chunks[index][0].answer.takes_likeliest for index, _ in result.rows):
            for (index, _), token in zip(result.rows, result.likeliest(), strict=True):
                self._take_token(chunks[index][0], token)
            return
        for rows, logits in result.blocks():
            for (index, _), row in zip(rows, logits, strict=True):
                self._take_token(chunks[index][0], row)

    def _take_token(self, live: Live, logits: FloatArray | int) -> None:
        """The next token of a choice, and of those that wait for the same prompt. `logits`: f32 [V], or the token."""
        others, live.others = live.others, []
        for other in others:
            assert live.sequence is not None
            other.sequence = live.sequence.fork()
            self._live.append(other)
        for choice in (live, *others):
            if choice.request.cancelled:
                continue
            try:
                answer = choice.answer
                piece = answer.push_token(logits) if isinstance(logits, int) else answer.push(logits)
            except UsageError as error:
                self._refuse(choice.request, error)
                return
            self._count_token(choice)
            if piece.finish_reason is not None:  # before it is told: whoever hears it may let go of the request
                self._leave(choice)
            choice.request.listener.piece(choice.choice, piece)

    def _count_token(self, live: Live) -> None:
        now = time.perf_counter()
        if len(live.answer.ids) == 1:
            self.statistics.first_token_seconds.add(now - live.request.submitted)
        else:
            self.statistics.token_seconds.add(now - live.last_token)
        live.last_token = now
        self.statistics.answer_tokens += 1

    def _refuse(self, request: Request, error: EdgeTransformerError) -> None:
        """A request's own fault ends it, and no other."""
        request.cancelled = True
        request.listener.failed(error)

    def _close(self, live: Live) -> None:
        if live.sequence is not None:
            live.sequence.close()
            live.sequence = None
        self._moved_bytes -= live.moved_bytes
        live.moved_bytes = 0


def chunks_rows(chunks: Sequence[tuple[Live, Chunk]], kind: str) -> int:
    """Rows of this kind."""
    return sum(len(chunk.tokens) for _, chunk in chunks if chunk.kind == kind)
