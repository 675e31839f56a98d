"""Text to ids for SentencePiece vocabularies with scores: the best-scored neighbours merge first, bytes for the rest.

The rule (SentencePiece BPE, as GGUF files of model "llama" mean it): every character is a symbol; of all neighbouring
pairs whose concatenation is a piece, the one with the highest score merges (the leftmost of equals), until none is
left; a symbol that is no piece becomes the byte tokens of its UTF-8. Merging is done on words: text is cut only where
no piece of the vocabulary reaches across, so the cut changes nothing, and each distinct word is merged once.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterable, Mapping, Sequence

from edge_transformer.text.token_bytes import SPACE_MARK

_CACHED_WORDS = 1 << 16
_CACHED_WORD_LENGTH = 64


class SentencePieceEncoder:
    """Cuts text by scores.

    `pieces`: piece to id of what merging may produce; `scores[id]`; `byte_ids`: the 256 ids of the byte tokens.
    `special` and `user_defined`: tokens matched whole in raw text. `add_space_prefix`: a space is put before text at
    the start and after such tokens.
    """

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
        self._pieces = pieces
        self._scores = scores
        self._byte_ids = byte_ids
        self._add_space_prefix = add_space_prefix
        self._words = _word_pattern(pieces)
        marked = {text.replace(" ", SPACE_MARK): i for text, i in user_defined.items()}
        self._user_defined = AddedTokens(marked)
        self._all_added = AddedTokens({text.replace(" ", SPACE_MARK): i for text, i in special.items()} | marked)
        self._cache: dict[str, tuple[int, ...]] = {}

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        # Spaces are marked before tokens are matched whole: runs of spaces are user-defined tokens of some vocabularies.
        marked = text.replace(" ", SPACE_MARK)
        prefix = SPACE_MARK if self._add_space_prefix else ""
        ids: list[int] = []
        for part in (self._all_added if parse_special else self._user_defined).split(marked):
            if isinstance(part, int):
                ids.append(part)
            else:
                self._encode_text(prefix + part, ids)
        return ids

    def _encode_text(self, text: str, ids: list[int]) -> None:
        cache = self._cache
        for word in self._words.findall(text):
            found = cache.get(word)
            if found is None:
                found = tuple(self._encode_word(word))
                if len(word) <= _CACHED_WORD_LENGTH:
                    if len(cache) >= _CACHED_WORDS:
                        cache.clear()
                    cache[word] = found
            ids.extend(found)

    def _encode_word(self, word: str) -> Iterable[int]:
        for symbol in self._merge(word):
            piece = self._pieces.get(symbol)
            if piece is not None:
                yield piece
            else:
                yield from (self._byte_ids[byte] for byte in symbol.encode())

    def _merge(self, word: str) -> list[str]:
        """Symbols of `word` after all merges. A doubly linked list of symbols; the heap holds (−score, position,
        ...).
        """
        pieces, scores = self._pieces, self._scores
        symbols = list(word)
        count = len(symbols)
        following = list(range(1, count + 1))
        previous = list(range(-1, count - 1))
        heap: list[tuple[float, int, int, str]] = []

        def offer(left: int, right: int) -> None:
            merged = symbols[left] + symbols[right]
            piece = pieces.get(merged)
            if piece is not None:
                heapq.heappush(heap, (-scores[piece], left, right, merged))

        for left in range(count - 1):
            offer(left, left + 1)
        while heap:
            _, left, right, merged = heapq.heappop(heap)
            # Stale when either symbol has merged since: symbols only grow, or become empty when swallowed from the
            # left.
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


class AddedTokens:
    """Tokens matched whole in raw text: at the leftmost place, the longest one."""

    def __init__(self, tokens: Mapping[str, int]) -> None:
        self._tokens = {text: i for text, i in tokens.items() if text}
        lengths: dict[str, set[int]] = {}
        for text in self._tokens:
            lengths.setdefault(text[0], set()).add(len(text))
        self._lengths = {first: sorted(sizes, reverse=True) for first, sizes in lengths.items()}
        self._starts = re.compile("[" + "".join(map(re.escape, self._lengths)) + "]") if self._lengths else None

    def split(self, text: str) -> Iterable[str | int]:
        """Parts of `text` in order: ids of matched tokens, and the non-empty text between them."""
        if self._starts is None:
            if text:
                yield text
            return
        begin = search_from = 0
        while start := self._starts.search(text, search_from):
            position = start.start()
            for length in self._lengths[text[position]]:
                token_id = self._tokens.get(text[position : position + length])
                if token_id is not None:
                    if position > begin:
                        yield text[begin:position]
                    yield token_id
                    begin = search_from = position + length
                    break
            else:
                search_from = position + 1
        if begin < len(text):
            yield text[begin:]


def _word_pattern(pieces: Iterable[str]) -> re.Pattern[str]:
    """Words are cut before a space mark, except after the characters that some piece holds before one."""
    before = {SPACE_MARK, *re.findall(f"([^\0]){SPACE_MARK}", "\0".join(pieces))}
    joined = "".join(map(re.escape, sorted(before)))
    return re.compile(rf"[\s\S](?:[^{SPACE_MARK}]|(?<=[{joined}]){SPACE_MARK})*")
