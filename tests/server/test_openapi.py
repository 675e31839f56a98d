"""The OpenAPI document holds: schemathesis makes requests of it, valid and not, and the answers keep to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS

from server.tiny_server import Served, serving, write_chat_model

# Requests that keep to the document may still contradict themselves, and get a 400: that is no breach.
SKIPPED = {"positive_data_acceptance", "negative_data_rejection", "missing_required_header", "unsupported_method"}
EXAMPLES = settings(
    max_examples=15,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A model of a short context, so that no answer takes long."""
    with serving(write_chat_model(tmp_path_factory.mktemp("short") / "tiny", context=160)) as served:
        yield served


OPERATIONS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/tokenize", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{model}", "GET"),
    ("/health", "GET"),
    ("/status", "GET"),
    ("/metrics", "GET"),
]


MODES = [(*operation, GenerationMode.POSITIVE) for operation in OPERATIONS]
MODES += [(path, method, GenerationMode.NEGATIVE) for path, method in OPERATIONS if method == "POST"]


@pytest.mark.parametrize(("path", "method", "mode"), MODES)
def test_no_answer_breaches_the_document(short: Served, path: str, method: str, mode: GenerationMode) -> None:
    operation = schemathesis.openapi.from_url(f"{short.url}/openapi.json")[path][method]
    checks = [CHECKS.get_one(name) for name in CHECKS.get_all_names() if name not in SKIPPED]
    answered: set[int] = set()

    @EXAMPLES
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: schemathesis.Case) -> None:
        answered.add(case.call_and_validate(checks=checks, timeout=30).status_code)

    run()
    if mode is GenerationMode.POSITIVE and "{" not in path:
        assert 200 in answered


def test_the_document_names_every_path(short: Served) -> None:
    status, document = short.ask("GET", "/openapi.json")
    assert status == 200
    assert set(document["paths"]) == {path for path, _ in OPERATIONS}
