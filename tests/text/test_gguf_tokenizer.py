"""Tokenizers from GGUF metadata against the `tokenizers` package on small vocabularies, and what is refused."""

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from edge_transformer.errors import TextError
from edge_transformer.text.gguf_tokenizer import gguf_tokenizer
from text.tokenizer_files import SPECIAL, byte_level_metadata, byte_level_tokenizer, sentencepiece_metadata

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def gpt2_words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def smollm_words() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_words()])


def llama3_words() -> Any:
    split = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def changed(key: str, value: object) -> Callable[[dict[str, object]], dict[str, object]]:
    return lambda metadata: {k: v for k, v in {**metadata, f"tokenizer.ggml.{key}": value}.items() if v is not None}


TEXTS = st.text(
    st.sampled_from(list("abetho 0123456789'’\n\r\t.,_<|>éßИ中字한국नम\u0301\u200d😀👍🏽\x00\xa0\u3000\ufeff\uffff")),
    max_size=60,
)
BACKENDS = {
    pre: (backend := byte_level_tokenizer(words()), gguf_tokenizer(byte_level_metadata(backend, pre)))
    for pre, words in (("gpt-2", gpt2_words), ("smollm", smollm_words), ("llama-bpe", llama3_words))
}
BACKENDS["llama-bpe"][0].model.ignore_merges = True
SIZE = BACKENDS["smollm"][0].get_vocab_size()


@pytest.mark.parametrize("pre", sorted(BACKENDS))
@given(text=TEXTS, special=st.lists(st.sampled_from(SPECIAL), max_size=3), seed=st.integers(0, 9))
def test_byte_level_ids(pre: str, text: str, special: list[str], seed: int) -> None:
    backend, tokenizer = BACKENDS[pre]
    parts = [*special, *text.partition("a")]
    random.Random(seed).shuffle(parts)
    joined = "".join(parts)
    assert tokenizer.encode(joined, add_bos=False) == backend.encode(joined, add_special_tokens=False).ids
    assert tokenizer.decode(tokenizer.encode(joined, add_bos=False)) == joined


@pytest.mark.parametrize("pre", sorted(BACKENDS))
@given(ids=st.lists(st.integers(0, SIZE - 1), max_size=40))
def test_byte_level_text_of_any_ids(pre: str, ids: list[int]) -> None:
    backend, tokenizer = BACKENDS[pre]
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special=True) == backend.decode(ids, skip_special_tokens=True)


def test_byte_level_settings() -> None:
    tokenizer = BACKENDS["smollm"][1]
    assert tokenizer.vocab_size == SIZE
    assert tokenizer.special_ids == {0, 1, 2}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.prefix_ids) == (1, (2,), ())
    assert tokenizer.named_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.encode("the", add_bos=True) == [1, *tokenizer.encode("the")]
    assert tokenizer.token_bytes(0) == b"<|endoftext|>"
    assert tokenizer.token_bytes(SIZE) == b""
    assert tokenizer.decode([SIZE, -1]) == ""


@pytest.mark.parametrize(
    ("pre", "flag", "prefix"),
    [
        ("smollm", None, ()),
        ("smollm", True, (1,)),
        ("llama-bpe", None, (1,)),
        ("llama-bpe", False, ()),
        ("tekken", None, (1,)),
    ],
)
def test_bos_where_the_file_says_so_and_where_it_does_not(pre: str, flag: bool | None, prefix: tuple[int, ...]) -> None:
    metadata = byte_level_metadata(BACKENDS["smollm"][0], pre)
    tokenizer = gguf_tokenizer(changed("add_bos_token", flag)(metadata))
    assert tokenizer.prefix_ids == prefix
    assert tokenizer.encode("") == list(prefix)


def test_special_tokens_as_plain_text() -> None:
    tokenizer = BACKENDS["smollm"][1]
    assert tokenizer.encode("<|im_end|>") == [2]
    plain = tokenizer.encode("<|im_end|>", parse_special=False)
    assert not tokenizer.special_ids & set(plain)
    assert tokenizer.decode(plain) == "<|im_end|>"


def test_surrogates() -> None:
    tokenizer = BACKENDS["smollm"][1]
    assert tokenizer.encode("a\ud83d\ude00b") == tokenizer.encode("a😀b")
    assert tokenizer.encode("a\ud83db") == tokenizer.encode("a\ufffdb")
    assert tokenizer.encode("\ude00\ud83d") == tokenizer.encode("\ufffd\ufffd")


def test_nul_and_a_long_text() -> None:
    tokenizer = BACKENDS["smollm"][1]
    assert tokenizer.decode(tokenizer.encode("a\0b\0")) == "a\0b\0"
    long = "x" * 200_000 + " the" * 50_000
    assert tokenizer.decode(tokenizer.encode(long)) == long


PIECES = (
    "▁",
    "▁t",
    "he",
    "▁the",
    "in",
    "er",
    "a",
    "b",
    "e",
    "h",
    "i",
    "n",
    "r",
    "t",
    "ab",
    "ba",
    "aa",
    "aaa",
    "é",
    "中",
)


def naive_sentencepiece(text: str, pieces: dict[str, int], scores: list[float]) -> list[int]:
    """The rule, word for word: join the best-scored neighbouring pair, the leftmost of equals, until there is none."""
    symbols = list(text.replace(" ", "▁"))
    while True:
        found = [
            (-scores[pieces[symbols[i] + symbols[i + 1]]], i)
            for i in range(len(symbols) - 1)
            if symbols[i] + symbols[i + 1] in pieces
        ]
        if not found:
            break
        _, i = min(found)
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]
    ids = []
    for symbol in symbols:
        ids += [pieces[symbol]] if symbol in pieces else [3 + byte for byte in symbol.encode()]
    return ids


@given(
    text=st.text(st.sampled_from(list("abehinrt  é中x😀▁\n")), max_size=40),
    order=st.permutations(PIECES),
    equal=st.booleans(),
)
def test_sentencepiece_ids(text: str, order: list[str], equal: bool) -> None:
    scores = dict.fromkeys(order, -1.0) if equal else None
    metadata = sentencepiece_metadata(order, scores=scores) | {
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.add_bos_token": False,
    }
    all_scores = metadata["tokenizer.ggml.scores"]
    assert isinstance(all_scores, np.ndarray)
    pieces = {piece: 259 + i for i, piece in enumerate(order)}
    tokenizer = gguf_tokenizer(metadata)
    assert tokenizer.encode(text) == naive_sentencepiece(text, pieces, all_scores.tolist())
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("▁", " ")


def as_tokenizers_package(pieces: list[str]) -> Tokenizer:
    """The same vocabulary as in a folder like Llama 2: every way to split a piece is a merge, best score first."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for name in [*(f"<0x{byte:02X}>" for byte in range(256)), *pieces]:
        vocab[name] = len(vocab)
    splits = [(piece[:i], piece[i:]) for piece in pieces for i in range(1, len(piece))]
    merges = [(left, right) for left, right in splits if left in vocab and right in vocab]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<s>", "</s>")])
    return backend


LETTERS = ("a", "b", "e", "h", "i", "n", "r", "t", "▁")
WORDS = ("▁t", "he", "▁the", "in", "er", "ab", "ba", "▁a", "▁▁", "the", "inn", "▁in")


@given(
    text=st.text(st.sampled_from(list("abehinrt  é😀\n")), max_size=40),
    special=st.sampled_from(["", "<s>", "</s>"]),
    words=st.permutations(WORDS),
)
def test_sentencepiece_with_space_prefix_as_in_a_folder(text: str, special: str, words: list[str]) -> None:
    pieces = [*words, *LETTERS]
    tokenizer = gguf_tokenizer(sentencepiece_metadata(pieces))
    joined = text[:20] + special + text[20:]
    assert tokenizer.encode(joined, add_bos=False) == as_tokenizers_package(pieces).encode(joined).ids


def test_sentencepiece_settings() -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata(PIECES, user_defined=("<b>", "  ")))
    assert tokenizer.prefix_ids == (1,)
    space = tokenizer.token_id("▁")
    the = tokenizer.token_id("▁the")
    bold = tokenizer.token_id("<b>")
    two = tokenizer.token_id("  ")
    assert tokenizer.encode("the") == [1, the]
    assert tokenizer.encode("the</s>the", add_bos=False) == [the, 2, the]
    assert tokenizer.encode("the<b>the", add_bos=False, parse_special=False) == [the, bold, the]
    assert tokenizer.encode("<b>  ", add_bos=False) == [bold, two]
    assert tokenizer.encode(" ", add_bos=False) == [space, space]
    assert tokenizer.encode("", add_bos=False) == []
    assert tokenizer.decode([1, the, the]) == "<s> the the"
    assert tokenizer.decode([1, the, the], skip_special=True) == "the the"
    assert tokenizer.decode(tokenizer.encode("  the <b> x", add_bos=False)) == "  the <b>  x"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed("model", None), "has no tokenizer"),
        (changed("model", "bert"), "'bert'.*not supported"),
        (changed("model", "t5"), "'t5'.*not supported"),
        (changed("model", "rwkv"), "'rwkv'.*not supported"),
        (changed("model", 3), "must be a string"),
        (changed("pre", None), "pre is missing"),
        (changed("pre", "default"), "'default'.*not known"),
        (changed("pre", "somebody-elses"), "'somebody-elses'.*not known.*tokenizer.json"),
        (changed("tokens", None), "tokens is missing"),
        (changed("tokens", ["a", "a"]), f"token_type has {SIZE} entries, the vocabulary has 2"),
        (changed("tokens", 7), "must be a list of strings"),
        (changed("tokens", ["a"] * SIZE), "holds 'a' twice"),
        (changed("token_type", np.zeros(3, np.int32)), "token_type has 3 entries"),
        (changed("token_type", "x"), "must be a list of numbers"),
        (changed("merges", None), "merges is missing"),
        (changed("merges", ["t h", "he"]), r"merges\[1\] is 'he', not two parts"),
        (changed("merges", [" he"]), r"merges\[0\] is ' he', not two parts"),
        (changed("merges", ["he "]), r"merges\[0\] is 'he ', not two parts"),
        (changed("add_space_prefix", True), "add_space_prefix is true"),
        (changed("bos_token_id", SIZE), f"token id below {SIZE}, got {SIZE}"),
        (changed("eos_token_id", -1), f"token id below {SIZE}, got -1"),
        (changed("add_bos_token", "yes"), "must be true or false"),
        (
            lambda metadata: changed("add_bos_token", True)(changed("bos_token_id", None)(metadata)),
            "bos_token_id is missing",
        ),
    ],
)
def test_refused_byte_level(change: Callable[[dict[str, object]], dict[str, object]], words: str) -> None:
    metadata = byte_level_metadata(BACKENDS["smollm"][0], "smollm")
    with pytest.raises(TextError, match=words):
        gguf_tokenizer(change(metadata))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (changed("scores", None), "scores is missing"),
        (changed("scores", np.zeros(2, np.float32)), "scores has 2 entries"),
        (changed("scores", np.full(259 + len(PIECES), np.nan, np.float32)), "holds a NaN"),
        (changed("remove_extra_whitespaces", True), "remove_extra_whitespaces is true"),
        (changed("precompiled_charsmap", np.zeros(4, np.uint8)), "precompiled_charsmap"),
        (changed("token_type", np.ones(259 + len(PIECES), np.int32)), "0 of the 256 byte tokens"),
    ],
)
def test_refused_sentencepiece(change: Callable[[dict[str, object]], dict[str, object]], words: str) -> None:
    with pytest.raises(TextError, match=words):
        gguf_tokenizer(change(sentencepiece_metadata(PIECES)))


def test_merges_that_lead_nowhere_are_an_error_when_met() -> None:
    metadata = byte_level_metadata(BACKENDS["smollm"][0], "smollm")
    tokenizer = gguf_tokenizer(changed("merges", ["z q"])(metadata))
    assert tokenizer.decode(tokenizer.encode("the")) == "the"
    with pytest.raises(TextError, match=r"'zq'.*corrupt"):
        tokenizer.encode("zq")


def test_a_bos_that_is_not_there() -> None:
    metadata = changed("bos_token_id", None)(byte_level_metadata(BACKENDS["smollm"][0], "smollm"))
    with pytest.raises(TextError, match="no BOS token"):
        gguf_tokenizer(metadata).encode("x", add_bos=True)
