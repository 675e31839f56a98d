"""Texts to tokens, within what a context may hold: a request must not cost minutes to be refused in the end."""

from __future__ import annotations

import threading
from weakref import WeakKeyDictionary

from edge_transformer.engine.llm import LLM
from edge_transformer.server.errors import ApiError, invalid

CHARACTERS_OF_TOKEN = 8
"""Most texts have fewer."""

SLACK_TOKENS = 1024

_longest: WeakKeyDictionary[LLM, int] = WeakKeyDictionary()
_lock = threading.Lock()


def encode_prompt(llm: LLM, text: str, param: str, *, add_bos: bool | None = None) -> list[int]:
    """Token ids of a text. Raises TextError; ApiError for one that is too long for the context, where that can be said
    before all of it is cut: of 16 MiB that takes a minute and gigabytes.
    """
    context = llm.context_length
    refuse_endless(llm, text, param)
    # What the first tokens are does not hang on what comes much later: SLACK_TOKENS are more than it can change.
    beginning = CHARACTERS_OF_TOKEN * (context + SLACK_TOKENS)
    if len(text) > 2 * beginning:
        count = len(llm.tokenizer.encode(text[:beginning], add_bos=add_bos))
        if count > context + SLACK_TOKENS:
            raise _too_long(context, f"the first {beginning} characters of the prompt's {len(text)} are {count}", param)
    return llm.tokenizer.encode(text, add_bos=add_bos)


def refuse_endless(llm: LLM, text: str, param: str) -> None:
    """Raises ApiError for a text whose characters are more than the context's tokens can be."""
    limit = llm.context_length * longest_token(llm)
    if len(text) > limit:
        what = f"the prompt has {len(text)} characters, and {limit} are the most that so many tokens can be"
        raise _too_long(llm.context_length, what, param)


def longest_token(llm: LLM) -> int:
    """Bytes of the longest token there is, which are no fewer than its characters."""
    with _lock:
        if llm not in _longest:
            tokenizer = llm.tokenizer
            _longest[llm] = max(len(tokenizer.token_bytes(token)) for token in range(llm.config.vocab_size))
        return _longest[llm]


def _too_long(context: int, what: str, param: str) -> ApiError:
    start = f"This model's maximum context length is {context} tokens, for prompt and answer together; "
    return invalid(f"{start}{what}. Shorten it.", param, "context_length_exceeded")
