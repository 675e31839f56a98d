"""The model that a server serves: opened, running, and opened again after its engine has failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from edge_transformer.engine.llm import LLM
from edge_transformer.engine.request import Limits, Request, StoppedError
from edge_transformer.engine.scheduler import Scheduler
from edge_transformer.errors import EdgeTransformerError
from edge_transformer.server.errors import public_reason
from edge_transformer.server.grammar import Grammars

log = logging.getLogger("edge_transformer.server")

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Running:
    """A model and what runs it."""

    llm: LLM
    scheduler: Scheduler
    grammars: Grammars


class Service:
    """Opens the model with `open_model`, and again whenever its engine has failed. `reason`: why it is not ready."""

    def __init__(
        self,
        open_model: Callable[[], LLM],
        name: str,
        limits: Limits,
        kv_budget: Callable[[LLM], int],
        shorten_context: bool = False,
    ) -> None:
        """kv_budget: bytes that the KV caches of a model may take. shorten_context: where they do not hold one context
        of the model's, shorten it, and say so. Raises what `open_model` and Scheduler raise."""
        self.name = name
        self.limits = limits
        self.created = int(time.time())
        self.restarts = 0
        self.reason: str | None = None
        self.draining = False
        self._open_model = open_model
        self._kv_budget = kv_budget
        self._shorten_context = shorten_context
        self._closed = threading.Event()
        self._restarting: threading.Thread | None = None
        self._running: Running | None = self._open()

    @property
    def running(self) -> Running:
        """Raises StoppedError with the reason when there is none."""
        running = self._running
        if running is None:
            raise StoppedError(f"the engine is not running: {self.reason}")
        if self.draining:
            raise StoppedError("the server is shutting down")
        return running

    @property
    def newest(self) -> Running | None:
        """What runs, also while the server drains."""
        return self._running

    @property
    def ready(self) -> bool:
        return self._running is not None and not self.draining

    def submit(self, running: Running, request: Request) -> None:
        """Raises as Scheduler.submit; `running` may have failed since the request was read."""
        running.scheduler.submit(request)

    def stop(self) -> None:
        """End all answers in the making; their clients are told."""
        self.draining = True
        running = self._running
        if running is not None:
            running.scheduler.stop()

    def close(self) -> None:
        """End everything. Requests that are left are told."""
        self.draining = True
        self._closed.set()
        if self._restarting is not None:
            self._restarting.join()
        running, self._running = self._running, None
        if running is not None:
            running.scheduler.stop()
            running.llm.close()

    def _open(self) -> Running:
        with ExitStack() as undo:  # also where Ctrl-C comes in between
            llm = self._open_model()
            undo.callback(llm.close)
            scheduler = Scheduler(
                llm.engine,
                llm.tokenizer,
                llm.end_token_ids,
                llm.context_length,
                self.limits,
                self._kv_budget(llm),
                failed=self._engine_failed,
                shorten_context=self._shorten_context,
            )
            undo.callback(scheduler.stop)
            if scheduler.context_length < llm.context_length:
                log.warning(
                    "the context is shortened from %d to %d tokens: KV caches may take %d bytes (--kv-budget, --ctx)",
                    llm.context_length,
                    scheduler.context_length,
                    scheduler.memory.budget_bytes,
                )
                llm.context_length = scheduler.context_length
            running = Running(llm, scheduler, Grammars(llm))
            undo.pop_all()
        return running

    def _engine_failed(self, error: Exception) -> None:
        """Called in the thread of the scheduler that has ended."""
        self.reason = public_reason(error)
        failed, self._running = self._running, None
        log.error("the engine failed: %s: %s", type(error).__name__, error, exc_info=error)
        self._restarting = threading.Thread(target=self._restart, args=(failed,), name="ete-restart", daemon=True)
        self._restarting.start()

    def _restart(self, failed: Running | None) -> None:
        if failed is not None:
            try:
                failed.llm.close()
            except EdgeTransformerError as error:  # what has failed may fail to close, too
                log.warning("closing the engine that failed: %s", error)
        pause = FIRST_PAUSE_S
        while not self._closed.is_set():
            try:
                running = self._open()
            except (EdgeTransformerError, OSError, MemoryError) as error:
                self.reason = public_reason(error)
                what = f"{type(error).__name__}: {error}"
                log.error("the model cannot be opened again: %s; next try in %.0f s", what, pause)
                self._closed.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                self.restarts += 1
                self.reason = None
                self._running = running
                log.warning("the engine runs again")
                return
