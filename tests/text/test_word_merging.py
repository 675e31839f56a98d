"""Strings found by content, and merging by rank, against a dictionary and the rule word for word."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_transformer._native import MergeError, StringIndex, merge_by_rank, merge_by_score
from edge_transformer.text.string_index import string_index


@given(strings=st.lists(st.text(max_size=20), max_size=60), absent=st.lists(st.text(max_size=20), max_size=10))
def test_positions(strings: list[str], absent: list[str]) -> None:
    index = string_index(strings)
    for text in strings + absent:
        assert index.find(text) == (strings.index(text) if text in strings else -1)
    repeated = [i for i, text in enumerate(strings) if text in strings[:i]]
    assert index.duplicate == (repeated[0] if repeated else -1)


@given(strings=st.lists(st.text("ab é", max_size=4), max_size=8))
def test_strings_that_are_no_pairs(strings: list[str]) -> None:
    """As str.partition cuts them, from the second character on."""
    cut = [(text[:1] + text[1:].partition(" ")[0], text[1:].partition(" ")[2]) for text in strings]
    wrong = [i for i, (left, right) in enumerate(cut) if not left or not right]
    assert string_index(strings).first_unspaced == (wrong[0] if wrong else -1)


def test_many_strings() -> None:
    strings = [f"{i:x}\0é" for i in range(100_000)]
    index = string_index(strings)
    assert index.duplicate == -1
    assert [index.find(text) for text in strings] == list(range(100_000))
    assert index.find("é") == -1


@pytest.mark.parametrize(
    "starts", [[], [8, 7], [8, 20], [-1, 8], [8, 17, 16], [8, 17, 2**62], [9, 8 + 8, 17], [8, -(2**62)]]
)
def test_starts_that_do_not_fit(starts: list[int]) -> None:
    with pytest.raises(ValueError, match="starts"):
        StringIndex(b"01234567890", np.array(starts, np.int64))


def merged(word: str, merges: list[str]) -> list[str]:
    """Neighbours join, the lowest rank first, the leftmost of equals, until none may."""
    symbols = list(word)
    while True:
        pairs = [f"{symbols[i]} {symbols[i + 1]}" for i in range(len(symbols) - 1)]
        ranks = [(merges.index(pair), i) for i, pair in enumerate(pairs) if pair in merges]
        if not ranks:
            return symbols
        _, i = min(ranks)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


LETTERS = "abé中😀"
PARTS = st.text(LETTERS, min_size=1, max_size=3)


@given(
    words=st.lists(st.text(LETTERS, max_size=14), max_size=6),
    merges=st.lists(st.tuples(PARTS, PARTS).map(" ".join), unique=True, max_size=20),
    whole=st.booleans(),
)
def test_ranked_merges(words: list[str], merges: list[str], whole: bool) -> None:
    tokens = list(dict.fromkeys([*LETTERS, *(pair.replace(" ", "") for pair in merges)]))
    expected = []
    for word in words:
        symbols = [word] if whole and word in tokens else merged(word, merges)
        expected += [tokens.index(symbol) for symbol in symbols]
    assert merge_by_rank(string_index(tokens), string_index(merges), whole, words) == expected


def test_a_merge_without_a_token() -> None:
    with pytest.raises(MergeError, match=r"^ab$"):
        merge_by_rank(string_index(["a", "b"]), string_index(["a b"]), False, ["b", "ab"])
    assert merge_by_rank(string_index(["a", "b"]), string_index(["a b"]), False, ["bxa"]) == [1, 0]


def test_scores_that_do_not_fit() -> None:
    index = string_index(["a", "b"])
    flags, scores, ids = np.ones(2, np.bool_), np.zeros(2, np.float32), np.zeros(256, np.int32)
    assert merge_by_score(index, flags, scores, ids, ["ba"]) == [1, 0]
    for arguments in ((flags[:1], scores, ids), (flags, scores[:1], ids), (flags, scores, ids[:255])):
        with pytest.raises(ValueError, match="each of 2 tokens, byte_ids 256"):
            merge_by_score(index, *arguments, ["ba"])


def test_words_that_are_no_text() -> None:
    index = string_index(["a"])
    with pytest.raises(UnicodeEncodeError):
        merge_by_rank(index, index, False, ["\ud800"])
    with pytest.raises(TypeError):
        merge_by_rank(index, index, False, [b"a"])  # type: ignore[list-item]
