"""Log-probabilities in the two shapes of OpenAI's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from edge_transformer.engine.sampling import TokenLogprobs

if TYPE_CHECKING:
    from edge_transformer.text.tokenizer import Tokenizer

LEAST = -9999.0
"""What a probability of zero is written as."""


def chat_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs]) -> dict[str, object]:
    """Of a chat completion's choice or chunk."""
    content = [
        _entry(tokenizer, t.token, t.logprob) | {"top_logprobs": [_entry(tokenizer, *other) for other in t.top]}
        for t in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokenizer: Tokenizer, tokens: Sequence[TokenLogprobs], offset: int) -> dict[str, object]:
    """Of a completion's choice or chunk. `offset`: characters of the text before it."""
    texts = [_text(tokenizer, t.token) for t in tokens]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    return {
        "tokens": texts,
        "token_logprobs": [max(t.logprob, LEAST) for t in tokens],
        "top_logprobs": [{_text(tokenizer, i): max(value, LEAST) for i, value in t.top} for t in tokens],
        "text_offset": offsets,
    }


def _entry(tokenizer: Tokenizer, token: int, logprob: float) -> dict[str, object]:
    return {
        "token": _text(tokenizer, token),
        "logprob": max(logprob, LEAST),
        "bytes": list(tokenizer.token_bytes(token)),
    }


def _text(tokenizer: Tokenizer, token: int) -> str:
    return tokenizer.token_bytes(token).decode("utf-8", "replace")
