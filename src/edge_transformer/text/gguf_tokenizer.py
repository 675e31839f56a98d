"""A tokenizer from the metadata of a GGUF file (tokenizer.ggml.*).

Model "gpt2" is byte-level BPE with ranked merges, model "llama" is SentencePiece BPE by scores. The others (bert, t5,
rwkv, ...) are refused by name. What the keys mean is defined by the writers of such files: the GGUF specification and
llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edge_transformer._native import StringIndex
from edge_transformer.errors import TextError
from edge_transformer.text.metadata import read_flag, read_numbers, read_string, read_strings, read_token_id
from edge_transformer.text.string_index import string_index
from edge_transformer.text.token_bytes import Spelling
from edge_transformer.text.tokenizer import Encoder, Tokenizer, Vocabulary

if TYPE_CHECKING:
    from edge_transformer.text.pretokenizers import PreTokenizer

_PREFIX = "tokenizer.ggml."
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",  # spelled so in the specification
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


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The vocabulary of a file. `special` and `user_defined` (text to id) are matched whole in raw text."""

    texts: Sequence[str]
    index: StringIndex
    types: npt.NDArray[Any]
    special: dict[str, int]
    user_defined: dict[str, int]


def gguf_tokenizer(metadata: Mapping[str, object]) -> Tokenizer:
    """The tokenizer a GGUF file describes. Raises TextError when it is missing, of an unknown kind, or inconsistent."""
    model = read_string(metadata, _PREFIX + "model")
    if model is None:
        raise TextError("the GGUF file has no tokenizer (tokenizer.ggml.model is missing)")
    if model == "gpt2":
        cut = _pre_tokenizer(metadata)
        tokens = _read_tokens(metadata)
        encoder: Encoder = _byte_level_encoder(metadata, cut, tokens)
        spelling, strip_first_space, add_bos = Spelling.BYTE_LEVEL, False, cut.add_bos
    elif model == "llama":
        tokens = _read_tokens(metadata)
        encoder = _sentencepiece_encoder(metadata, tokens)
        spelling, strip_first_space, add_bos = Spelling.SENTENCE_PIECE, _adds_space_prefix(metadata), True
    else:
        raise TextError(
            f"tokenizer.ggml.model is {model!r}, which is not supported "
            "(supported: 'gpt2', byte-level BPE, and 'llama', SentencePiece BPE)"
        )

    size = len(tokens.texts)
    named_ids = {name: read_token_id(metadata, _PREFIX + key, size) for name, key in _NAMED.items()}
    bos, eos = named_ids["bos_token"], named_ids["eos_token"]
    add_bos = read_flag(metadata, _PREFIX + "add_bos_token", add_bos)
    if add_bos and bos is None:
        raise TextError("the model wants a BOS token before text, but tokenizer.ggml.bos_token_id is missing")

    def token_text(token_id: int) -> str | None:
        return tokens.texts[token_id] if 0 <= token_id < size else None

    def token_id(text: str) -> int | None:
        found = tokens.index.find(text)
        return found if found >= 0 else None

    return Tokenizer(
        encoder=encoder,
        vocabulary=Vocabulary(
            size=size,
            token_text=token_text,
            token_id=token_id,
            spelling=spelling,
            added={i: text for text, i in (tokens.special | tokens.user_defined).items()},
            special_ids=frozenset(tokens.special.values()),
        ),
        prefix_ids=(bos,) if add_bos and bos is not None else (),
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        named_tokens={name: tokens.texts[i] for name, i in named_ids.items() if i is not None},
        strip_first_space=strip_first_space,
    )


def _read_tokens(metadata: Mapping[str, object]) -> _Tokens:
    texts = read_strings(metadata, _PREFIX + "tokens")
    types = read_numbers(metadata, _PREFIX + "token_type", len(texts))
    if types is None:
        types = np.full(len(texts), TokenType.NORMAL)
    index = string_index(texts)
    if index.duplicate >= 0:
        raise TextError(f"tokenizer.ggml.tokens holds {texts[index.duplicate]!r} twice")
    special = {texts[i]: i for i in np.flatnonzero(types == TokenType.CONTROL).tolist()}
    user_defined = {texts[i]: i for i in np.flatnonzero(types == TokenType.USER_DEFINED).tolist()}
    return _Tokens(texts, index, types, special, user_defined)


def _pre_tokenizer(metadata: Mapping[str, object]) -> PreTokenizer:
    from edge_transformer.text.pretokenizers import pre_tokenizer

    name = read_string(metadata, _PREFIX + "pre")
    if name is None:
        raise TextError(
            "tokenizer.ggml.pre is missing, so it is not known how the model's text was cut into words: "
            "use a newer conversion of the model"
        )
    return pre_tokenizer(name)


def _byte_level_encoder(metadata: Mapping[str, object], cut: PreTokenizer, tokens: _Tokens) -> Encoder:
    from edge_transformer.text.byte_level_bpe import ByteLevelEncoder

    if read_flag(metadata, _PREFIX + "add_space_prefix", False):
        raise TextError("tokenizer.ggml.add_space_prefix is true, which is not supported for byte-level vocabularies")
    pairs = read_strings(metadata, _PREFIX + "merges")
    merges = string_index(pairs)
    if (unspaced := merges.first_unspaced) >= 0:
        raise TextError(
            f"tokenizer.ggml.merges[{unspaced}] is {pairs[unspaced][:80]!r}, not two parts with a space between them: "
            "the file is corrupt"
        )
    return ByteLevelEncoder(
        tokens=tokens.index,
        merges=merges,
        normalizer=cut.normalizer(),
        pre_tokenizer=cut.words(),
        ignore_merges=cut.ignore_merges,
        special=tokens.special,
        user_defined=tokens.user_defined,
    )


def _sentencepiece_encoder(metadata: Mapping[str, object], tokens: _Tokens) -> Encoder:
    from edge_transformer.text.sentencepiece_bpe import SentencePieceEncoder

    scores = read_numbers(metadata, _PREFIX + "scores", len(tokens.texts))
    if scores is None:
        raise TextError("tokenizer.ggml.scores is missing, which a tokenizer of model 'llama' needs")
    if read_flag(metadata, _PREFIX + "remove_extra_whitespaces", False):
        raise TextError("tokenizer.ggml.remove_extra_whitespaces is true, which is not supported")
    if _PREFIX + "precompiled_charsmap" in metadata:
        raise TextError("tokenizer.ggml.precompiled_charsmap asks for a normalization that is not supported")
    if np.isnan(scores).any():
        raise TextError("tokenizer.ggml.scores holds a NaN")
    named = [tokens.index.find(f"<0x{byte:02X}>") for byte in range(256)]
    byte_ids = [i for i in named if i >= 0 and tokens.types[i] == TokenType.BYTE]
    if len(byte_ids) != 256:
        raise TextError(f"the vocabulary has {len(byte_ids)} of the 256 byte tokens (<0x00> ...), all are needed")
    return SentencePieceEncoder(
        tokens=tokens.index,
        mergeable=tokens.types == TokenType.NORMAL,
        scores=np.array(scores, np.float32),
        byte_ids=np.array(byte_ids, np.int32),
        special=tokens.special,
        user_defined=tokens.user_defined,
        add_space_prefix=_adds_space_prefix(metadata),
    )


def _adds_space_prefix(metadata: Mapping[str, object]) -> bool:
    return read_flag(metadata, _PREFIX + "add_space_prefix", True)
