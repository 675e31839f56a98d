"""A server over the tiny model, in a thread of this process, for the tests of its interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from edge_transformer.text.tokenizer import Tokenizer
from server.tiny_server import Served, serving, write_chat_model


@pytest.fixture(scope="session")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("served") / "tiny")


@pytest.fixture(scope="session")
def shared(model_path: Path) -> Iterator[Served]:
    """One server for all tests that leave it as it is."""
    with serving(model_path) as served:
        yield served


@pytest.fixture
def served(shared: Served) -> Served:
    assert shared.service.ready
    return shared


@pytest.fixture
def cut(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lengths of the texts that were cut into tokens."""
    lengths: list[int] = []
    encode = Tokenizer.encode

    def counted(self: Tokenizer, text: str, **settings: Any) -> list[int]:
        lengths.append(len(text))
        return encode(self, text, **settings)

    monkeypatch.setattr(Tokenizer, "encode", counted)
    return lengths
