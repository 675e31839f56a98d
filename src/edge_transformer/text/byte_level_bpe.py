"""Text to ids for byte-level vocabularies with ranked merges.

Normalizing and cutting into words is left to the `tokenizers` package; merging is done here, since building that
package's model of a vocabulary takes longer than encoding a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from edge_transformer.errors import TextError
from edge_transformer.text.added_tokens import AddedTokens
from edge_transformer.text.merging import encode_words, merge_symbols, remembering


class ByteLevelEncoder:
    """Cuts text by ranked merges."""

    def __init__(
        self,
        *,
        ids: Mapping[str, int],
        ranks: Mapping[str, int],
        normalizer: Normalizer | None,
        pre_tokenizer: PreTokenizer,
        ignore_merges: bool,
        special: Mapping[str, int],
        user_defined: Mapping[str, int],
    ) -> None:
        """`ids`: token to id; `ranks`: "left right" to the rank of that merge; `pre_tokenizer` gives words spelled
        byte-level.

        `ignore_merges`: a word that is a token is taken whole. `special` and `user_defined`: tokens matched whole.
        """
        self._ids = ids
        self._ranks = ranks
        self._normalizer = normalizer
        self._pre_tokenizer = pre_tokenizer
        self._ignore_merges = ignore_merges
        self._user_defined = AddedTokens(user_defined)
        self._all_added = AddedTokens({**special, **user_defined})
        self._encode_word = remembering(self._merge_word)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        ids: list[int] = []
        for part in (self._all_added if parse_special else self._user_defined).split(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            if self._normalizer is not None:
                part = self._normalizer.normalize_str(part)
            ids += encode_words((word for word, _ in self._pre_tokenizer.pre_tokenize_str(part)), self._encode_word)
        return ids

    def _merge_word(self, word: str) -> tuple[int, ...]:
        if self._ignore_merges and (whole := self._ids.get(word)) is not None:
            return (whole,)
        symbols = merge_symbols(word, self._rank)
        # A byte without a token of its own is left out, as transformers does; vocabularies lack bytes UTF-8 never has.
        missing = next((symbol for symbol in symbols if len(symbol) > 1 and symbol not in self._ids), None)
        if missing is not None:
            raise TextError(f"the tokenizer merges to {missing!r}, which is not in its vocabulary: the file is corrupt")
        return tuple(self._ids[symbol] for symbol in symbols if symbol in self._ids)

    def _rank(self, left: str, right: str) -> int | None:
        return self._ranks.get(f"{left} {right}")
