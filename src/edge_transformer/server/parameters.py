"""From the fields of a request to the engine's settings."""

from __future__ import annotations

import gc
import os
import re
from typing import Any

import msgspec

from edge_transformer.engine.sampling import GenerationConfig
from edge_transformer.server.errors import ApiError, invalid
from edge_transformer.server.schema import ChatRequest, CompletionRequest, Sampling

LARGE_BODY_BYTES = 1 << 20

SMALLEST_TOP_P = 1e-30
_SHOWN_CHARACTERS = 60
_CONTENT_PART = re.compile(r"messages\[\d+\]\.content\[\d+\]")
_MASK = 2**64 - 1


def read_request(body: bytes, kind: type[Any]) -> Any:
    """`body` as a request of this kind. Raises ApiError that names the field at fault."""
    if not body.strip():
        raise invalid("the body is empty; it has to be a JSON object", None, "invalid_json")
    # A body of millions of lists is read in a moment, in which nobody else runs. The garbage collector would look at
    # all of them again and again, and make seconds of it.
    pausing = len(body) > LARGE_BODY_BYTES and gc.isenabled()
    if pausing:
        gc.disable()
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        text = str(error)
        param = _path(text)
        given = _at(body, param)
        if text.startswith("Expected `null`, got"):
            unsupported = f"{param} is not supported by this server; leave it out"
            raise invalid(unsupported, param, "unsupported_parameter") from error
        code = "unknown_parameter" if "unknown field" in text else "invalid_value"
        raise invalid(_explained(text, param, given, body, kind), param, code) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(f"the body is no valid JSON: {error}", None, "invalid_json") from error
    except RecursionError as error:
        raise invalid("the body is nested too deeply", None, "invalid_json") from error
    finally:
        if pausing:
            gc.enable()


def generation_config(request: Sampling, max_tokens: int | None, logprobs: int | None, vocabulary: int) -> Any:
    """The engine's settings. Fields that were left out have OpenAI's defaults: temperature 1, no truncation."""
    return GenerationConfig(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_k=max(_or(request.top_k, 0), 0),
        top_p=max(_or(request.top_p, 1.0), SMALLEST_TOP_P),
        min_p=_or(request.min_p, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        logit_bias=_logit_bias(request, vocabulary),
        stop=_stop(request),
        logprobs=logprobs,
        ignore_eos=bool(request.ignore_eos),
    )


def seeds(request: Sampling, choices: int) -> list[int]:
    """One per choice: the first is the request's own, the others are mixed from it."""
    seed = int.from_bytes(os.urandom(8), "little") if request.seed is None else request.seed & _MASK
    return [seed] + [_mixed(seed, index) for index in range(1, choices)]


def chat_max_tokens(request: ChatRequest) -> int | None:
    """The limit under either of its names. Raises ApiError when they contradict each other."""
    limits = {limit for limit in (request.max_tokens, request.max_completion_tokens) if limit is not None}
    if len(limits) > 1:
        raise invalid("max_tokens and max_completion_tokens differ; give one of them", "max_tokens")
    return next(iter(limits), None)


def prompts_of(request: CompletionRequest) -> list[str | list[int]]:
    """The prompts, one or many, each a text or token ids. Raises ApiError for a mixture."""
    prompt = request.prompt
    if isinstance(prompt, str):
        return [prompt]
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    if any(isinstance(item, int) for item in prompt):
        raise invalid("prompt mixes tokens with texts; give a text, a list of texts, or lists of tokens", "prompt")
    return [item for item in prompt if not isinstance(item, int)]


def too_long(tokens: int, context_length: int, param: str) -> ApiError:
    """The prompt leaves no room for an answer."""
    return invalid(
        f"This model's maximum context length is {context_length} tokens, for prompt and answer together; the prompt "
        f"has {tokens}. Shorten it.",
        param,
        "context_length_exceeded",
    )


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _stop(request: Sampling) -> tuple[str, ...]:
    if request.stop is None:
        return ()
    return (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)


def _logit_bias(request: Sampling, vocabulary: int) -> dict[int, float]:
    biases = {}
    for name, bias in (request.logit_bias or {}).items():
        if not name.isascii() or not name.isdigit() or len(name) > 9 or int(name) >= vocabulary:
            raise invalid(f"logit_bias names {name!r}; this model's tokens are 0 to {vocabulary - 1}", "logit_bias")
        biases[int(name)] = bias
    return biases


def _mixed(seed: int, index: int) -> int:
    """A seed of its own for each index (the finalizer of splitmix64, Steele et al. 2014)."""
    value = (seed + index * 0x9E3779B97F4A7C15) & _MASK
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def _explained(text: str, param: str | None, given: Any, body: bytes, kind: type[Any]) -> str:
    """msgspec's message, with the value that was given, or with what is asked for instead."""
    part = _CONTENT_PART.match(param or "")
    if part is not None:
        found = _at(body, part[0])
        if isinstance(found, dict) and isinstance(found.get("type"), str) and found["type"] != "text":
            shown = _shown(found["type"])
            return f'{part[0]}.type is {shown}; this server understands text only: parts of type "text"'
    if kind is ChatRequest and param == "logprobs" and isinstance(given, int):
        return f"{text}, given: {_shown(given)}; for chats logprobs is true or false, and top_logprobs how many"
    if isinstance(given, str | int | float) and "unknown field" not in text:
        return f"{text}, given: {_shown(given)}"
    return text


def _shown(value: str | int | float) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"


def _at(body: bytes, path: str | None) -> Any:
    """The value there, as far as it can be found."""
    if path is None:
        return None
    try:
        value = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # only what comes before the fault was read
        return None
    for name, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path.replace("[...]", ".")):
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and index and int(index) < len(value):
            value = value[int(index)]
        else:
            return None
    return value


def _path(text: str) -> str | None:
    """The field a message of msgspec's speaks of: `foo`, `messages[0].content`."""
    path = text.rpartition("at `$.")[2].rstrip("`") if "at `$." in text else ""
    for mark in ("unknown field `", "missing required field `"):
        if mark in text:
            name = text.partition(mark)[2].partition("`")[0]
            path = f"{path}.{name}" if path else name
    return path or None
