"""Text to ids through the `tokenizers` package."""

from __future__ import annotations

from functools import cached_property

from tokenizers import Tokenizer

LONG_TEXT = 2048
"""Characters from which on the package's way for several texts is taken, which lets other threads run meanwhile."""


class BpeEncoder:
    """Wraps a `tokenizers.Tokenizer` whose settings no longer change, so that several threads may use it."""

    def __init__(self, backend: Tokenizer) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        backend = self._backend if parse_special else self._plain
        if len(text) < LONG_TEXT:
            encoding = backend.encode(text, add_special_tokens=False)
        else:
            (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    @cached_property
    def _plain(self) -> Tokenizer:
        """The same tokenizer, sharing its model, that cuts special tokens like ordinary text."""
        plain = Tokenizer(self._backend.model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        added = self._backend.get_added_tokens_decoder()
        plain.add_tokens([token for _, token in sorted(added.items())])
        plain.encode_special_tokens = True
        return plain
