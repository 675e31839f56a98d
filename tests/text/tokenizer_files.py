"""Where tests find tokenizers of real models, and what makes a small one when there are none."""

import base64
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from paths import user_cache

SAMPLE = (
    "The quick brown fox doesn't jump over 12345 lazy dogs, it's 3.14 o'clock!  Two  spaces,\n\n"
    "new lines\r\n\tand tabs.\n"
    "def area(radius: float) -> float:\n    return 3.14159 * radius ** 2\n"
    "naïve café, Straße, 中文字漢日本語, 한국어, नमस्ते\n"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def real_tokenizer(name: str) -> Path:
    """Folder of a tokenizer fetched by fetch_tokenizers.py; skips the test where it is not."""
    named = os.environ.get("ETE_TEST_MODELS")
    folder = (Path(named) if named else user_cache() / "test-models") / "tokenizers" / name
    if not folder.is_dir():
        pytest.skip(f"the tokenizer {name} is not here (python tests/text/fetch_tokenizers.py)")
    return folder


def byte_level_tokenizer(pre_tokenizer: Any, vocab_size: int = 600) -> Tokenizer:
    """A small byte-level tokenizer trained on SAMPLE, special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([SAMPLE], trainer)
    return tokenizer


def byte_level_metadata(tokenizer: Tokenizer, pre: str) -> dict[str, object]:
    """The same tokenizer as GGUF metadata."""
    description = json.loads(tokenizer.to_str())
    vocab: dict[str, int] = description["model"]["vocab"]
    special = {token["content"] for token in description["added_tokens"]}
    tokens = sorted(vocab, key=vocab.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3 if token in special else 1 for token in tokens], np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in description["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": vocab[SPECIAL[1]],
        "tokenizer.ggml.eos_token_id": vocab[SPECIAL[2]],
    }


def sentencepiece_metadata(
    pieces: Sequence[str], *, user_defined: Sequence[str] = (), scores: Mapping[str, float] | None = None
) -> dict[str, object]:
    """GGUF metadata of a SentencePiece vocabulary: <unk> <s> </s>, byte tokens, user-defined tokens, then `pieces`.

    The earlier a piece, the better its score, where `scores` does not say otherwise.
    """
    control = ["<unk>", "<s>", "</s>"]
    of_bytes = [f"<0x{byte:02X}>" for byte in range(256)]
    before = len(control) + len(of_bytes) + len(user_defined)
    piece_scores = [(scores or {}).get(piece, -float(rank)) for rank, piece in enumerate(pieces)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": [*control, *of_bytes, *user_defined, *pieces],
        "tokenizer.ggml.token_type": np.array(
            [2, 3, 3] + [6] * 256 + [4] * len(user_defined) + [1] * len(pieces), np.int32
        ),
        "tokenizer.ggml.scores": np.array([0.0] * before + piece_scores, np.float32),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def tiktoken_metadata(ranks_file: Path, pre: str, special: Mapping[str, int]) -> dict[str, object]:
    """GGUF metadata of a byte-level vocabulary in tiktoken's form (base64 bytes and rank), whose merges it leaves out.

    The merge that makes a token is of the two parts it has when only merges of lower rank are made. Tokens that no such
    merges make (a few hundred whole words) get none. `special`: token to id, beyond the ranks.
    """
    to_character = _byte_characters()
    ranks: dict[bytes, int] = {}
    for line in ranks_file.read_bytes().split(b"\n"):
        if line:
            token, rank = line.split()
            ranks[base64.b64decode(token)] = int(rank)
    ordered = sorted(ranks, key=ranks.__getitem__)
    merges = [pair for token in ordered if len(token) > 1 and (pair := _last_merge(token, ranks))]
    spelled = {token: "".join(map(to_character.__getitem__, token)) for token in ordered}
    tokens = [spelled[token] for token in ordered]
    tokens += [f"[unused {i}]" for i in range(len(tokens), max(special.values()) + 1)]
    for text, token_id in special.items():
        tokens[token_id] = text
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([1] * len(ordered) + [3] * (len(tokens) - len(ordered)), np.int32),
        "tokenizer.ggml.merges": [f"{spelled[left]} {spelled[right]}" for left, right in merges],
    }


def _last_merge(token: bytes, ranks: Mapping[bytes, int]) -> tuple[bytes, bytes] | None:
    parts = [token[i : i + 1] for i in range(len(token))]
    limit = ranks[token]
    while len(parts) > 2:
        found = [(ranks.get(parts[i] + parts[i + 1], limit), i) for i in range(len(parts) - 1)]
        best, i = min(found)
        if best == limit:
            return None
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _byte_characters() -> dict[int, str]:
    """Byte to character of byte-level vocabularies: Latin-1 where printable, the others in order from U+0100 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    own = {ord(character): character for character in alphabet if ord(character) < 0x100}
    others = [byte for byte in range(0x100) if byte not in own]
    return own | dict(zip(others, alphabet[len(own) :], strict=True))
