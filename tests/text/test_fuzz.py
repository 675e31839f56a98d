"""Whatever stands in a model's files, text either works or ends in a TextError."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from edge_transformer.errors import TextError
from edge_transformer.text.chat_template import ChatTemplate
from edge_transformer.text.chat_template_files import gguf_chat_template, huggingface_chat_template
from edge_transformer.text.end_tokens import gguf_end_token_ids, huggingface_end_token_ids
from edge_transformer.text.gguf_tokenizer import gguf_tokenizer
from edge_transformer.text.huggingface_tokenizer import huggingface_tokenizer
from text.tokenizer_files import byte_level_metadata, byte_level_tokenizer, sentencepiece_metadata

BACKEND = byte_level_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False))
BYTE_LEVEL = byte_level_metadata(BACKEND, "gpt-2") | {"tokenizer.chat_template": "{{ messages[0].content }}"}
SENTENCE_PIECE = sentencepiece_metadata(["▁", "a", "▁a", "aa"], user_defined=["<x>"])
SIZES = {True: len(BYTE_LEVEL["tokenizer.ggml.tokens"]), False: len(SENTENCE_PIECE["tokenizer.ggml.tokens"])}  # type: ignore[arg-type]

NUMBERS = st.one_of(st.integers(-5, 2**40), st.floats(), st.booleans())
VALUES = st.one_of(
    st.none(), NUMBERS, st.text(max_size=8), st.binary(max_size=4), st.lists(st.text(max_size=4), max_size=5)
)
JSON = st.recursive(
    st.one_of(st.none(), NUMBERS, st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=10,
)


@given(data=st.data(), byte_level=st.booleans(), text=st.text(max_size=20))
def test_gguf_metadata(data: st.DataObject, byte_level: bool, text: str) -> None:
    metadata = dict(BYTE_LEVEL if byte_level else SENTENCE_PIECE)
    size = SIZES[byte_level]
    arrays = st.one_of(
        st.lists(st.integers(-1, 8), min_size=size, max_size=size).map(lambda kinds: np.array(kinds, np.int32)),
        st.floats(width=32).map(lambda value: np.full(size, value, np.float32)),
        st.permutations([f"t{i}" for i in range(size)]),
    )
    for key in data.draw(st.lists(st.sampled_from(sorted(metadata)), max_size=3)):
        metadata[key] = data.draw(st.one_of(VALUES, arrays))
    try:
        tokenizer = gguf_tokenizer(metadata)
        ids = tokenizer.encode(text)
        tokenizer.decode(ids)
        gguf_end_token_ids(metadata, tokenizer)
        template = gguf_chat_template(metadata, tokenizer.named_tokens)
        if template is not None:
            template.render([{"role": "user", "content": text}])
    except TextError:
        return
    assert all(0 <= i < size for i in ids)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    BACKEND.save(str(folder / "tokenizer.json"))
    return folder


CONFIG_KEYS = st.sampled_from(
    [
        "added_tokens_decoder",
        "bos_token",
        "eos_token",
        "extra_special_tokens",
        "chat_template",
        "eos_token_id",
        "text_config",
    ]
)


@given(
    config=st.dictionaries(CONFIG_KEYS, JSON, max_size=3),
    generation_config=st.one_of(JSON, st.dictionaries(CONFIG_KEYS, JSON, max_size=2)),
)
def test_files_beside_tokenizer_json(folder: Path, config: dict[str, Any], generation_config: object) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps(generation_config))
    try:
        tokenizer = huggingface_tokenizer(folder)
        assert tokenizer.decode(tokenizer.encode("the", add_bos=False)) == "the"
        huggingface_end_token_ids(folder, tokenizer)
        huggingface_chat_template(folder, tokenizer.named_tokens)
    except TextError:
        return


FRAGMENTS = st.sampled_from(
    [
        "{{", "}}", "{%", "%}", "messages", "[0]", ".content", " for m in ", " if ", "endfor", "endif", " set x = ",
        "|", "tojson", "'a'", "*", "**", "99", "range(", ")", "(", "namespace", "raise_exception('no')", "x", "\n",
        "-", "~", "generation", "endgeneration", "macro f()", "endmacro", "f()", "break", "loop.index", "{#", "#}", "é",
    ]
)  # fmt: skip


@given(source=st.lists(FRAGMENTS, max_size=14).map(" ".join))
def test_templates(source: str) -> None:
    try:
        ChatTemplate({"default": source}, {}).render([{"role": "user", "content": "hi"}])
    except TextError:
        return
