"""The process: sockets, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import resource
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from edge_transformer.server.connection import Connection
from edge_transformer.server.service import Service

log = logging.getLogger("edge_transformer.server")

OPEN_FILES = 65536

RESERVED_FILES = 64
"""Left to all else, or a quarter where that is less: model files, kernels, what tries a schema."""

BACKLOG = 2048

TELLING_S = 1.0
"""After answers have been cut, clients have so long to hear of it."""


class Server(uvicorn.Server):
    """uvicorn's, with signals that end it in order: a first one lets answers end, a second one cuts them."""

    def __init__(self, config: uvicorn.Config, service: Service, drain_s: float) -> None:
        super().__init__(config)
        self._service = service
        self._drain_s = drain_s

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
        loop = asyncio.get_running_loop()
        if self.should_exit:
            self._cut()
        else:
            self.should_exit = True
            self._service.draining = True
            loop.call_later(self._drain_s, self._cut)

    def _cut(self) -> None:
        """Requests that are left are told, and then nobody is waited for any more."""
        self._service.stop()
        asyncio.get_running_loop().call_later(TELLING_S, self._leave)

    def _leave(self) -> None:
        logging.getLogger("uvicorn.error").disabled = True  # it would report every connection that is cut
        self.force_exit = True


def configuration(app: ASGIApp) -> uvicorn.Config:
    """uvicorn's settings: nothing is logged of requests, and no connection may say nothing for ever."""
    return uvicorn.Config(
        app,
        http=Connection,
        log_config=None,
        access_log=False,
        lifespan="off",
        server_header=False,
        backlog=BACKLOG,
        h11_max_incomplete_event_size=64 << 10,
    )


def serve(app: ASGIApp, service: Service, host: str, port: int, drain_s: float, started: Callable[[str], None]) -> None:
    """Serve until a signal ends it. `started` is told the address. Raises OSError when it cannot be bound."""
    try:
        _raise_file_limit()
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every client that goes away
        server = Server(configuration(app), service, drain_s)
        with listen(host, port) as listening:
            started(_address(listening))
            asyncio.run(server.serve(sockets=[listening]))
    finally:
        service.close()


class Listener(socket.socket):
    """Closes connections at once that would take the last open files. asyncio would try again thousands of times a
    second and log each.
    """

    _told = False

    def accept(self) -> tuple[socket.socket, object]:
        connection, address = super().accept()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        most = limit - min(RESERVED_FILES, limit // 4)
        if connection.fileno() < most:  # a new file has the lowest number that is free
            return connection, address
        connection.close()
        if not self._told:
            self._told = True
            log.warning("%d files are open; more connections are closed at once (ulimit -n allows more)", most)
        raise ConnectionAbortedError(errno.ECONNABORTED, "too many connections")


def listen(host: str, port: int) -> socket.socket:
    """A socket that takes connections. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return Listener(fileno=socket.create_server((host, port), family=family, backlog=BACKLOG).detach())


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _raise_file_limit() -> None:
    """Every connection is an open file; the usual limit of 1024 is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
