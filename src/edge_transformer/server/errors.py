"""Errors in the shape of OpenAI's: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging

from starlette.responses import JSONResponse, Response

from edge_transformer.engine.request import QueueFullError, StoppedError
from edge_transformer.errors import CapacityError, ContextLengthError, EdgeTransformerError, TextError, UsageError

log = logging.getLogger("edge_transformer.server")


class ApiError(Exception):
    """An answer other than success. param: the field at fault. code: what a program can tell errors apart by."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def kind(self) -> str:
        """OpenAI's word for the class of errors."""
        if self.status == 401:
            return "authentication_error"
        if self.status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def body(self) -> dict[str, object]:
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A request that is at fault itself."""
    return ApiError(400, message, param=param, code=code)


def error_response(error: ApiError) -> Response:
    """The answer that tells a client."""
    headers = {} if error.retry_after is None else {"retry-after": str(error.retry_after)}
    if error.status == 401:
        headers["www-authenticate"] = "Bearer"
    if error.status in (408, 413):
        headers["connection"] = "close"  # what is left of the body is not read
    return JSONResponse(error.body, error.status, headers)


def of_error(error: Exception) -> ApiError:
    """What a client is told of an error of the engine."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ContextLengthError):
        return invalid(str(error), "messages", "context_length_exceeded")
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", retry_after=5)
    if isinstance(error, StoppedError):
        return ApiError(503, str(error), code="engine_unavailable", retry_after=5)
    if isinstance(error, CapacityError):
        return ApiError(503, str(error), code="out_of_memory", retry_after=5)
    if isinstance(error, UsageError | TextError):
        return invalid(str(error))
    if isinstance(error, RecursionError):  # of what a request has: schemas, variables of the template
        return invalid("a value of the request is nested too deeply", None, "invalid_value")
    if isinstance(error, EdgeTransformerError):
        return ApiError(500, str(error), code="engine_error")
    log.error("a request met a fault of the server", exc_info=error)
    return ApiError(500, f"the server failed: {public_reason(error)}", code="engine_error")


def public_reason(error: BaseException) -> str:
    """What anybody may read of an error. Those that nobody has foreseen may hold paths or pieces of prompts."""
    name = type(error).__name__
    return f"{name}: {error}" if isinstance(error, EdgeTransformerError) else f"{name}; the server's log says more"
