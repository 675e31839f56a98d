"""Which tokens end an answer: those the model's files name, and end-of-turn tokens that its vocabulary marks as
special.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_transformer.errors import TextError
from edge_transformer.text.metadata import read_json_object, read_token_id
from edge_transformer.text.tokenizer import Tokenizer

MAX_TOKEN_ID = 2**31 - 1

# Chat formats end a turn with one of these; files of converted models often name only the end of the whole text.
END_OF_TURN = (
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<end_of_turn>",
    "<turn|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|endofturn|>",
    "<|endoftext|>",
    "<|end_of_text|>",
    "<EOT>",
)
# In the harmony format <|end|> only closes one message of several.
_HARMONY = ("<|return|>", "<|call|>")


def gguf_end_token_ids(metadata: Mapping[str, object], tokenizer: Tokenizer) -> tuple[int, ...]:
    """End tokens of a GGUF model: its eos, eot and eom ids, and end-of-turn tokens of its vocabulary."""
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    named = [read_token_id(metadata, key, tokenizer.vocab_size) for key in keys]
    return _distinct([i for i in named if i is not None] + _end_of_turn_ids(tokenizer))


def huggingface_end_token_ids(folder: Path, tokenizer: Tokenizer) -> tuple[int, ...]:
    """End tokens of a model folder: eos_token_id of generation_config.json (else config.json), the tokenizer's EOS, and
    end-of-turn tokens of its vocabulary. Raises TextError for an eos_token_id that does not name tokens there are.
    """
    ids: list[int] = []
    for name in ("generation_config.json", "config.json"):
        settings = read_json_object(folder / name)
        text_settings = settings.get("text_config")
        value = settings.get("eos_token_id")
        if value is None and isinstance(text_settings, Mapping):
            value = text_settings.get("eos_token_id")
        if value is not None:
            ids = _ids(value, f"eos_token_id of {folder / name}", tokenizer)
            break
    return _distinct([*ids, *tokenizer.eos_token_ids, *_end_of_turn_ids(tokenizer)])


def _ids(value: object, what: str, tokenizer: Tokenizer) -> list[int]:
    ids = []
    for token_id in value if isinstance(value, list) else [value]:
        if not isinstance(token_id, int) or isinstance(token_id, bool) or token_id < 0:
            raise TextError(f"{what} must be a token id or a list of them, got {value!r}")
        if token_id > MAX_TOKEN_ID or tokenizer.vocabulary.token_text(token_id) is None:
            raise TextError(f"{what} names token {token_id}, which the tokenizer does not have")
        ids.append(token_id)
    return ids


def _end_of_turn_ids(tokenizer: Tokenizer) -> list[int]:
    ids = {name: tokenizer.token_id(name) for name in END_OF_TURN}
    special = {name: i for name, i in ids.items() if i is not None and i in tokenizer.special_ids}
    if all(name in special for name in _HARMONY):
        special.pop("<|end|>", None)
    return list(special.values())


def _distinct(ids: list[int]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(ids))
