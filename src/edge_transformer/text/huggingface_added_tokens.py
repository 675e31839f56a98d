"""Special and added tokens that stand beside tokenizer.json.

tokenizer_config.json and special_tokens_map.json name some (bos_token, ...); added_tokens_decoder, or the older
added_tokens.json, list more. Newer folders repeat here what tokenizer.json says itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from edge_transformer.errors import TextError
from edge_transformer.text.metadata import read_json_object

_STANDARD_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_LISTS = ("additional_special_tokens", "extra_special_tokens")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_tokens_of_folder(backend: Backend, folder: Path) -> dict[str, str]:
    """Add to `backend` the tokens that the folder lists and tokenizer.json does not; give the named ones, name to text.

    Raises TextError where a list is malformed, or gives a token another id than tokenizer.json.
    """
    config = read_json_object(folder / "tokenizer_config.json")
    special_map = read_json_object(folder / "special_tokens_map.json")
    named = _named_tokens(config, special_map)
    special = dict.fromkeys([*named.values(), *_special_texts(config), *_special_texts(special_map)])

    listed = _added_tokens_decoder(config, folder)
    if listed is None:
        listed = _added_tokens_json(folder, special)
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    new = [token for _, token in sorted(listed.items()) if token.content not in known]
    known |= {token.content for token in new}
    # A special token that is an ordinary entry of the vocabulary is to be matched whole and hidden like the others.
    new += [
        AddedToken(text, special=True, normalized=False)
        for text in special
        if text not in known and backend.token_to_id(text) is not None
    ]
    backend.add_tokens(new)
    for token_id, token in listed.items():
        if backend.token_to_id(token.content) != token_id:
            raise TextError(
                f"{folder}: the added token {token.content!r} has id {backend.token_to_id(token.content)} by "
                f"tokenizer.json, but {token_id} in the list beside it"
            )
    return named


def _named_tokens(config: Mapping[str, object], special_map: Mapping[str, object]) -> dict[str, str]:
    """bos_token, eos_token, ... and what a model names beyond them (image_token, ...)."""
    extra = config.get("extra_special_tokens")
    named = {name: special_map[name] for name in _STANDARD_NAMES if name in special_map}
    named |= {name: value for name, value in config.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, Mapping) else {}
    return {name: text for name, value in named.items() if (text := _token_text(value))}


def _special_texts(source: Mapping[str, object]) -> list[str]:
    texts = []
    for key in _LISTS:
        value = source.get(key)
        entries = list(value.values()) if isinstance(value, Mapping) else value if isinstance(value, list) else []
        texts += [text for entry in entries if (text := _token_text(entry))]
    return texts


def _added_tokens_decoder(config: Mapping[str, object], folder: Path) -> dict[int, AddedToken] | None:
    """Id to token as tokenizer_config.json lists them; None without a list."""
    listed = config.get("added_tokens_decoder")
    if listed is None:
        return None
    where = f"added_tokens_decoder of {folder / 'tokenizer_config.json'}"
    if not isinstance(listed, Mapping):
        raise TextError(f"{where} must be an object, got {type(listed).__name__}")
    tokens = {}
    for key, entry in listed.items():
        text = _token_text(entry)
        if not key.isdecimal() or text is None or not isinstance(entry, Mapping):
            raise TextError(f"{where} has an unusable entry {key!r}: {str(entry)[:80]}")
        tokens[int(key)] = AddedToken(text, **{flag: bool(entry.get(flag, False)) for flag in _FLAGS})
    return tokens


def _added_tokens_json(folder: Path, special: Mapping[str, None]) -> dict[int, AddedToken]:
    tokens = {}
    for text, token_id in read_json_object(folder / "added_tokens.json").items():
        if not isinstance(token_id, int) or not text:
            raise TextError(f"{folder / 'added_tokens.json'}: {text!r} needs a number as its id, got {token_id!r}")
        tokens[token_id] = AddedToken(text, special=text in special, normalized=text not in special)
    return tokens


def _token_text(value: object) -> str | None:
    """Text of a token as these files give it: a string, or an object with "content"."""
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) and value else None
