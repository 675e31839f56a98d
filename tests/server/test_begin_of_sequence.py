"""A tokenizer that adds BOS and a template that writes it: a prompt has one, through the Python API and the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from edge_transformer import LLM
from server.tiny_server import TEMPLATE, Served, serving, write_chat_model

BOS = "<s>"
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_chat_model(tmp_path_factory.mktemp("served") / "bos", template="{{ bos_token }}" + TEMPLATE)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens([BOS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    settings = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": BOS}))
    return path


@pytest.fixture(scope="module")
def ids(path: Path) -> dict[str, list[int]]:
    """By the tokenizers package: of the text "hello", and of the chat."""
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    chat = f"{BOS}<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    found = {"text": tokenizer.encode("hello").ids, "chat": tokenizer.encode(chat, add_special_tokens=False).ids}
    assert all(one[0] == tokenizer.token_to_id(BOS) and one.count(one[0]) == 1 for one in found.values())
    return found


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[Served]:
    with serving(path) as served:
        yield served


def test_python(path: Path, ids: dict[str, list[int]]) -> None:
    with LLM(path, threads=1) as llm:
        assert llm.encode(HELLO) == llm.encode("hello") == ids["chat"]
        assert llm.encode("hello", raw=True) == ids["text"]
        assert list(llm.generate("hello", max_tokens=1).prompt_ids) == ids["chat"]


@pytest.mark.parametrize(
    ("path_of_request", "body", "kind"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 1}, "chat"),
        ("/v1/completions", {"prompt": "hello", "max_tokens": 1}, "text"),
        ("/tokenize", {"messages": HELLO}, "chat"),
        ("/tokenize", {"prompt": "hello"}, "text"),
    ],
)
def test_server(
    served: Served, ids: dict[str, list[int]], path_of_request: str, body: dict[str, Any], kind: str
) -> None:
    status, answer = served.post(path_of_request, {"model": "tiny", **body})
    assert status == 200, answer
    if path_of_request == "/tokenize":
        assert answer["tokens"] == ids[kind]
    else:
        assert answer["usage"]["prompt_tokens"] == len(ids[kind])


@pytest.mark.golden
def test_as_transformers(path: Path, ids: dict[str, list[int]]) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(path)
    assert reference("hello")["input_ids"] == ids["text"]
    chat = reference.apply_chat_template(HELLO, add_generation_prompt=True, tokenize=False)
    assert reference(chat, add_special_tokens=False)["input_ids"] == ids["chat"]
