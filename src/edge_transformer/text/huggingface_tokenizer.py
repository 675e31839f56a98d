"""A tokenizer from the files of a Hugging Face folder: tokenizer.json, with tokenizer_config.json and its older
companions.

tokenizer.json says all there is about cutting text; as in transformers, whether a BOS comes first is decided by its
post-processor and not by add_bos_token. The companions name special tokens and may mark more tokens as added ones.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer as Backend

from edge_transformer.errors import TextError
from edge_transformer.text.bpe_encoder import BpeEncoder
from edge_transformer.text.huggingface_added_tokens import add_tokens_of_folder
from edge_transformer.text.metadata import MAX_JSON_BYTES
from edge_transformer.text.token_bytes import SPACE_MARK, Spelling
from edge_transformer.text.tokenizer import Tokenizer, Vocabulary

_LONE_SENTENCEPIECE = ("tokenizer.model", "sentencepiece.bpe.model", "spiece.model")


def huggingface_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises TextError when tokenizer.json is missing, unreadable or of an unknown
    kind.
    """
    backend = _read_backend(folder)
    named = add_tokens_of_folder(backend, folder)
    spelling, strip_first_space = _spelling(backend)
    added = backend.get_added_tokens_decoder()
    bos = _named_id(backend, named, "bos_token")
    eos = _named_id(backend, named, "eos_token")
    return Tokenizer(
        encoder=BpeEncoder(backend),
        vocabulary=Vocabulary(
            size=backend.get_vocab_size(with_added_tokens=True),
            token_text=backend.id_to_token,
            token_id=backend.token_to_id,
            spelling=spelling,
            added={i: token.content for i, token in added.items()},
            special_ids=frozenset(i for i, token in added.items() if token.special),
        ),
        prefix_ids=_prefix_ids(backend),
        bos_token_id=bos,
        eos_token_ids=() if eos is None else (eos,),
        named_tokens=named,
        strip_first_space=strip_first_space,
    )


def _read_backend(folder: Path) -> Backend:
    path = folder / "tokenizer.json"
    if not path.is_file():
        lone = next((name for name in _LONE_SENTENCEPIECE if (folder / name).is_file()), None)
        if lone is not None:
            raise TextError(
                f"{folder} holds {lone} but no tokenizer.json. Make one with transformers "
                "(AutoTokenizer.from_pretrained(folder).save_pretrained(folder)), or use a GGUF conversion."
            )
        raise TextError(f"{folder} has no tokenizer.json, so there is no tokenizer for the model")
    size = path.stat().st_size
    if size > MAX_JSON_BYTES:
        raise TextError(f"{path} has {size} bytes, more than the {MAX_JSON_BYTES} read as a tokenizer")
    try:
        backend = Backend.from_file(str(path))
    except Exception as error:  # the package raises nothing narrower
        raise TextError(f"{path} is not a tokenizer that can be read: {error}") from error
    if dropout := getattr(backend.model, "dropout", None):
        raise TextError(
            f"{path} has model.dropout {dropout}, which cuts the same text differently each time: remove it"
        )
    return backend


def _named_id(backend: Backend, named: Mapping[str, str], name: str) -> int | None:
    if name not in named:
        return None
    token_id: int | None = backend.token_to_id(named[name])
    if token_id is None:
        raise TextError(f"the {name} of the tokenizer is {named[name]!r}, which is not in its vocabulary")
    return token_id


def _prefix_ids(backend: Backend) -> tuple[int, ...]:
    """What the post-processor puts before any text, found by encoding one letter with and without it."""
    plain = backend.encode("a", add_special_tokens=False).ids
    full = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start])
    raise TextError(
        "the post-processor of tokenizer.json does more than put tokens around the text, which is not supported"
    )


def _spelling(backend: Backend) -> tuple[Spelling, bool]:
    """How the vocabulary spells bytes, and whether decoding drops a first space, from the decoder of tokenizer.json."""
    decoder = backend.decoder
    if decoder is None:
        raise TextError("tokenizer.json has no decoder, so ids cannot be turned into text")
    description = json.loads(decoder.__getstate__())
    parts = description["decoders"] if description["type"] == "Sequence" else [description]
    kinds = [part["type"] for part in parts]
    if kinds == ["ByteLevel"]:
        return Spelling.BYTE_LEVEL, False
    replaces = {"type": "Replace", "pattern": {"String": SPACE_MARK}, "content": " "}
    strips = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    if parts[:1] == [replaces] and kinds[1:3] == ["ByteFallback", "Fuse"] and parts[3:] in ([], [strips]):
        return Spelling.SENTENCE_PIECE, len(parts) == 4
    raise TextError(
        f"the decoder of tokenizer.json is {' + '.join(kinds)}, which is not supported (supported: ByteLevel, and "
        "Replace + ByteFallback + Fuse with or without Strip)"
    )
