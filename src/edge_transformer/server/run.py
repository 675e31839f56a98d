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

from edge_transformer.errors import UsageError
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
            self._tell_what_is_left()
            loop.call_later(self._drain_s, self._cut)

    def _tell_what_is_left(self) -> None:
        """For the person whose Ctrl-C seems to do nothing."""
        running = self._service.newest
        if running is not None and (left := running.scheduler.running + running.scheduler.waiting):
            answers = "1 answer has" if left == 1 else f"{left} answers have"
            log.warning("%s %.0f seconds to end; Ctrl-C or SIGTERM again ends at once", answers, self._drain_s)

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


def serve(app: ASGIApp, service: Service, bound: socket.socket, drain_s: float, started: Callable[[str], None]) -> None:
    """Serve until a signal ends it, and close `bound`, which is of `bind`. `started` is told the address. Raises
    UsageError when another program listens there by now.
    """
    try:
        _raise_file_limit()
        logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of every client that goes away
        server = Server(configuration(app), service, drain_s)
        with bound:
            try:
                bound.listen(BACKLOG)
            except OSError as error:
                raise _refused(error, *bound.getsockname()[:2]) from error
            started(_address(bound))
            asyncio.run(server.serve(sockets=[bound]))
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


def bind(host: str, port: int) -> socket.socket:
    """A socket with that address. It takes no connections before it is served, so that nobody waits for a model that
    loads. Raises UsageError when there is no such address, or it is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = Listener(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        if family is socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind((host, port))
    except (OSError, UnicodeError) as error:  # UnicodeError: no name that a host can have
        listener.close()
        raise _refused(error, host, port) from error
    return listener


def _refused(error: OSError | UnicodeError, host: str, port: int) -> UsageError:
    number = error.errno if isinstance(error, OSError) else None
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if number == errno.EADDRINUSE:
        return UsageError(f"port {port} is in use: choose another with --port")
    if number == errno.EACCES:
        return UsageError(f"port {port} is not open to this user ({reason}): choose one from 1024 on with --port")
    if isinstance(error, socket.gaierror | UnicodeError) or number == errno.EADDRNOTAVAIL:
        return UsageError(
            f"host {host!r} is no address of this machine ({reason}): give one with --host, such as 127.0.0.1, or "
            "0.0.0.0 for all"
        )
    return UsageError(f"{host} port {port} cannot be served at ({reason}): choose others with --host and --port")


def _address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _raise_file_limit() -> None:
    """Every connection is an open file; the usual limit of 1024 is raised as far as it may be."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
