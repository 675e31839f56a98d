"""Texts to tokens, within what a context may hold: a request must not cost minutes to be refused in the end."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from edge_transformer.engine.llm import LLM
from edge_transformer.server.errors import invalid

_longest: WeakKeyDictionary[LLM, int] = WeakKeyDictionary()
_lock = threading.Lock()


def encode_prompt(llm: LLM, text: str, param: str, *, add_bos: bool | None = None) -> list[int]:
    """Token ids of a text. Raises TextError; ApiError for one whose characters are more than the context's tokens can
    be, before any of it is cut: of 16 MiB that takes a minute and gigabytes.
    """
    limit = llm.context_length * longest_token(llm)
    if len(text) > limit:
        raise invalid(
            f"This model's maximum context length is {llm.context_length} tokens, for prompt and answer together; the "
            f"prompt has {len(text)} characters, and {limit} are the most that so many tokens can be. Shorten it.",
            param,
            "context_length_exceeded",
        )
    return llm.tokenizer.encode(text, add_bos=add_bos)


def longest_token(llm: LLM) -> int:
    """Bytes of the longest token there is, which are no fewer than its characters."""
    with _lock:
        if llm not in _longest:
            tokenizer = llm.tokenizer
            _longest[llm] = max(len(tokenizer.token_bytes(token)) for token in range(llm.config.vocab_size))
        return _longest[llm]
