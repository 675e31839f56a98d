"""Where text comes from: chat templates and end tokens of folders and GGUF files, and the one door to all of it."""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest
from tokenizers import pre_tokenizers

from edge_transformer.errors import TextError
from edge_transformer.formats.checkpoint import TensorInfo
from edge_transformer.text.chat_template import MAX_TEMPLATE_CHARS
from edge_transformer.text.chat_template_files import gguf_chat_template, huggingface_chat_template
from edge_transformer.text.end_tokens import gguf_end_token_ids, huggingface_end_token_ids
from edge_transformer.text.gguf_tokenizer import gguf_tokenizer
from edge_transformer.text.huggingface_tokenizer import huggingface_tokenizer
from edge_transformer.text.load import load_text
from text.tokenizer_files import byte_level_metadata, byte_level_tokenizer, sentencepiece_metadata

BACKEND = byte_level_tokenizer(pre_tokenizers.ByteLevel(add_prefix_space=False))
METADATA = byte_level_metadata(BACKEND, "gpt-2")
MESSAGES = [{"role": "user", "content": "hi"}]


@dataclass
class Files:
    """What load_text looks at of a checkpoint."""

    container: str
    path: Path
    metadata: dict[str, object] = field(default_factory=dict)
    tensors: MappingProxyType[str, TensorInfo] = field(default_factory=lambda: MappingProxyType({}))

    def check_unchanged(self) -> None: ...

    def close(self) -> None: ...


def write(path: Path, content: object) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")


def rendered(folder: Path, **options: object) -> str:
    template = huggingface_chat_template(folder, {"bos_token": "<s>"})
    assert template is not None
    return template.render(MESSAGES, **options)  # type: ignore[arg-type]


def test_chat_template_places_in_order(tmp_path: Path) -> None:
    assert huggingface_chat_template(tmp_path, {}) is None
    write(tmp_path / "chat_template.json", {"chat_template": "from chat_template.json"})
    assert rendered(tmp_path) == "from chat_template.json"
    write(tmp_path / "tokenizer_config.json", {"chat_template": "{{ bos_token }} from the config"})
    assert rendered(tmp_path) == "<s> from the config"
    named = [{"name": "default", "template": "named"}, {"name": "tool_use", "template": "tools"}]
    write(tmp_path / "tokenizer_config.json", {"chat_template": named})
    assert rendered(tmp_path) == "named"
    assert rendered(tmp_path, tools=[]) == "tools"
    write(tmp_path / "tokenizer_config.json", {"chat_template": {"default": "mapped"}})
    assert rendered(tmp_path) == "mapped"
    write(tmp_path / "chat_template.jinja", "from the file é")
    assert rendered(tmp_path) == "from the file é"
    write(tmp_path / "additional_chat_templates" / "tool_use.jinja", "tools from the folder")
    assert rendered(tmp_path) == "from the file é"
    assert rendered(tmp_path, tools=[]) == "tools from the folder"


@pytest.mark.golden
def test_named_templates_of_a_folder_as_transformers(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    BACKEND.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "config"})
    write(tmp_path / "chat_template.jinja", "file\r\n{{ 1 }}\n")
    write(tmp_path / "additional_chat_templates" / "tool_use.jinja", "tools")
    reference = AutoTokenizer.from_pretrained(tmp_path)
    assert rendered(tmp_path) == reference.apply_chat_template(MESSAGES, tokenize=False)
    assert rendered(tmp_path, tools=[]) == reference.apply_chat_template(MESSAGES, tools=[], tokenize=False)


def test_unusable_chat_templates(tmp_path: Path) -> None:
    write(tmp_path / "tokenizer_config.json", {"chat_template": 3})
    with pytest.raises(TextError, match="must be a string or a list of named templates, got int"):
        huggingface_chat_template(tmp_path, {})
    write(tmp_path / "tokenizer_config.json", {"chat_template": [{"name": "x"}]})
    with pytest.raises(TextError, match="each named template needs a name and a template"):
        huggingface_chat_template(tmp_path, {})
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TextError, match=r"chat_template\.jinja cannot be read"):
        huggingface_chat_template(tmp_path, {})
    write(tmp_path / "chat_template.jinja", "x" * (MAX_TEMPLATE_CHARS + 5))
    with pytest.raises(TextError, match="more than the"):
        huggingface_chat_template(tmp_path, {})


def test_chat_templates_of_gguf() -> None:
    assert gguf_chat_template({"tokenizer.chat_templates": ["x"]}, {}) is None
    template = gguf_chat_template(
        {
            "tokenizer.chat_template": "d",
            "tokenizer.chat_template.tool_use": "t",
            "tokenizer.chat_templates": ["tool_use"],
        },
        {},
    )
    assert template is not None
    assert template.templates == {"default": "d", "tool_use": "t"}
    with pytest.raises(TextError, match=r"tokenizer\.chat_template must be a string"):
        gguf_chat_template({"tokenizer.chat_template": 1}, {})


def test_end_tokens_of_gguf() -> None:
    tokenizer = gguf_tokenizer(METADATA)
    # eos is <|im_end|> (2); <|endoftext|> (0) ends an answer by its name, <|im_start|> (1) does not.
    assert gguf_end_token_ids(METADATA, tokenizer) == (2, 0)
    more = METADATA | {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 2}
    assert gguf_end_token_ids(more, tokenizer) == (2, 7, 0)
    with pytest.raises(TextError, match="eot_token_id must be a token id below"):
        gguf_end_token_ids(METADATA | {"tokenizer.ggml.eot_token_id": 10**6}, tokenizer)


def test_a_name_that_is_ordinary_text_ends_nothing() -> None:
    tokenizer = gguf_tokenizer(sentencepiece_metadata(["<|im_end|>", "<end_of_turn>"]))
    assert gguf_end_token_ids({}, tokenizer) == ()


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        (None, None, (2, 0)),
        ({"eos_token_id": 5}, {"eos_token_id": 6}, (5, 2, 0)),
        ({"eos_token_id": [0, 5]}, None, (0, 5, 2)),
        ({"temperature": 1}, {"eos_token_id": [6]}, (6, 2, 0)),
        ({}, {"text_config": {"eos_token_id": 8}}, (8, 2, 0)),
    ],
)
def test_end_tokens_of_a_folder(
    tmp_path: Path, generation_config: object, config: object, expected: tuple[int, ...]
) -> None:
    if generation_config is not None:
        write(tmp_path / "generation_config.json", generation_config)
    if config is not None:
        write(tmp_path / "config.json", config)
    assert huggingface_end_token_ids(tmp_path, gguf_tokenizer(METADATA)) == expected


@pytest.mark.parametrize("value", ["2", [1, None], True, -1, 1.5])
def test_unusable_end_tokens(tmp_path: Path, value: object) -> None:
    write(tmp_path / "generation_config.json", {"eos_token_id": value})
    with pytest.raises(TextError, match="must be a token id or a list of them"):
        huggingface_end_token_ids(tmp_path, gguf_tokenizer(METADATA))


@pytest.mark.parametrize("value", [99999, [2, 99999], 2**31, 2**70])
def test_end_tokens_that_the_tokenizer_lacks(tmp_path: Path, value: object) -> None:
    write(tmp_path / "config.json", {"eos_token_id": value})
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    for tokenizer in (gguf_tokenizer(METADATA), huggingface_tokenizer(tmp_path)):
        with pytest.raises(TextError, match=r"config\.json names token \d+, which the tokenizer does not have"):
            huggingface_end_token_ids(tmp_path, tokenizer)


def test_both_containers_give_the_same_text(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    config = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}
    BACKEND.save(str(tmp_path / "tokenizer.json"))
    write(tmp_path / "tokenizer_config.json", config)
    folder = load_text(Files("safetensors", tmp_path))
    one_file = load_text(Files("safetensors", tmp_path / "model.safetensors"))
    gguf = load_text(Files("gguf", tmp_path / "x.gguf", METADATA | {"tokenizer.chat_template": template}))
    for text in (folder, one_file, gguf):
        assert text.end_token_ids == (2, 0)
        assert text.chat_template is not None
        prompt = text.chat_template.render(MESSAGES)
        assert prompt == "<|im_start|>hi<|im_end|>"
        ids = text.tokenizer.encode(prompt, add_bos=False)
        assert ids == folder.tokenizer.encode(prompt, add_bos=False)
        assert ids.count(1) == 1
    assert load_text(Files("gguf", tmp_path / "x.gguf", METADATA)).chat_template is None


@pytest.mark.parametrize("name", ["tokenizer_config.json", "chat_template.json", "additional_chat_templates/a.jinja"])
def test_a_pipe_is_refused_not_waited_for(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / name)
    with pytest.raises(TextError, match="is not a regular file"):
        huggingface_chat_template(tmp_path, {})
