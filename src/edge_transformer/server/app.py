"""The routes, and what they have in common."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

import msgspec
from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from edge_transformer.server.access import Access, AccessSettings
from edge_transformer.server.chat import ChatCompletion
from edge_transformer.server.chat_prompt import chat_prompt, tokens_of
from edge_transformer.server.completion import Completion, completion_prompts
from edge_transformer.server.delivery import EventStream, WholeAnswer
from edge_transformer.server.errors import ApiError, error_response, invalid, of_error
from edge_transformer.server.metrics import CONTENT_TYPE, metrics
from edge_transformer.server.openapi import openapi
from edge_transformer.server.parameters import read_request
from edge_transformer.server.schema import ChatRequest, CompletionRequest, Sampling, TokenizeRequest
from edge_transformer.server.service import Running, Service
from edge_transformer.server.status import Status

log = logging.getLogger("edge_transformer.server")

PAGE_POLICY = (
    "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
"""The page is one file and speaks to this server only."""

BODY_SECONDS = 30.0
"""A request's body must be there by then."""


@dataclass(frozen=True, slots=True)
class AppSettings:
    """max_body_bytes: larger bodies are refused. log_prompts: write prompts, as the model gets them, to the log."""

    access: AccessSettings = field(default_factory=AccessSettings)
    max_body_bytes: int = 16 << 20
    log_prompts: bool = False


class App:
    """The endpoints over one service."""

    def __init__(self, service: Service, settings: AppSettings) -> None:
        self.service = service
        self.settings = settings
        self._status = Status(service)
        self._page = resources.files("edge_transformer.server").joinpath("page.html").read_bytes()

    async def chat(self, request: Request) -> Response:
        asked: ChatRequest = read_request(await self._body(request), ChatRequest)
        self._check(asked)
        running = self.service.running
        prompt = await to_thread.run_sync(chat_prompt, running.llm, running.grammars, asked)
        self._log(running, [prompt.ids])
        completion = ChatCompletion(running, asked, prompt, self.service.name)
        if asked.stream:
            return EventStream(completion.chunks, completion.job.leave)
        return WholeAnswer(completion.whole, completion.job.leave)

    async def completion(self, request: Request) -> Response:
        asked: CompletionRequest = read_request(await self._body(request), CompletionRequest)
        self._check(asked)
        running = self.service.running
        prompts = await to_thread.run_sync(completion_prompts, running.llm, asked)
        self._log(running, prompts)
        completion = Completion(running, asked, prompts, self.service.name)
        if asked.stream:
            return EventStream(completion.chunks, completion.job.leave)
        return WholeAnswer(completion.whole, completion.job.leave)

    async def tokenize(self, request: Request) -> Response:
        asked: TokenizeRequest = read_request(await self._body(request), TokenizeRequest)
        llm = self.service.running.llm
        ids = await to_thread.run_sync(tokens_of, llm, asked)
        answer = {"tokens": ids, "count": len(ids), "max_model_len": llm.context_length}
        # Millions of tokens are written in a moment: the loop that hands out other answers waits for it.
        return Response(msgspec.json.encode(answer), media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        return Response(metrics(self.service), media_type=CONTENT_TYPE)

    async def page(self, request: Request) -> Response:
        headers = {"content-security-policy": PAGE_POLICY, "x-content-type-options": "nosniff"}
        return Response(self._page, media_type="text/html; charset=utf-8", headers=headers)

    async def status(self, request: Request) -> Response:
        return JSONResponse(self._status.read())

    async def openapi(self, request: Request) -> Response:
        return JSONResponse(openapi(self.service.name))

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name != self.service.name:
            raise _no_model(name, self.service.name)
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        service = self.service
        status = "ok" if service.ready else "draining" if service.draining else "restarting"
        body: dict[str, Any] = {"status": status}
        if service.reason is not None:
            body["reason"] = service.reason
        return JSONResponse(body, 200 if service.ready else 503)

    def _model(self) -> dict[str, Any]:
        running = self.service.newest
        context = None if running is None else running.llm.context_length
        return {
            "id": self.service.name,
            "object": "model",
            "created": self.service.created,
            "owned_by": "edge-transformer-engine",
            "max_model_len": context,
        }

    def _log(self, running: Running, prompts: Sequence[Sequence[int]]) -> None:
        if self.settings.log_prompts:
            for ids in prompts:
                log.info("prompt: %r", running.llm.tokenizer.decode(ids))

    def _check(self, asked: Sampling) -> None:
        if asked.model != self.service.name:
            raise _no_model(asked.model, self.service.name)
        if asked.stream_options is not None and not asked.stream:
            raise invalid("stream_options needs stream: true", "stream_options")

    async def _body(self, request: Request) -> bytes:
        limit = self.settings.max_body_bytes
        too_large = ApiError(413, f"the body is larger than the {limit} bytes accepted", code="body_too_large")
        length = request.headers.get("content-length", "")
        if length.isdigit() and int(length) > limit:
            raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(BODY_SECONDS):
                async for part in request.stream():
                    body += part
                    if len(body) > limit:
                        raise too_large
        except TimeoutError as error:
            raise ApiError(408, f"the body was not there within {BODY_SECONDS:.0f} seconds", code="timeout") from error
        return bytes(body)


def make_app(service: Service, settings: AppSettings) -> ASGIApp:
    """The ASGI application, behind its access rules."""
    app = App(service, settings)
    routes = [
        Route("/", _answering(app.page), methods=["GET"]),
        Route("/v1/chat/completions", _answering(app.chat), methods=["POST"]),
        Route("/v1/completions", _answering(app.completion), methods=["POST"]),
        Route("/v1/models", _answering(app.models), methods=["GET"]),
        Route("/v1/models/{name:path}", _answering(app.model), methods=["GET"]),
        Route("/tokenize", _answering(app.tokenize), methods=["POST"]),
        Route("/metrics", _answering(app.metrics), methods=["GET"]),
        Route("/status", _answering(app.status), methods=["GET"]),
        Route("/openapi.json", _answering(app.openapi), methods=["GET"]),
        Route("/health", _answering(app.health), methods=["GET"]),
    ]
    handlers = {HTTPException: _http_error}
    return Access(_closing(Starlette(routes=routes, exception_handlers=handlers), service), settings.access)


def _closing(app: ASGIApp, service: Service) -> ASGIApp:
    """While the service ends, answers say that their connection is closed after them: a proxy that keeps connections
    would send its next request into it.
    """

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_closing(message: Message) -> None:
            if service.draining and message["type"] == "http.response.start":
                headers = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"connection"]
                message = {**message, "headers": [*headers, (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, send_closing)

    return answer


def _answering(endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """The endpoint, with errors as answers in OpenAI's shape."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except ClientDisconnect:  # while its body was read: nobody is there to be told
            return Response(status_code=499)
        except Exception as error:  # noqa: BLE001 - told to the client, whatever it is
            return error_response(of_error(error))

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    """What Starlette refuses by itself: unknown paths and methods."""
    if not isinstance(error, HTTPException):
        raise error
    what = f"{request.method} {request.url.path}"
    message = f"{what}: no such path" if error.status_code == 404 else f"{what}: {error.detail}"
    response = error_response(ApiError(error.status_code, message))
    for name, value in (error.headers or {}).items():
        response.headers[name] = value
    return response


def _no_model(asked: str, served: str) -> ApiError:
    return ApiError(
        404, f"there is no model {asked!r} here; this server has {served!r}", param="model", code="model_not_found"
    )
