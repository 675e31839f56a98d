"""Texts far too long are refused after a look at their beginning; what the context may hold is cut whole."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import pre_tokenizers

from edge_transformer.server.errors import ApiError
from edge_transformer.server.prompt_text import CHARACTERS_OF_TOKEN, SLACK_TOKENS, encode_prompt, longest_token
from edge_transformer.text.gguf_tokenizer import gguf_tokenizer
from text.tokenizer_files import byte_level_metadata, byte_level_tokenizer

CONTEXT = 3000
BEGINNING = CHARACTERS_OF_TOKEN * (CONTEXT + SLACK_TOKENS)


class Config:
    vocab_size = 0


class Model:
    """What is asked of an LLM. Its tokens are letters, and runs of up to 128 bars."""

    context_length = CONTEXT
    config = Config()

    def __init__(self) -> None:
        metadata = byte_level_metadata(
            byte_level_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False), 1), "gpt-2"
        )
        tokens, merges, kinds = (metadata[f"tokenizer.ggml.{key}"] for key in ("tokens", "merges", "token_type"))
        runs = ["|" * (1 << power) for power in range(8)]
        metadata["tokenizer.ggml.tokens"] = [*tokens, *runs[1:]]  # type: ignore[misc]
        metadata["tokenizer.ggml.merges"] = [*merges, *(f"{run} {run}" for run in runs[:-1])]  # type: ignore[misc]
        metadata["tokenizer.ggml.token_type"] = [*kinds, *[1] * 7]  # type: ignore[misc]
        self.tokenizer = gguf_tokenizer(metadata)
        self.config.vocab_size = self.tokenizer.vocab_size


@pytest.fixture
def model() -> Model:
    return Model()


def test_a_long_text_is_refused_by_its_beginning(model: Any, cut: list[int]) -> None:
    assert longest_token(model) == 128
    text = "abc " * 80_000
    assert 2 * BEGINNING < len(text) < CONTEXT * 128
    with pytest.raises(ApiError) as error:
        encode_prompt(model, text, "prompt")
    assert error.value.code == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT} tokens" in error.value.message
    assert f"the first {BEGINNING} characters of the prompt's 320000 are {BEGINNING}" in error.value.message
    assert cut == [BEGINNING]


@pytest.mark.parametrize("beginning", ["", "abc " * 900])
def test_a_long_text_of_long_tokens_is_read(model: Any, beginning: str) -> None:
    """Its beginning may have more tokens than the rest, for its length."""
    text = beginning[:CONTEXT] + "|" * 128 * 2000
    assert len(text) > 2 * BEGINNING
    assert len(encode_prompt(model, text, "prompt")) == len(beginning[:CONTEXT]) + 2000


def test_what_is_a_little_too_long_is_counted_to_the_end(model: Any, cut: list[int]) -> None:
    """So that the message can say by how much."""
    for length in (CONTEXT + 1, 2 * BEGINNING):
        assert len(encode_prompt(model, "a" * length, "prompt")) == length
    assert cut == [CONTEXT + 1, 2 * BEGINNING]
