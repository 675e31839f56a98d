"""Streamed text: pieces hold whole characters, and joined they equal the decoded whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from edge_transformer.text.gguf_tokenizer import gguf_tokenizer
from edge_transformer.text.stream import StreamDecoder
from edge_transformer.text.tokenizer import Tokenizer
from text.tokenizer_files import byte_level_metadata, byte_level_tokenizer, sentencepiece_metadata

BYTE_LEVEL = gguf_tokenizer(
    byte_level_metadata(byte_level_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt-2")
)
SENTENCE_PIECE = gguf_tokenizer(sentencepiece_metadata(["▁", "▁the", "a", "é", "▁▁", "中"], user_defined=["\n\n"]))
TOKENIZERS = {"byte-level": BYTE_LEVEL, "sentencepiece": SENTENCE_PIECE}
EMOJI = "👩🏽‍🚀"


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None) -> str:
    decoder = StreamDecoder(tokenizer, prompt or [])
    return "".join(map(decoder.push, ids)) + decoder.finish()


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(data=st.data())
def test_pieces_equal_the_whole(name: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[name]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=50))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids, skip_special=True)


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
@given(prompt=st.text(max_size=20), answer=st.text(max_size=20))
def test_answer_follows_prompt(name: str, prompt: str, answer: str) -> None:
    tokenizer = TOKENIZERS[name]
    prompt_ids = tokenizer.encode(prompt, add_bos=False)
    answer_ids = tokenizer.encode(answer, add_bos=False)
    whole = tokenizer.decode(prompt_ids + answer_ids)
    assert tokenizer.decode(prompt_ids) + streamed(tokenizer, answer_ids, prompt_ids) == whole


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_no_piece_holds_half_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    decoder = StreamDecoder(tokenizer)
    ids = tokenizer.encode(f"{EMOJI} नमस्ते 中 é", add_bos=False)
    pieces = list(map(decoder.push, ids))
    assert len(pieces) > 20
    assert not any("\ufffd" in piece for piece in pieces)
    assert decoder.finish() == ""


@pytest.mark.parametrize("name", sorted(TOKENIZERS))
def test_cut_inside_a_character(name: str) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode("😀", add_bos=False)[-4:]
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in ids[:-1]] == ["", "", ""]
    assert decoder.finish() == "\ufffd"
    # A prompt that ends inside a character: the answer's first byte completes it.
    continued = StreamDecoder(tokenizer, ids[:-1])
    assert continued.push(ids[-1]) == "😀"


def test_a_special_token_between_the_bytes_of_a_character() -> None:
    first, *rest = SENTENCE_PIECE.encode("😀", add_bos=False)[-4:]
    assert streamed(SENTENCE_PIECE, [first, 2, *rest]) == "😀"


def test_first_space_of_sentencepiece() -> None:
    the = SENTENCE_PIECE.token_id("▁the")
    assert the is not None
    assert streamed(SENTENCE_PIECE, [the, the]) == "the the"
    assert streamed(SENTENCE_PIECE, [the, the], [1]) == "the the"
    assert streamed(SENTENCE_PIECE, [the, the], [1, the]) == " the the"
