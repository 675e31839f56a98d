"""A server over the tiny model, in a thread of this process, for the tests of its interface."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

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
