"""Text to ids for SentencePiece vocabularies with scores: the best-scored neighbours merge first, bytes for the rest.

The rule (SentencePiece BPE, as GGUF files of model "llama" mean it): every character is a symbol; of all neighbouring
pairs whose concatenation is a piece, the one with the highest score merges (the leftmost of equals), until none is
left; a symbol that is no piece becomes the byte tokens of its UTF-8.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from edge_transformer._native import StringIndex, merge_by_score
from edge_transformer.text.added_tokens import AddedTokens
from edge_transformer.text.token_bytes import SPACE_MARK


class SentencePieceEncoder:
    """Cuts text by scores."""

    def __init__(
        self,
        *,
        tokens: StringIndex,
        mergeable: npt.NDArray[np.bool_],
        scores: npt.NDArray[np.float32],
        byte_ids: npt.NDArray[np.int32],
        special: Mapping[str, int],
        user_defined: Mapping[str, int],
        add_space_prefix: bool,
    ) -> None:
        """`mergeable` and `scores`, one per token: which of them merging may produce, and how good they are.

        `byte_ids`: the 256 ids of the byte tokens. `special` and `user_defined`: tokens matched whole.
        `add_space_prefix`: a space is put before text at the start and after such tokens.
        """
        self._tokens = tokens
        self._mergeable = mergeable
        self._scores = scores
        self._byte_ids = byte_ids
        self._prefix = SPACE_MARK if add_space_prefix else ""
        marked = {text.replace(" ", SPACE_MARK): i for text, i in user_defined.items()}
        self._user_defined = AddedTokens(marked)
        self._all_added = AddedTokens({text.replace(" ", SPACE_MARK): i for text, i in special.items()} | marked)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        # Spaces are marked before tokens are matched whole: some vocabularies have user-defined runs of spaces.
        marked = text.replace(" ", SPACE_MARK)
        ids: list[int] = []
        for part in (self._all_added if parse_special else self._user_defined).split(marked):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += merge_by_score(
                    self._tokens, self._mergeable, self._scores, self._byte_ids, [self._prefix + part]
                )
        return ids
