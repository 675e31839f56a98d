"""Text to ids for byte-level vocabularies with ranked merges.

Normalizing and cutting into words is left to the `tokenizers` package; merging is done by native code, since building
that package's model of a vocabulary takes longer than encoding a prompt.
"""

from __future__ import annotations

from collections.abc import Mapping

from tokenizers.normalizers import Normalizer
from tokenizers.pre_tokenizers import PreTokenizer

from edge_transformer._native import MergeError, StringIndex, merge_by_rank
from edge_transformer.errors import TextError
from edge_transformer.text.added_tokens import AddedTokens


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
            if self._normalizer is not None:
                part = self._normalizer.normalize_str(part)
            words = [word for word, _ in self._pre_tokenizer.pre_tokenize_str(part)]
            try:
                ids += merge_by_rank(self._tokens, self._merges, self._ignore_merges, words)
            except MergeError as error:
                raise TextError(
                    f"the tokenizer merges to {str(error)!r}, which is not in its vocabulary: the file is corrupt"
                ) from error
        return ids
