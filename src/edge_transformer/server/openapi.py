"""The OpenAPI document: requests from their msgspec structs, answers described here."""

from __future__ import annotations

from typing import Any

import msgspec

import edge_transformer
from edge_transformer.server.schema import ChatRequest, CompletionRequest, TokenizeRequest

Schema = dict[str, Any]

_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_FINISH: Schema = {"enum": ["stop", "length", "tool_calls"]}


def openapi(model: str) -> Schema:
    """The document of a server of this model."""
    kinds = [ChatRequest, CompletionRequest, TokenizeRequest]
    _, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    for name in ("ChatRequest", "CompletionRequest"):
        components[name]["properties"]["model"] = {"enum": [model]}
    return {
        "openapi": "3.1.0",
        "info": {"title": "EdgeTransformerEngine", "version": edge_transformer.__version__},
        "paths": {
            "/v1/chat/completions": _post("Continue a chat.", "ChatRequest", "ChatCompletion", stream=True),
            "/v1/completions": _post("Continue a text.", "CompletionRequest", "Completion", stream=True),
            "/tokenize": _post("Count and show tokens.", "TokenizeRequest", "Tokens"),
            "/v1/models": _get("The models that are served: one.", "Models"),
            "/v1/models/{model}": _get("A model.", "Model", path_parameter="model"),
            "/health": _get("Whether requests are taken.", "Health", unready="Health"),
            "/status": _get("What lies where, in bytes, and what is going on.", "Status"),
            "/metrics": _metrics(),
        },
        "components": {
            "schemas": components | _answers(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"key": []}, {}],
    }


def _answers() -> dict[str, Schema]:
    usage = _object({"prompt_tokens": _COUNT, "completion_tokens": _COUNT, "total_tokens": _COUNT})
    call = _object(
        {"id": _TEXT, "type": {"const": "function"}, "function": _object({"name": _TEXT, "arguments": _TEXT})}
    )
    message = _object(
        {"role": {"const": "assistant"}, "content": _or_null(_TEXT)},
        reasoning_content=_TEXT,
        tool_calls={"type": "array", "items": call},
    )
    logprobs = _or_null({"type": "object"})
    chat_choice = _object({"index": _COUNT, "message": message, "finish_reason": _FINISH, "logprobs": logprobs})
    choice = _object({"index": _COUNT, "text": _TEXT, "finish_reason": _FINISH, "logprobs": logprobs})
    head = {"id": _TEXT, "created": _COUNT, "model": _TEXT}
    model = _object({"id": _TEXT, "object": {"const": "model"}, "created": _COUNT, "owned_by": _TEXT})
    error = {"message": _TEXT, "type": _TEXT, "param": _or_null(_TEXT), "code": _or_null(_TEXT)}
    return {
        "ChatCompletion": _object(
            head | {"object": {"const": "chat.completion"}, "choices": _list(chat_choice), "usage": usage}
        ),
        "Completion": _object(
            head | {"object": {"const": "text_completion"}, "choices": _list(choice), "usage": usage}
        ),
        "Tokens": _object({"tokens": _list(_COUNT), "count": _COUNT, "max_model_len": _COUNT}),
        "Model": model,
        "Models": _object({"object": {"const": "list"}, "data": _list(model)}),
        "Health": _object({"status": {"enum": ["ok", "restarting", "draining"]}}, reason=_TEXT),
        "Status": _object({"model": _TEXT, "status": _TEXT}),
        "Error": _object({"error": _object(error)}),
    }


def _post(summary: str, request: str, answer: str, stream: bool = False) -> Schema:
    content: Schema = {"application/json": {"schema": _reference(answer)}}
    if stream:
        content["text/event-stream"] = {"schema": _TEXT}
    body = {"required": True, "content": {"application/json": {"schema": _reference(request)}}}
    return {"post": {"summary": summary, "requestBody": body, "responses": {"200": _said(content), **_ERRORS}}}


def _get(summary: str, answer: str, path_parameter: str | None = None, unready: str | None = None) -> Schema:
    get: Schema = {
        "summary": summary,
        "responses": {"200": _said({"application/json": {"schema": _reference(answer)}}), **_ERRORS},
    }
    if path_parameter is not None:
        get["parameters"] = [{"name": path_parameter, "in": "path", "required": True, "schema": _TEXT}]
    if unready is not None:
        get["responses"]["503"] = _said({"application/json": {"schema": _reference(unready)}})
    return {"get": get}


def _metrics() -> Schema:
    answer = _said({"text/plain": {"schema": _TEXT}})
    return {"get": {"summary": "Figures for Prometheus.", "responses": {"200": answer, **_ERRORS}}}


def _said(content: Schema) -> Schema:
    return {"description": "", "content": content}


def _reference(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(required: dict[str, Schema], **others: Schema) -> Schema:
    return {"type": "object", "properties": required | others, "required": list(required)}


def _list(items: Schema) -> Schema:
    return {"type": "array", "items": items}


def _or_null(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


_ERRORS: Schema = {
    status: {"description": text, "content": {"application/json": {"schema": _reference("Error")}}}
    for status, text in {
        "400": "The request is at fault; the error names the field.",
        "401": "A key is needed.",
        "403": "Not from this page, or under this name.",
        "404": "There is no such model.",
        "405": "Not with this method.",
        "408": "The body took too long.",
        "413": "The body is too large.",
        "429": "Too many requests wait.",
        "500": "The engine failed.",
        "503": "The engine is not running.",
    }.items()
}
