"""uvicorn's connections, with an end for those that never ask for anything."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_SECONDS = 30.0
"""The head of a request must be there so long after the connection, or after the end of the request before."""


WRITE_SECONDS = 120.0
"""A client that takes nothing of an answer for so long has gone."""


class Connection(H11Protocol):
    """Closes itself when a request's head is not there in time, or nobody reads the answer."""

    _head_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._unwatch()
        self._stop_write_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering:
            self._unwatch()
        elif self._head_timer is None:
            self._watch()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stop_write_timer()
        self._write_timer = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._answering and self._head_timer is None:
            self._watch()

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _watch(self) -> None:
        self._head_timer = self.loop.call_later(REQUEST_SECONDS, self._close_idle)

    def _unwatch(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _close_idle(self) -> None:
        self._head_timer = None
        if not self._answering and not self.transport.is_closing():
            self.transport.close()
