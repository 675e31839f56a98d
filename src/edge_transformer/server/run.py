"""The process: sockets, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import signal
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from edge_transformer.server.service import Service

OPEN_FILES = 65536


class Server(uvicorn.Server):
    """uvicorn's, with signals that end it in order: a first one drains, a second one cuts."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._end)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    def _end(self) -> None:
        self.force_exit = self.should_exit
        self._service.draining = True
        self.should_exit = True


def serve(app: ASGIApp, service: Service, host: str, port: int, drain_s: float, started: Callable[[str], None]) -> None:
    """Serve until a signal ends it. `started` is told the address. Raises OSError when it cannot be bound."""
    _raise_file_limit()
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_graceful_shutdown=max(1, round(drain_s)),
        server_header=False,
        h11_max_incomplete_event_size=64 << 10,
    )
    server = Server(config, service)
    socket = config.bind_socket()
    try:
        bound_host, bound_port = socket.getsockname()[:2]
        shown = f"[{bound_host}]" if ":" in bound_host else bound_host
        started(f"http://{shown}:{bound_port}")
        asyncio.run(server.serve(sockets=[socket]))
    finally:
        socket.close()
        service.close()


def _raise_file_limit() -> None:
    """Every connection is an open file; the usual limit of 1024 is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
