"""How an answer reaches its client: whole, or as server-sent events; and what happens when the client has gone."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from edge_transformer.server.errors import of_error

KEEP_ALIVE_S = 10.0
FIRST_BYTES_S = 2.0
"""A stream begins when there is something to say, or after so long: until then an error can still have its status."""

_encode = msgspec.json.Encoder().encode

Whole = Callable[[], Awaitable[dict[str, Any]]]
Chunks = Callable[[], AsyncIterator[dict[str, Any] | None]]


class Delivery(Response, ABC):
    """Runs `produce` while the client is there; calls `leave` when it has gone, and at the end."""

    def __init__(self, leave: Callable[[], None]) -> None:
        super().__init__()
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answering = asyncio.ensure_future(self.answer(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({answering, gone}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        finally:
            self._leave()
            for task in (answering, gone):
                task.cancel()
            await asyncio.gather(answering, gone, return_exceptions=True)

    @abstractmethod
    async def answer(self, send: Send) -> None:
        """Send headers and body."""


class WholeAnswer(Delivery):
    """One JSON object."""

    def __init__(self, produce: Whole, leave: Callable[[], None]) -> None:
        super().__init__(leave)
        self._produce = produce

    async def answer(self, send: Send) -> None:
        try:
            status, body = 200, await self._produce()
        except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
            failure = of_error(error)
            status, body = failure.status, failure.body
        data = _encode(body)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": data})


class EventStream(Delivery):
    """Server-sent events: a chunk each, comments while there is nothing to say, and [DONE] at the end."""

    def __init__(self, produce: Chunks, leave: Callable[[], None]) -> None:
        """produce: yields chunks, and None where nothing has come for a while."""
        super().__init__(leave)
        self._produce = produce

    async def answer(self, send: Send) -> None:
        started = False
        try:
            async for chunk in self._produce():
                if not started:
                    await _start_stream(send)
                    started = True
                data = b": keep-alive\n\n" if chunk is None else b"data: " + _encode(chunk) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
            end = b"data: [DONE]\n\n"
        except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
            failure = of_error(error)
            if not started:
                data = _encode(failure.body)
                headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
                await send({"type": "http.response.start", "status": failure.status, "headers": headers})
                await send({"type": "http.response.body", "body": data})
                return
            end = b"data: " + _encode(failure.body) + b"\n\n"
        await send({"type": "http.response.body", "body": end})


async def _start_stream(send: Send) -> None:
    headers = [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-store"),
        (b"x-accel-buffering", b"no"),
    ]
    await send({"type": "http.response.start", "status": 200, "headers": headers})


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
