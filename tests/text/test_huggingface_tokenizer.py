"""Tokenizers from Hugging Face folders, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from edge_transformer.errors import TextError
from edge_transformer.text.huggingface_tokenizer import huggingface_tokenizer
from text.tokenizer_files import byte_level_tokenizer


def byte_level() -> Tokenizer:
    return byte_level_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False))


def folder_with(folder: Path, backend: Tokenizer, **files: object) -> Path:
    """`files`: NAME (without .json) to content."""
    backend.save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_bos_is_what_the_post_processor_adds(tmp_path: Path) -> None:
    backend = byte_level()
    plain = huggingface_tokenizer(
        folder_with(tmp_path, backend, tokenizer_config={"bos_token": "<|im_start|>", "add_bos_token": True})
    )
    assert plain.prefix_ids == ()
    assert plain.encode("the", add_bos=True)[0] == plain.bos_token_id == 1

    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>", special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)]
    )
    with_bos = huggingface_tokenizer(folder_with(tmp_path, backend, tokenizer_config={"add_bos_token": False}))
    assert with_bos.prefix_ids == (1,)
    text = plain.encode("the", add_bos=False)
    assert with_bos.encode("the") == [1, *text]  # the EOS of the post-processor would end what is to be continued
    assert with_bos.encode("the", add_bos=False) == text
    assert with_bos.encode("the", add_bos=True) == [1, *text]


def test_names_from_either_file(tmp_path: Path) -> None:
    eos = {"content": "<|im_end|>", "lstrip": False}
    tokenizer = huggingface_tokenizer(
        folder_with(
            tmp_path,
            byte_level(),
            special_tokens_map={"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
            tokenizer_config={"eos_token": eos, "pad_token": None, "image_token": "<|im_start|>"},
        )
    )
    assert tokenizer.named_tokens == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
        "image_token": "<|im_start|>",
    }
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (0, (2,))


def test_added_tokens_decoder(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    listed = {
        str(size + 1): {"content": "<tool é>", "special": False, "normalized": False},
        str(size): {"content": "<sys>", "special": True, "normalized": False},
    }
    folder = folder_with(tmp_path, backend, tokenizer_config={"added_tokens_decoder": listed})
    tokenizer = huggingface_tokenizer(folder)
    assert tokenizer.encode("<sys><tool é>") == [size, size + 1]
    assert tokenizer.vocab_size == size + 2
    assert size in tokenizer.special_ids
    assert size + 1 not in tokenizer.special_ids
    assert tokenizer.decode([size, size + 1], skip_special=True) == "<tool é>"
    plain = tokenizer.encode("<sys><tool é>", parse_special=False)
    assert plain[-1] == size + 1
    assert size not in plain

    listed[str(size + 7)] = listed.pop(str(size))
    with pytest.raises(TextError, match=f"'<tool é>' has id {size} .*but {size + 1} in the list beside it"):
        huggingface_tokenizer(folder_with(tmp_path, backend, tokenizer_config={"added_tokens_decoder": listed}))


def test_added_tokens_json(tmp_path: Path) -> None:
    backend = byte_level()
    size = backend.get_vocab_size()
    tokenizer = huggingface_tokenizer(
        folder_with(
            tmp_path,
            backend,
            added_tokens={"<two>": size + 1, "<one>": size},
            special_tokens_map={"additional_special_tokens": ["<two>"]},
        )
    )
    assert tokenizer.encode("<one><two>") == [size, size + 1]
    assert tokenizer.special_ids == {0, 1, 2, size + 1}


def test_a_special_token_that_is_an_ordinary_entry(tmp_path: Path) -> None:
    backend = byte_level()
    tokenizer = huggingface_tokenizer(folder_with(tmp_path, backend, tokenizer_config={"eos_token": "~"}))
    assert tokenizer.eos_token_ids == (backend.token_to_id("~"),)
    assert tokenizer.decode(tokenizer.encode("a~b"), skip_special=True) == "ab"


def test_truncation_and_padding_of_the_file_are_not_used(tmp_path: Path) -> None:
    backend = byte_level()
    backend.enable_truncation(4)
    backend.enable_padding(length=16)
    tokenizer = huggingface_tokenizer(folder_with(tmp_path, backend))
    text = "one two three four five six seven"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("a") == [backend.token_to_id("a")]


def sentencepiece(*, strip: bool) -> Tokenizer:
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁": 257, "a": 258, "▁a": 259}
    backend = Tokenizer(models.BPE(vocab, [("▁", "a")], unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), *steps] if strip else steps)
    parts: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    return backend


@pytest.mark.parametrize("strip", [True, False])
def test_sentencepiece_decoder(tmp_path: Path, strip: bool) -> None:
    backend = sentencepiece(strip=strip)
    tokenizer = huggingface_tokenizer(folder_with(tmp_path, backend))
    for text in ("a", "a a", "  a", "é 😀\n", ""):
        ids = tokenizer.encode(text)
        assert ids == backend.encode(text).ids
        assert tokenizer.decode(ids) == backend.decode(ids) == text


def test_other_decoders_are_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.decoder = decoders.WordPiece()
    with pytest.raises(TextError, match=r"decoder.*WordPiece.*not supported"):
        huggingface_tokenizer(folder_with(tmp_path, backend))
    backend.decoder = None
    with pytest.raises(TextError, match="no decoder"):
        huggingface_tokenizer(folder_with(tmp_path, backend))


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(TextError, match=r"no tokenizer\.json"):
        huggingface_tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\n\x0b")
    with pytest.raises(TextError, match=r"tokenizer\.model but no tokenizer\.json\. Make one with transformers"):
        huggingface_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(TextError, match=r"tokenizer\.json is not a tokenizer"):
        huggingface_tokenizer(tmp_path)
    folder = folder_with(tmp_path, byte_level())
    (folder / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(TextError, match=r"tokenizer_config\.json must hold a JSON object"):
        huggingface_tokenizer(folder)
    (folder / "tokenizer_config.json").write_text("[" * 100_000)
    with pytest.raises(TextError, match=r"tokenizer_config\.json cannot be read as JSON"):
        huggingface_tokenizer(folder)


def test_a_tokenizer_that_cuts_by_chance_is_refused(tmp_path: Path) -> None:
    backend = byte_level()
    backend.model.dropout = 0.1
    with pytest.raises(TextError, match=r"dropout 0\.1"):
        huggingface_tokenizer(folder_with(tmp_path, backend))


def test_a_named_token_that_does_not_exist(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, byte_level(), tokenizer_config={"bos_token": "<s>"})
    with pytest.raises(TextError, match=r"bos_token.*'<s>'.*not in its vocabulary"):
        huggingface_tokenizer(folder)


@pytest.mark.golden
def test_the_same_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    backend = byte_level()
    size = backend.get_vocab_size()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
    )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "~",
        "add_bos_token": False,
        "added_tokens_decoder": {str(size): {"content": "<tool>", "special": False, "normalized": False}},
    }
    folder = folder_with(tmp_path, backend, tokenizer_config=config)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = huggingface_tokenizer(folder)
    for text in ("", "the <tool>~<|im_end|> 12", "😀\0 \n\n", "<|im_start|>"):
        ids = reference(text)["input_ids"]
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids) == reference.decode(ids)
        assert tokenizer.decode(ids, skip_special=True) == reference.decode(ids, skip_special_tokens=True)
    assert tokenizer.named_tokens == reference.special_tokens_map
