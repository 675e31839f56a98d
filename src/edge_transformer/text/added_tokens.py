"""Tokens that are matched whole in raw text before it is cut: special tokens and user-defined ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping


class AddedTokens:
    """Finds tokens at the leftmost place, the longest one there."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        """`tokens`: text to id."""
        self._tokens = {text: i for text, i in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._starts = re.compile("[" + "".join(map(re.escape, self._lengths)) + "]") if self._lengths else None

    def split(self, text: str) -> Iterator[str | int]:
        """Parts of `text` in order: ids of matched tokens, and the non-empty text between them."""
        begin = search_from = 0
        while self._starts is not None and (start := self._starts.search(text, search_from)):
            position = start.start()
            search_from = position + 1
            for length in self._lengths[text[position]]:
                token_id = self._tokens.get(text[position : position + length])
                if token_id is not None:
                    if position > begin:
                        yield text[begin:position]
                    yield token_id
                    begin = search_from = position + length
                    break
        if begin < len(text):
            yield text[begin:]
