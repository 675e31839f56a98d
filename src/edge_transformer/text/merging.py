"""Byte-pair merging of one word, shared by the vocabularies that rank merges and those that score pieces."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from functools import lru_cache

_CACHED_WORDS = 1 << 16
_CACHED_LENGTH = 64


def merge_symbols(word: str, rank: Callable[[str, str], float | None]) -> list[str]:
    """Symbols of `word` after merging: characters at first, then neighbours join, lowest rank first, leftmost of
    equals.

    `rank(left, right)` is None where two symbols never join. O(n log n) in the length of the word.
    """
    symbols = list(word)
    count = len(symbols)
    following = list(range(1, count + 1))
    previous = list(range(-1, count - 1))
    heap = [
        (found, left, left + 1, symbols[left] + symbols[left + 1])
        for left in range(count - 1)
        if (found := rank(symbols[left], symbols[left + 1])) is not None
    ]
    heapq.heapify(heap)

    def offer(left: int, right: int) -> None:
        found = rank(symbols[left], symbols[right])
        if found is not None:
            heapq.heappush(heap, (found, left, right, symbols[left] + symbols[right]))

    while heap:
        _, left, right, merged = heapq.heappop(heap)
        # Stale when either symbol has merged since: symbols only grow, or become empty when their left neighbour
        # takes them.
        if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != merged:
            continue
        symbols[left] = merged
        symbols[right] = ""
        following[left] = following[right]
        if following[left] < count:
            previous[following[left]] = left
            offer(left, following[left])
        if previous[left] >= 0:
            offer(previous[left], left)
    return [symbol for symbol in symbols if symbol]


def encode_words(words: Iterable[str], encode_word: Callable[[str], tuple[int, ...]]) -> list[int]:
    """Ids of all words in order."""
    ids: list[int] = []
    for word in words:
        ids.extend(encode_word(word))
    return ids


def remembering(encode_word: Callable[[str], tuple[int, ...]]) -> Callable[[str], tuple[int, ...]]:
    """`encode_word` that keeps the ids of the latest words of ordinary length. Safe to call from several threads."""
    cached = lru_cache(_CACHED_WORDS)(encode_word)

    def encode(word: str) -> tuple[int, ...]:
        return cached(word) if len(word) <= _CACHED_LENGTH else encode_word(word)

    return encode
