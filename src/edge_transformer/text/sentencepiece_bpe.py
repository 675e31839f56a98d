"""Text to ids for SentencePiece vocabularies with scores: the best-scored neighbours merge first, bytes for the rest.

The rule (SentencePiece BPE, as GGUF files of model "llama" mean it): every character is a symbol; of all neighbouring
pairs whose concatenation is a piece, the one with the highest score merges (the leftmost of equals), until none is
left; a symbol that is no piece becomes the byte tokens of its UTF-8. Text is cut into words only where no piece of the
vocabulary reaches across, so the cut changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from edge_transformer.text.added_tokens import AddedTokens
from edge_transformer.text.merging import encode_words, merge_symbols, remembering
from edge_transformer.text.token_bytes import SPACE_MARK


class SentencePieceEncoder:
    """Cuts text by scores."""

    def __init__(
        self,
        *,
        pieces: Mapping[str, int],
        scores: Sequence[float],
        byte_ids: Sequence[int],
        special: Mapping[str, int],
        user_defined: Mapping[str, int],
        add_space_prefix: bool,
    ) -> None:
        """`pieces`: piece to id of what merging may produce; `scores[id]`; `byte_ids`: the 256 ids of the byte tokens.

        `special` and `user_defined`: tokens matched whole. `add_space_prefix`: a space is put before text at the start
        and after such tokens.
        """
        self._pieces = pieces
        self._scores = scores
        self._byte_ids = byte_ids
        self._prefix = SPACE_MARK if add_space_prefix else ""
        self._words = _word_pattern(pieces)
        marked = {text.replace(" ", SPACE_MARK): i for text, i in user_defined.items()}
        self._user_defined = AddedTokens(marked)
        self._all_added = AddedTokens({text.replace(" ", SPACE_MARK): i for text, i in special.items()} | marked)
        self._encode_word = remembering(self._merge_word)

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        # Spaces are marked before tokens are matched whole: some vocabularies have user-defined runs of spaces.
        marked = text.replace(" ", SPACE_MARK)
        ids: list[int] = []
        for part in (self._all_added if parse_special else self._user_defined).split(marked):
            if isinstance(part, int):
                ids.append(part)
            else:
                ids += encode_words(self._words.findall(self._prefix + part), self._encode_word)
        return ids

    def _merge_word(self, word: str) -> tuple[int, ...]:
        ids: list[int] = []
        for symbol in merge_symbols(word, self._rank):
            piece = self._pieces.get(symbol)
            if piece is not None:
                ids.append(piece)
            else:
                ids += [self._byte_ids[byte] for byte in symbol.encode()]
        return tuple(ids)

    def _rank(self, left: str, right: str) -> float | None:
        piece = self._pieces.get(left + right)
        return None if piece is None else -self._scores[piece]


def _word_pattern(pieces: Iterable[str]) -> re.Pattern[str]:
    """Words are cut before a space mark, except after the characters that some piece holds before one."""
    before = {SPACE_MARK, *re.findall(f"([^\\0]){SPACE_MARK}", "\0".join(pieces))}
    joined = "".join(map(re.escape, sorted(before)))
    return re.compile(rf"[\s\S](?:[^{SPACE_MARK}]|(?<=[{joined}]){SPACE_MARK})*")
