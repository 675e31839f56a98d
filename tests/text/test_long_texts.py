"""Texts of megabytes: the ids are those of any text, and other threads run while it is cut."""

import random
import threading
import time
from collections.abc import Iterator

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from edge_transformer.text.bpe_encoder import LONG_TEXT, BpeEncoder
from edge_transformer.text.byte_level_bpe import _pieces
from edge_transformer.text.gguf_tokenizer import gguf_tokenizer
from edge_transformer.text.pretokenizers import PRE_TOKENIZERS
from text.tokenizer_files import SAMPLE, SPECIAL, byte_level_metadata, byte_level_tokenizer, sentencepiece_metadata

LETTERS = "abetho ABC0123456789'’\n\r\t.,_<|>éßИ中字한국नम😀👍🏽\x00\x7f\x85\xa0"
LETTERS += "\u0301\u0327\u200d\u212b\u3000\ufeff\u1100\u1161"
ASCII = "".join(letter for letter in LETTERS if letter.isascii())


def long_texts(letters: str) -> Iterator[str]:
    """Of lengths around the one from which on another way is taken, and longer; with runs of all kinds."""
    choice = random.Random(letters)
    for length in (LONG_TEXT - 1, LONG_TEXT, LONG_TEXT + 1, 50_000):
        yield "".join(choice.choice(letters) for _ in range(length))
        runs = [choice.choice(letters) * choice.randrange(1, 40) for _ in range(length // 15)]
        runs += [choice.choice(SPECIAL), SAMPLE] * (length // 1000)
        choice.shuffle(runs)
        yield "".join(runs)


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_byte_level_ids(pre: str) -> None:
    """Against the `tokenizers` package's whole pipeline."""
    settings = PRE_TOKENIZERS[pre]
    backend = byte_level_tokenizer(settings.words())
    backend.model.ignore_merges = settings.ignore_merges
    tokenizer = gguf_tokenizer(byte_level_metadata(backend, pre))
    if settings.nfc:
        backend.normalizer = normalizers.NFC()
    wrapped = BpeEncoder(backend)
    for text in (*long_texts(LETTERS), *long_texts(ASCII)):
        expected = backend.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_bos=False) == expected
        assert wrapped.encode(text, parse_special=True) == expected
        plain = tokenizer.encode(text, add_bos=False, parse_special=False)
        assert wrapped.encode(text, parse_special=False) == plain
        assert not {0, 1, 2} & set(plain)


@pytest.mark.parametrize("letters", [LETTERS, "a\u0301\u0327\u1100\u1161", "\u0301", "中\n"])
def test_text_normalized_in_pieces(letters: str) -> None:
    choice = random.Random(letters)
    text = "".join(choice.choice(letters) for _ in range(100_000))
    pieces = list(_pieces(text))
    assert "".join(pieces) == text
    normalize = normalizers.NFC().normalize_str
    assert "".join(map(normalize, pieces)) == normalize(text)
    assert len(pieces) > 4 or not any(letter.isascii() for letter in letters)


@pytest.mark.parametrize("name", ["byte-level GGUF", "tokenizer.json", "SentencePiece GGUF"])
@pytest.mark.parametrize("parse_special", [True, False])
def test_other_threads_run_meanwhile(name: str, parse_special: bool) -> None:
    backend = byte_level_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False))
    metadata = byte_level_metadata(backend, "gpt-2")
    if name == "SentencePiece GGUF":
        metadata = sentencepiece_metadata(["▁", *"etaonis", "he", "in", "▁t"])
    encoder = BpeEncoder(backend) if name == "tokenizer.json" else gguf_tokenizer(metadata).encoder
    text = SAMPLE * 4000  # a second
    encoder.encode(text[: 2 * LONG_TEXT], parse_special=parse_special)
    seconds: list[float] = []

    def encode() -> None:
        begun = time.perf_counter()
        encoder.encode(text, parse_special=parse_special)
        seconds.append(time.perf_counter() - begun)

    thread = threading.Thread(target=encode)
    thread.start()
    longest, before = 0.0, time.perf_counter()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.perf_counter()
        longest, before = max(longest, now - before), now
    assert longest < seconds[0] / 3


def test_a_model_of_one_token_keeps_every_word() -> None:
    """What the places of words are read from (byte_level_bpe) holds for words that would be no token."""
    cutter = Tokenizer(models.WordLevel({"": 0}, unk_token=""))
    cutter.pre_tokenizer = words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    for text in ("", " ", "\x00", "中 字\n\n  x"):
        (encoding,) = cutter.encode_batch([text], add_special_tokens=False)
        assert encoding.offsets == [place for _, place in words.pre_tokenize_str(text)]
