"""Schemas that take too long to compile: refused soon, with keyword and limit, while others get their tokens."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

import openai
import pytest

from edge_transformer.server import grammar_bounds, grammar_trial
from edge_transformer.server.errors import ApiError
from edge_transformer.server.grammar import json_grammar
from edge_transformer.server.grammar_bounds import GrammarBounds
from server.tiny_server import Served

HELLO = [{"role": "user", "content": "hello"}]
REMAINDERS = {"type": "integer", "multipleOf": 999_983}  # a prime: 19 s for 999 999
PATTERNS = {"type": "string", "allOf": [{"pattern": f"[a-z]{{{count}}}"} for count in range(1, 40)]}


def create(served: Served, **settings: Any) -> Any:
    return served.client().chat.completions.create(model="tiny", messages=HELLO, **settings)


def asking(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


def test_a_multiple_of_which_all_remainders_would_be_followed(served: Served) -> None:
    """Other requests get their tokens, and their schemas, meanwhile."""
    refused: list[openai.BadRequestError] = []

    def ask() -> None:
        with pytest.raises(openai.BadRequestError) as error:
            create(served, response_format=asking({"type": "object", "properties": {"n": REMAINDERS}}))
        refused.append(error.value)

    asked = threading.Thread(target=ask)
    asked.start()
    time.sleep(0.3)
    create(served, max_tokens=8)
    create(served, response_format=asking({"enum": ["yes", "no"]}))
    assert not refused
    asked.join(60)
    (error,) = refused
    assert error.param == "response_format.json_schema.schema"
    assert error.code == "invalid_schema"
    assert "takes more than 2 seconds or 1024 MiB to compile (look at multipleOf 999983)" in error.message


def test_multiples_that_are_kept_to(served: Served) -> None:
    for kind, multiple in (("integer", 25), ("number", 0.5), ("integer", 3600)):
        schema = {"type": kind, "minimum": 0, "maximum": 100_000, "multipleOf": multiple}
        answer = create(served, response_format=asking(schema), max_tokens=30, seed=4)
        assert json.loads(answer.choices[0].message.content) % multiple == 0


@pytest.mark.parametrize("as_tool", [False, True])
def test_patterns_that_multiply(served: Served, as_tool: bool) -> None:
    schema = {"type": "object", "properties": {"word": PATTERNS}, "required": ["word"]}
    tool = {"type": "function", "function": {"name": "say", "parameters": schema}}
    settings: dict[str, Any] = {"response_format": asking(schema)}
    if as_tool:
        settings = {"tools": [tool], "tool_choice": "required"}
    with pytest.raises(openai.BadRequestError, match=r'to compile \(look at pattern "\[a-z\]\{39\}"\)') as error:
        create(served, **settings)
    assert error.value.param == ("tools" if as_tool else "response_format.json_schema.schema")


def test_a_grammar_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[list[str]] = []
    run = subprocess.run

    def counted(command: list[str], **settings: Any) -> Any:
        tried.append(command)
        return run(command, **settings)

    monkeypatch.setattr(subprocess, "run", counted)
    bounds = GrammarBounds()
    for _ in range(3):
        bounds.check(json_grammar({"enum": ["yes", "no"]}, "x"), "x")
    assert not tried
    for _ in range(3):
        bounds.check(json_grammar({"type": "integer", "multipleOf": 3}, "x"), "x")
        with pytest.raises(ApiError, match="multipleOf 999983"):
            bounds.check(json_grammar(REMAINDERS, "x"), "x")
    assert len(tried) == 2


def test_limits_of_the_server_itself_are_kept() -> None:
    grammar = json_grammar({"type": "integer", "multipleOf": 7}, "x")
    command = [sys.executable, "-P", "-m", grammar_trial.__name__, "2", str(1 << 40)]
    limited = ["bash", "-c", 'ulimit -v 900000 -t 50; exec "$@"', "bash", *command]
    done = subprocess.run(limited, input=grammar.encode(), capture_output=True, check=True)
    assert done.stdout.decode().strip() == grammar_trial.BEGUN


def test_where_no_process_can_be_had_the_schema_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    bounds = GrammarBounds()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="cannot be tried"):
            bounds.check(json_grammar({"multipleOf": 3}, "x"), "x")


def test_a_trial_that_had_no_time_says_nothing_about_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine was busy: a later request with the same schema gets its answer."""
    bounds, grammar = GrammarBounds(), json_grammar({"type": "integer", "multipleOf": 3}, "x")
    with monkeypatch.context() as busy:
        busy.setattr(grammar_bounds, "WAIT_SECONDS", 1e-3)
        with pytest.raises(ApiError, match="try again") as error:
            bounds.check(grammar, "x")
    assert error.value.status == 503
    bounds.check(grammar, "x")
