"""Text to ids for byte-level vocabularies with ranked merges.

Normalizing and cutting into words is left to the `tokenizers` package; merging is done by native code, since building
that package's model of a vocabulary takes longer than encoding a prompt.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property

from tokenizers import Tokenizer, models
from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from edge_transformer._native import MergeError, StringIndex, merge_by_rank
from edge_transformer.errors import TextError
from edge_transformer.text.added_tokens import AddedTokens
from edge_transformer.text.bpe_encoder import LONG_TEXT
from edge_transformer.text.token_bytes import spelled_byte_level

_PIECE_CHARACTERS = 1 << 14
_ASCII = re.compile("[\x00-\x7f]")


class ByteLevelEncoder:
    """Cuts text by ranked merges."""

    def __init__(
        self,
        *,
        tokens: StringIndex,
        merges: StringIndex,
        normalizer: Normalizer | None,
        pre_tokenizer: PreTokenizer,
        ignore_merges: bool,
        special: Mapping[str, int],
        user_defined: Mapping[str, int],
    ) -> None:
        """`merges`: "left right" in order of rank; `pre_tokenizer` gives words spelled byte-level.

        `ignore_merges`: a word that is a token is taken whole. `special` and `user_defined`: tokens matched whole.
        """
        self._tokens = tokens
        self._merges = merges
        self._normalizer = normalizer
        self._pre_tokenizer = pre_tokenizer
        self._ignore_merges = ignore_merges
        self._user_defined = AddedTokens(user_defined)
        self._all_added = AddedTokens({**special, **user_defined})

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for part in (self._all_added if parse_special else self._user_defined).split(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            try:
                ids += merge_by_rank(self._tokens, self._merges, self._ignore_merges, self._words(self._normal(part)))
            except MergeError as error:
                raise TextError(
                    f"the tokenizer merges to {str(error)!r}, which is not in its vocabulary: the file is corrupt"
                ) from error
        return ids

    def _normal(self, text: str) -> str:
        """Piece by piece, as the package holds the interpreter's lock meanwhile. No form of Unicode joins an ASCII
        character with those before it, or changes one.
        """
        if self._normalizer is None or text.isascii():
            return text
        return "".join(map(self._normalizer.normalize_str, _pieces(text)))

    def _words(self, text: str) -> list[str]:
        """Spelled byte-level."""
        if len(text) < LONG_TEXT:
            return [word for word, _ in self._pre_tokenizer.pre_tokenize_str(text)]
        # The package's way for several texts, which lets other threads run meanwhile, tells where the words are.
        (encoding,) = self._cutter.encode_batch([text], add_special_tokens=False)
        places = encoding.offsets
        if text.isascii():
            text = spelled_byte_level(text)
            return [text[begin:end] for begin, end in places]
        return [spelled_byte_level(text[begin:end]) for begin, end in places]

    @cached_property
    def _cutter(self) -> Tokenizer:
        """Makes a token of every word, always the same one."""
        cutter = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        cutter.pre_tokenizer = self._pre_tokenizer
        return cutter


def _pieces(text: str) -> Iterator[str]:
    """`text`, cut before ASCII characters."""
    begin = 0
    while begin < len(text):
        found = _ASCII.search(text, begin + _PIECE_CHARACTERS)
        end = len(text) if found is None else found.start()
        yield text[begin:end]
        begin = end
