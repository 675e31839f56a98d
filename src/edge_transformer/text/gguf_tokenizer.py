"""A tokenizer from the metadata of a GGUF file (tokenizer.ggml.*).

Model "gpt2" is byte-level BPE with ranked merges, model "llama" is SentencePiece BPE by scores. The others (bert, t5,
rwkv, ...) are refused by name. What the keys mean is defined by the writers of such files: the GGUF specification and
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from edge_transformer.errors import TextError
from edge_transformer.text.metadata import read_flag, read_numbers, read_string, read_strings, read_token_id
from edge_transformer.text.token_bytes import Spelling
from edge_transformer.text.tokenizer import Encoder, Tokenizer, Vocabulary

_PREFIX = "tokenizer.ggml."
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}


class TokenType(IntEnum):
    """Values of tokenizer.ggml.token_type."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def gguf_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer a GGUF file describes. Raises TextError when it is missing, of an unknown kind, or inconsistent."""
    model = read_string(metadata, _PREFIX + "model")
    if model is None:
        raise TextError("the GGUF file has no tokenizer (tokenizer.ggml.model is missing)")
    if model not in ("gpt2", "llama"):
        raise TextError(
            f"tokenizer.ggml.model is {model!r}, which is not supported "
            "(supported: 'gpt2', byte-level BPE, and 'llama', SentencePiece BPE)"
        )
    tokens = read_strings(metadata, _PREFIX + "tokens")
    types = read_numbers(metadata, _PREFIX + "token_type", len(tokens))
    if types is None:
        types = np.full(len(tokens), TokenType.NORMAL)
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        raise TextError("tokenizer.ggml.tokens holds the same token twice")
    special = {tokens[i]: i for i in np.flatnonzero(types == TokenType.CONTROL).tolist()}
    user_defined = {tokens[i]: i for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist()}

    encoder: Encoder
    if model == "gpt2":
        encoder = _byte_level_encoder(metadata, ids, special, user_defined)
        add_bos_default = False
    else:
        encoder = _sentencepiece_encoder(metadata, tokens, ids, types, special, user_defined)
        add_bos_default = True

    named_ids = {name: read_token_id(metadata, _PREFIX + key, len(tokens)) for name, key in _NAMED.items()}
    bos = named_ids["bos_token"]
    eos = named_ids["eos_token"]
    add_bos = read_flag(metadata, _PREFIX + "add_bos_token", add_bos_default)
    if add_bos and bos is None:
        raise TextError("the model wants a BOS token before text, but tokenizer.ggml.bos_token_id is missing")
    added = {i: text for text, i in (special | user_defined).items()}

    def token_text(token_id: int) -> str | None:
        return tokens[token_id] if 0 <= token_id < len(tokens) else None

    return Tokenizer(
        encoder=encoder,
        vocabulary=Vocabulary(
            size=len(tokens),
            token_text=token_text,
            token_id=ids.get,
            spelling=Spelling.BYTE_LEVEL if model == "gpt2" else Spelling.SENTENCE_PIECE,
            added=added,
            special_ids=frozenset(special.values()),
        ),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        named_tokens={name: tokens[i] for name, i in named_ids.items() if i is not None},
        strip_first_space=model == "llama" and _adds_space_prefix(metadata),
    )


def _byte_level_encoder(
    metadata: Mapping[str, object], ids: dict[str, int], special: Mapping[str, int], user_defined: Mapping[str, int]
) -> Encoder:
    from edge_transformer.text.byte_level_bpe import ByteLevelEncoder
    from edge_transformer.text.pretokenizers import pre_tokenizer

    name = read_string(metadata, _PREFIX + "pre")
    if name is None:
        raise TextError(
            "tokenizer.ggml.pre is missing, so it is not known how the model's text was cut into words: "
            "use a newer conversion of the model"
        )
    cut = pre_tokenizer(name)
    merges = read_strings(metadata, _PREFIX + "merges")
    return ByteLevelEncoder(
        ids=ids,
        ranks=dict(zip(merges, range(len(merges)), strict=True)),
        normalizer=cut.normalizer(),
        pre_tokenizer=cut.words(),
        ignore_merges=cut.ignore_merges,
        special=special,
        user_defined=user_defined,
    )


def _sentencepiece_encoder(
    metadata: Mapping[str, object],
    tokens: list[str],
    ids: Mapping[str, int],
    types: npt.NDArray[Any],
    special: Mapping[str, int],
    user_defined: Mapping[str, int],
) -> Encoder:
    from edge_transformer.text.sentencepiece_bpe import SentencePieceEncoder

    scores = read_numbers(metadata, _PREFIX + "scores", len(tokens))
    if scores is None:
        raise TextError("tokenizer.ggml.scores is missing, which a tokenizer of model 'llama' needs")
    if read_flag(metadata, _PREFIX + "remove_extra_whitespaces", False):
        raise TextError("tokenizer.ggml.remove_extra_whitespaces is true, which is not supported")
    byte_names = [f"<0x{byte:02X}>" for byte in range(256)]
    byte_ids = [ids[name] for name in byte_names if name in ids and types[ids[name]] == TokenType.BYTE]
    if len(byte_ids) != 256:
        raise TextError(f"the vocabulary has {len(byte_ids)} of the 256 byte tokens (<0x00> ...), all are needed")
    pieces = dict(ids)
    for i in np.flatnonzero(types != TokenType.NORMAL).tolist():
        del pieces[tokens[i]]
    return SentencePieceEncoder(
        pieces=pieces,
        scores=scores.tolist(),
        byte_ids=byte_ids,
        special=special,
        user_defined=user_defined,
        add_space_prefix=_adds_space_prefix(metadata),
    )


def _adds_space_prefix(metadata: Mapping[str, object]) -> bool:
    return read_flag(metadata, _PREFIX + "add_space_prefix", True)
