"""Stop strings against a search of the whole text, however the text is cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_transformer.errors import UsageError
from edge_transformer.text.stop import StopStrings

ALPHABET = st.text(st.sampled_from("abc\n😀"), max_size=12)


def brute_force(text: str, stops: list[str]) -> tuple[str, bool]:
    """Text before the stop string that is complete first; of several complete there, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(pieces=st.lists(ALPHABET, max_size=12), stops=st.lists(ALPHABET.filter(bool), max_size=4))
def test_equals_a_search_of_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    found = StopStrings(stops)
    given_out, hit = "", False
    for piece in pieces:
        safe, hit = found.push(piece)
        given_out += safe
        if hit:
            break
    expected, expected_hit = brute_force("".join(pieces), stops)
    assert hit == expected_hit
    assert given_out + ("" if hit else found.flush()) == expected


@given(text=ALPHABET, stops=st.lists(ALPHABET.filter(bool), max_size=4))
def test_keeps_back_no_more_than_it_must(text: str, stops: list[str]) -> None:
    safe, hit = StopStrings(stops).push(text)
    if not hit:
        held = text[len(safe) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
        assert len(held) < max(map(len, stops), default=1)


def test_after_a_hit_nothing_is_given_out() -> None:
    stops = StopStrings(["ab", "xab"])
    assert stops.push("1x") == ("1", False)
    assert stops.push("ab2") == ("", True)
    assert stops.hit == "xab"
    assert stops.push("more") == ("", True)
    assert stops.flush() == ""


def test_empty_stop_string() -> None:
    with pytest.raises(UsageError, match="empty"):
        StopStrings(["a", ""])
