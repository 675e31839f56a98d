"""Answers that keep to a grammar: JSON of any kind, of a schema, calls of tools. The grammars run in llguidance."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import llguidance
import numpy as np

from edge_transformer.engine.answer import FloatArray
from edge_transformer.errors import UsageError
from edge_transformer.server.errors import invalid
from edge_transformer.server.grammar_bounds import GrammarBounds

if TYPE_CHECKING:
    from edge_transformer.engine.llm import LLM

JSON_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value: a model that may add blanks for ever sometimes does."""

EXACT_INTEGERS = 2**53

_SHOWN_CHARACTERS = 300
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")


class Grammars:
    """Grammars over one model's tokens. May be used from several threads."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._lock = threading.Lock()
        self._tokens: llguidance.LLTokenizer | None = None
        self._bounds = GrammarBounds()

    def matcher(self, grammar: str, param: str) -> Matcher:
        """Raises ApiError, naming `param`, for a grammar that cannot be compiled, or not in reasonable time."""
        self._bounds.check(grammar, param)
        limits = llguidance.LLParserLimits(verbose_errors=False)
        matcher = llguidance.LLMatcher(self._tokenizer(), grammar, log_level=0, limits=limits)
        if matcher.is_error():
            raise invalid(f"{param} cannot be turned into a grammar: {_reason(matcher)}", param, "invalid_schema")
        return Matcher(matcher, self._llm.config.vocab_size)

    def _tokenizer(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokens is None:
                wrapper = llguidance.TokenizerWrapper(_Tokens(self._llm))
                eos = list(self._llm.end_token_ids) or None
                self._tokens = llguidance.LLTokenizer(wrapper, n_vocab=self._llm.config.vocab_size, eos_token=eos)
            return self._tokens


class _Tokens:
    """The tokenizer as llguidance wants to see it."""

    def __init__(self, llm: LLM) -> None:
        tokenizer = llm.tokenizer
        self.eos_token_id = llm.end_token_ids[0] if llm.end_token_ids else 0
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(llm.config.vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids if token < llm.config.vocab_size)
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        plain = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(plain, add_bos=False, parse_special=False)


class Matcher:
    """A Constraint: what a grammar allows next."""

    def __init__(self, matcher: llguidance.LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    def copy(self) -> Matcher:
        """One more at the same place."""
        return Matcher(self._matcher.deep_copy(), self._vocabulary)

    @property
    def complete(self) -> bool:
        """Whether nothing can follow any more."""
        return bool(self._matcher.is_stopped())

    def restrict(self, logits: FloatArray) -> FloatArray:
        mask = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if self._matcher.is_error():
            raise UsageError(f"the answer's grammar has failed: {_reason(self._matcher)}")
        allowed = np.unpackbits(mask, bitorder="little")[: self._vocabulary].view(bool)
        return np.where(allowed, logits, np.float32(-np.inf))

    def accept(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)


class AfterMark:
    """A Constraint that begins once a mark is in the text: the end of reasoning, the start of a call; and when what it
    asks for is complete, it waits for the next mark, if `again`; else the answer ends there.
    """

    def __init__(self, llm: LLM, mark: str, matcher: Matcher, again: bool) -> None:
        self._tokenizer = llm.tokenizer
        self._mark = mark.encode()
        self._fresh = matcher
        self._again = again
        self._active: Matcher | None = None
        self._tail = b""

    def restrict(self, logits: FloatArray) -> FloatArray:
        return logits if self._active is None else self._active.restrict(logits)

    def accept(self, token: int) -> None:
        if self._active is not None:
            self._active.accept(token)
            if self._again and self._active.complete:
                self._active = None
            return
        self._tail = (self._tail + self._tokenizer.token_bytes(token))[-len(self._mark) - 64 :]
        if self._tail.endswith(self._mark):
            self._active, self._tail = self._fresh.copy(), b""


def json_grammar(schema: Mapping[str, Any], param: str) -> str:
    """The grammar of JSON texts of a schema. Raises ApiError."""
    _refuse_inexact(schema, param)
    try:
        return llguidance.LLMatcher.grammar_from_json_schema(json.dumps({**schema, "x-guidance": JSON_LAYOUT}))
    except ValueError as error:
        raise invalid(f"{param} is no JSON schema: {_shortened(str(error))}", param, "invalid_schema") from error


def _refuse_inexact(schema: object, param: str) -> None:
    """Raises ApiError for a value that the grammar would round, as it holds numbers in doubles."""
    if isinstance(schema, list):
        for index, item in enumerate(schema):
            _refuse_inexact(item, f"{param}[{index}]")
    if not isinstance(schema, Mapping):
        return
    for key, value in schema.items():
        where = f"{param}.{key}"
        if key in ("const", "enum"):
            number = _inexact(value)
            if number is not None:
                shown = _shortened(str(number))
                raise invalid(
                    f"{where} has the number {shown}: integers beyond 2^53 = {EXACT_INTEGERS} are not kept exactly; "
                    "ask for a string",
                    where,
                    "invalid_schema",
                )
        elif key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            for name, item in value.items():
                _refuse_inexact(item, f"{where}.{name}")
        elif key not in ("default", "examples"):
            _refuse_inexact(value, where)


def _inexact(value: object) -> int | None:
    """An integer within `value` that may be no double."""
    if isinstance(value, int):
        return value if abs(value) > EXACT_INTEGERS else None
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((number for number in map(_inexact, items) if number is not None), None)


def _reason(matcher: llguidance.LLMatcher) -> str:
    """Why it has failed, in a line."""
    reason = _shortened(matcher.get_error())
    return "no text keeps to it" if reason == "NoExtensionBias" else reason


def _shortened(message: str) -> str:
    """A line without the states and backtraces that follow, and without all of a pattern of thousands of letters."""
    line = " ".join(message.partition("\n<")[0].split())
    return line if len(line) <= _SHOWN_CHARACTERS else line[: _SHOWN_CHARACTERS - 1] + "…"
