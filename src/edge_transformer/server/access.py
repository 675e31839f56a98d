"""Who may ask: API keys, host names, origins of web pages, and how many requests at once."""

from __future__ import annotations

import hashlib
import hmac
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_transformer.server.errors import ApiError, error_response

log = logging.getLogger("edge_transformer.server")

OPEN_PATHS = frozenset(["/", "/health"])
"""What needs no key: the page, which holds nothing of its own, and whether the server lives."""

LOOPBACK = frozenset(["localhost", "127.0.0.1", "[::1]"])


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """api_keys: none means that everybody may ask. origins: web pages of other hosts that may ("*": all). hosts: names
    under which the server may be addressed; none means all. max_requests: in the making at once.
    """

    api_keys: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    hosts: frozenset[str] = field(default_factory=frozenset)
    max_requests: int = 1024


class _Seen:
    """Passes on what is sent, and remembers the status."""

    def __init__(self, send: Send) -> None:
        self.status: int | str = "gone"
        self.since = time.perf_counter()
        self._send = send

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)


class Access:
    """Middleware that refuses before a body is read."""

    def __init__(self, app: ASGIApp, settings: AccessSettings) -> None:
        self._app = app
        self._settings = settings
        self._keys = [_digest(key.encode()) for key in settings.api_keys]
        self._requests = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        seen = _Seen(send)
        try:
            await self._answer(scope, receive, seen)
        finally:
            # The path as it came, percent-encoded: a line end in it would make a line of its own.
            path, seconds = quote(scope["path"]), time.perf_counter() - seen.since
            log.info("%s %s %s %.3f s", scope["method"], path, seen.status, seconds)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        origin = headers.get("origin")
        foreign = origin is not None and not _same_origin(origin, headers.get("host", ""))
        allowed = foreign and self._allows(origin)
        if foreign and allowed:
            send = _with_cors(send, origin or "")
            if scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
                await _preflight()(scope, receive, send)
                return
        refusal = self._refusal(scope["path"], headers, foreign and not allowed)
        if refusal is not None:
            await error_response(refusal)(scope, receive, send)
            return
        self._requests += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._requests -= 1

    def _refusal(self, path: str, headers: Headers, foreign: bool) -> ApiError | None:
        settings = self._settings
        if settings.hosts and not self._keys and _name_of(headers.get("host", "")) not in settings.hosts:
            return ApiError(403, "this server answers to its own name only; set an API key to use others")
        if foreign:
            return ApiError(403, "pages of other hosts may not use this server; --cors-origin allows one")
        if self._keys and path not in OPEN_PATHS and not self._has_key(headers):
            return ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", code="invalid_api_key")
        if self._requests >= settings.max_requests:
            message = f"{settings.max_requests} requests are being answered; try again later"
            return ApiError(503, message, code="too_many_requests", retry_after=1)
        return None

    def _has_key(self, headers: Headers) -> bool:
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = _digest(key.strip().encode("latin-1", "replace"))
        # Every key is compared, each in constant time.
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _allows(self, origin: str | None) -> bool:
        return "*" in self._settings.origins or origin in self._settings.origins


def hosts_of(address: str) -> frozenset[str]:
    """Names that a server bound to `address` answers to: those of this machine where only it can reach the server,
    else all. A web page that has its own name point to this machine is so kept out.
    """
    shown = f"[{address}]" if ":" in address else address
    return LOOPBACK | {shown} if shown in LOOPBACK or address.startswith("127.") else frozenset()


def read_keys(texts: Sequence[str]) -> tuple[str, ...]:
    """Keys out of lines; empty lines are left out."""
    return tuple(line.strip() for text in texts for line in text.splitlines() if line.strip())


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _name_of(host: str) -> str:
    """The name in a Host header, without its port."""
    name, _, port = host.rpartition(":")
    return (name if name and port.isdigit() else host).lower()


def _same_origin(origin: str, host: str) -> bool:
    return origin.partition("://")[2].lower() == host.lower()


def _preflight() -> Response:
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": "GET, POST",
            "access-control-allow-headers": "authorization, content-type",
            "access-control-max-age": "600",
        },
    )


def _with_cors(send: Send, origin: str) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": list(message.get("headers", []))}
            headers = MutableHeaders(scope=message)
            headers["access-control-allow-origin"] = origin
            headers.append("vary", "origin")
        await send(message)

    return send_with_headers
