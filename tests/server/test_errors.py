"""Refusals: OpenAI's shape, the field's name, at once."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import openai
import pytest
from starlette.requests import Request

from edge_transformer.engine.request import Limits
from edge_transformer.server.app import _answering
from edge_transformer.server.delivery import EventStream, WholeAnswer
from edge_transformer.server.errors import ApiError
from edge_transformer.server.grammar import json_grammar
from edge_transformer.server.parameters import read_request
from edge_transformer.server.schema import CompletionRequest, Message
from edge_transformer.text.roles import ROLES
from edge_transformer.text.tokenizer import Tokenizer
from server.tiny_server import Served, serving

HELLO = [{"role": "user", "content": "hello"}]
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def refused(served: Served, path: str, body: object) -> dict[str, Any]:
    status, answer = served.post(path, body)
    assert status == 400, answer
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "invalid_request_error"
    error: dict[str, Any] = answer["error"]
    return error


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", "many"),
        ("max_tokens", 10**30),
        ("temperature", 2.1),
        ("temperature", -1),
        ("top_p", 1.5),
        ("n", 0),
        ("n", 129),
        ("seed", 2**64),
        ("stop", [""]),
        ("stop", 5),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"300": 1}),
        ("logit_bias", {"3": 101}),
        ("frequency_penalty", 3),
        ("stream", "yes"),
        ("invented", 1),
        ("audio", {"voice": "x"}),
        ("functions", []),
        ("verbosity", "low"),
        ("modalities", ["audio"]),
        ("top_logprobs", 3),
        ("tool_choice", "required"),
        ("stream_options", {"include_usage": True}),
        ("reasoning_effort", "low"),
        ("messages", []),
    ],
)
def test_a_field_at_fault_is_named(served: Served, field: str, value: object) -> None:
    error = refused(served, CHAT, {"model": "tiny", "messages": HELLO, field: value})
    assert error["param"] == field or error["param"].startswith(field)
    assert field in error["message"]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]},
         "messages[0].content[0].type"),
        ({"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
         "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user", "content": "x", "mood": "good"}, "messages[0].mood"),
    ],
)  # fmt: skip
def test_a_message_at_fault_is_named(served: Served, message: object, param: str) -> None:
    assert refused(served, CHAT, {"model": "tiny", "messages": [message]})["param"] == param


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"model": "tiny"', b"\xff\xfe", b"[" * 100_000, b"NaN"])
def test_malformed_json(served: Served, body: bytes) -> None:
    error = refused(served, CHAT, body)
    assert error["code"] in ("invalid_json", "invalid_value")


@pytest.mark.parametrize("body", [b"", b" \n"])
def test_an_empty_body_is_called_empty(served: Served, body: bytes) -> None:
    assert "body is empty" in refused(served, CHAT, body)["message"]


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("temperature", 2.5, ("2.0", "2.5")),
        ("top_p", -0.125, ("0.0", "-0.125")),
        ("n", 129, ("128", "129")),
        ("max_tokens", "many", ('"many"',)),
        ("logprobs", 5, ("5", "top_logprobs")),
        ("reasoning_effort", "enormous", ("enormous",)),
    ],
)
def test_the_value_is_named_beside_the_limit(served: Served, field: str, value: object, said: tuple[str, ...]) -> None:
    message = refused(served, CHAT, {"model": "tiny", "messages": HELLO, field: value})["message"]
    assert all(word in message for word in (field, *said))


def test_long_values_are_shortened(served: Served) -> None:
    message = refused(served, CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": "x" * 10_000})["message"]
    assert len(message) < 200


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "x"}},
        {"image_url": {"url": "x"}, "type": "image_url"},
    ],
)
def test_parts_other_than_text_are_told_so(served: Served, part: object) -> None:
    message = refused(served, CHAT, {"model": "tiny", "messages": [{"role": "user", "content": [part]}]})["message"]
    assert "image_url" in message
    assert "text only" in message


def test_no_effort_is_what_a_model_does_that_cannot_reason(served: Served) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "temperature": 0}
    status, answer = served.post(CHAT, {**body, "reasoning_effort": "none"})
    assert status == 200, answer
    assert answer["choices"] == served.post(CHAT, body)[1]["choices"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["edge_transformer.server.app.chat_prompt", "edge_transformer.server.job.Job.events"])
def test_faults_that_nobody_has_foreseen(
    served: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str, stream: bool
) -> None:
    def fail(*arguments: object) -> None:
        raise ValueError("/srv/me/models: hello")

    monkeypatch.setattr(place, fail)
    status, answer = served.post(CHAT, {"model": "tiny", "messages": HELLO, "stream": stream})
    assert status == 500
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert answer["error"]["type"] == "server_error"
    assert "/srv" not in str(answer)
    assert "hello" not in str(answer)
    traced = [record for record in caplog.records if record.exc_info]
    assert len(traced) == 1
    assert "in fail" in logging.Formatter().formatException(traced[0].exc_info or (None, None, None))
    assert served.service.ready


@pytest.mark.parametrize("value", [2**53 + 1, -(2**63), 2**64, 10**30])
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_integers_that_a_grammar_would_round(served: Served, keyword: str, value: int) -> None:
    schema = {"properties": {"enum": {keyword: value if keyword == "const" else ["x", {"y": value}]}}}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    error = refused(served, CHAT, {"model": "tiny", "messages": HELLO, "response_format": response_format})
    assert error["param"].endswith(f".properties.enum.{keyword}")
    assert str(value) in error["message"]


@pytest.mark.parametrize("value", [2**53, -(2**53), 0.1])
def test_numbers_that_a_grammar_keeps(served: Served, value: float) -> None:
    schema = {"type": "object", "properties": {"a": {"const": value}}, "required": ["a"], "additionalProperties": False}
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    status, answer = served.post(CHAT, {"model": "tiny", "messages": HELLO, "response_format": response_format})
    assert status == 200, answer
    assert json.loads(answer["choices"][0]["message"]["content"]) == {"a": value}


def test_numbers_between_limits_have_no_exponent(served: Served) -> None:
    running = served.service.running
    bounds = {"minimum": -1000, "maximum": 1000}
    for limits, kept in (({}, True), (bounds, False)):
        grammar = json_grammar({"type": "number", **limits}, "x")
        accepted = []
        for text in ("1e999", "12.5"):
            tokens = running.llm.tokenizer.encode(text, add_bos=False, parse_special=False)
            matcher = running.grammars.matcher(grammar, "x")._matcher
            accepted.append(matcher.validate_tokens(tokens) == len(tokens))
        assert accepted == [kept, True]


@pytest.mark.parametrize("error", [asyncio.CancelledError, KeyboardInterrupt])
def test_cancellation_and_interrupts_pass(error: type[BaseException]) -> None:
    async def fail(*arguments: object) -> Any:
        raise error

    async def chunks() -> AsyncIterator[dict[str, Any]]:
        raise error
        yield {}

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    answers: list[Callable[[], Any]] = [
        lambda: _answering(fail)(Request({"type": "http"})),
        lambda: WholeAnswer(fail, lambda: None).answer(send),
        lambda: EventStream(chunks, lambda: None).answer(send),
    ]
    for answer in answers:
        with pytest.raises(error):
            answer().send(None)
    assert not sent


@pytest.mark.parametrize("value", [None, [], 5, "text"])
def test_a_body_that_is_no_object(served: Served, value: object) -> None:
    refused(served, CHAT, value)


def test_null_is_the_same_as_left_out(served: Served) -> None:
    names = ["max_tokens", "temperature", "stop", "n", "tools", "audio", "logit_bias", "stream_options", "seed"]
    body = {"model": "tiny", "messages": HELLO, **dict.fromkeys(names), "max_completion_tokens": 2}
    assert served.post(CHAT, body)[0] == 200


def test_fields_that_clients_send_without_effect_are_taken(served: Served) -> None:
    harmless = {"user": "me", "metadata": {"a": "b"}, "store": False, "service_tier": "auto", "prompt_cache_key": "k"}
    assert served.post(CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 1, **harmless})[0] == 200


def test_a_prompt_that_is_too_long_is_refused_at_once(served: Served) -> None:
    before = served.scheduler.statistics.passes
    for path, body in ((CHAT, {"messages": [{"role": "user", "content": "x" * 3000}]}), (TEXT, {"prompt": "x" * 2048})):
        error = refused(served, path, {"model": "tiny", **body})
        assert error["code"] == "context_length_exceeded"
        assert "2048" in error["message"]
    assert served.scheduler.statistics.passes == before
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        served.client().completions.create(model="tiny", prompt="x" * 5000)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "user", "content": "a b " * 2_000_000}]}, "messages"),
        (TEXT, {"prompt": "1" * 8_000_000}, "prompt"),
        (TEXT, {"prompt": ["x", "1" * 8_000_000]}, "prompt"),
        ("/tokenize", {"prompt": " " * 8_000_000}, "prompt"),
        ("/tokenize", {"messages": [{"role": "user", "content": " " * 8_000_000}]}, "messages"),
    ],
)
def test_what_no_context_holds_is_refused_before_it_is_cut_into_tokens(
    served: Served, path: str, body: dict[str, Any], param: str, cut: list[int]
) -> None:
    error = refused(served, path, {"model": "tiny", **body})
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    assert "2048" in error["message"]
    assert max(cut, default=0) < 1000


def test_a_body_of_many_lists_is_read_without_looking_for_garbage() -> None:
    """Which took seconds, in which nobody got a token. It is looked for again afterwards."""
    prompts = 400_000
    collections: list[str] = []

    def collecting(phase: str, info: dict[str, int]) -> None:
        collections.append(phase)

    gc.collect()
    for rest in ("", ',"x":1'):
        data = f'{{"model":"m","prompt":[{",".join(["[1]"] * prompts)}]{rest}}}'.encode()
        gc.callbacks.append(collecting)
        try:
            with pytest.raises(ApiError, match="unknown field") if rest else contextlib.nullcontext():
                assert len(read_request(data, CompletionRequest).prompt) == prompts
        finally:
            gc.callbacks.remove(collecting)
        assert len(collections) <= 4  # one or two may come when it is over
        collections.clear()
        assert gc.isenabled()


def test_many_prompts_are_counted_before_any_is_read(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(self: object, text: str, **settings: Any) -> list[int]:
        raise AssertionError("a prompt was read")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    error = refused(served, TEXT, {"model": "tiny", "prompt": ["x"] * 129})
    assert error["param"] == "prompt"
    assert "129 prompts" in error["message"]


def _nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"properties": value}
    return value


@pytest.mark.parametrize("depth", [200, 600, 900])
@pytest.mark.parametrize("place", ["chat_template_kwargs", "tools", "response_format", "metadata", "annotations"])
def test_values_nested_deeply_are_no_fault_of_the_server(served: Served, place: str, depth: int) -> None:
    deep = _nested(depth)
    values = {
        "chat_template_kwargs": {"chat_template_kwargs": {"x": deep}},
        "tools": {"tools": [{"type": "function", "function": {"name": "f", "parameters": deep}}]},
        "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": deep}}},
        "metadata": {"metadata": deep},
        "annotations": {"messages": [*HELLO, {"role": "assistant", "content": "x", "annotations": deep}, *HELLO]},
    }
    status, answer = served.post(CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 1, **values[place]})
    assert status in (200, 400), answer
    assert status == 200 or len(answer["error"]["message"]) < 400


def test_any_name_can_be_a_variable_of_the_template(served: Served) -> None:
    names = dict.fromkeys(["self", "args", "kwargs", "cls", "", "a b", "loop", "messages"], 1)
    status, answer = served.post(
        CHAT, {"model": "tiny", "messages": HELLO, "max_tokens": 1, "chat_template_kwargs": names}
    )
    assert status == 200, answer


def test_an_answer_ends_with_the_context(served: Served) -> None:
    body = {"model": "tiny", "prompt": "x" * 2040, "max_tokens": 100, "ignore_eos": True}
    status, answer = served.post(TEXT, body)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 2048


@pytest.mark.parametrize("field", ["max_tokens", "max_completion_tokens"])
def test_more_tokens_than_the_context_has_end_with_it(served: Served, field: str) -> None:
    messages = [{"role": "user", "content": "x" * 1900}]
    body = {"model": "tiny", "messages": messages, field: 100_000, "ignore_eos": True}
    status, answer = served.post(CHAT, body)
    assert status == 200
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == served.ask("GET", "/v1/models")[1]["data"][0]["max_model_len"] == 2048


def test_limits_of_tokens_that_contradict_each_other(served: Served) -> None:
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 3, "max_completion_tokens": 4}
    assert refused(served, CHAT, body)["param"] == "max_tokens"


@pytest.mark.parametrize("prompt", ["", [], [[]], ["a", 1], [1, "a"], [300], [2**31], [-1], [["a"]], {"a": 1}, None])
def test_prompts_that_are_none(served: Served, prompt: object) -> None:
    refused(served, TEXT, {"model": "tiny", "prompt": prompt})


def test_another_model(served: Served) -> None:
    status, answer = served.post(CHAT, {"model": "gpt", "messages": HELLO})
    assert (status, answer["error"]["code"], answer["error"]["param"]) == (404, "model_not_found", "model")
    assert "tiny" in answer["error"]["message"]


def test_paths_and_methods_that_are_none(served: Served) -> None:
    for method, path, status in (("GET", "/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/v1/models", 405)):
        answered, body = served.ask(method, path)
        assert answered == status
        assert path in body["error"]["message"]


def test_more_requests_than_may_wait(model_path: Path) -> None:
    with serving(model_path, Limits(sequences=1, queue=1)) as small:
        long = {"model": "tiny", "prompt": "abc", "max_tokens": 2000, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(small.post, TEXT, long)
            while small.scheduler.running == 0:
                time.sleep(0.001)
            second = pool.submit(small.post, TEXT, {"model": "tiny", "prompt": "abc", "max_tokens": 3})
            while small.scheduler.waiting == 0:
                time.sleep(0.001)
            with pytest.raises(openai.RateLimitError, match="waiting already"):
                small.client().completions.create(model="tiny", prompt="abc")
            assert first.result()[0] == second.result()[0] == 200
        assert small.post(TEXT, {"model": "tiny", "prompt": "abc", "n": 2})[0] == 400


@pytest.mark.parametrize(("prompt", "count"), [("x" * 1900, 4), (["a" * 1900, "b" * 1700, "c" * 1500], 2)])
def test_answers_that_do_not_fit_side_by_side_are_made_in_turn(
    model_path: Path, served: Served, prompt: Any, count: int
) -> None:
    """A budget of one context: none of them waits for ever, and none is dropped."""
    body = {"model": "tiny", "prompt": prompt, "n": count, "max_tokens": 140, "ignore_eos": True, "seed": 3}
    layers = served.service.running.llm.engine.state_shape.layers
    with serving(model_path, Limits(sequences=6), kv_budget=4 * sum(layer.tile_bytes for layer in layers)) as small:
        status, answer = small.post(TEXT, body)
        assert status == 200, answer
        assert small.scheduler.statistics.preemptions > 0
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == [choice["text"] for choice in served.post(TEXT, body)[1]["choices"]]
    assert len(set(texts)) == len(texts)


def test_roles_are_those_of_the_python_api() -> None:
    assert [kind.__struct_config__.tag for kind in get_args(Message)] == list(ROLES)
