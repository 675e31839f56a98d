"""docs/supported-models.md names what the code supports."""

from __future__ import annotations

import pytest

from edge_transformer.models.hf_config import IGNORED
from edge_transformer.models.read import GGUF_FAMILIES, HF_FAMILIES
from paths import REPOSITORY

PAGE = (REPOSITORY / "docs" / "supported-models.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("family", HF_FAMILIES.values(), ids=lambda family: str(family.model_type))
def test_every_hugging_face_family_has_a_row(family) -> None:  # type: ignore[no-untyped-def]
    assert any(f"`{family.model_type}` | `{family.architecture}`" in line for line in PAGE.splitlines())


@pytest.mark.parametrize("architecture", GGUF_FAMILIES)
def test_every_gguf_architecture_has_a_row(architecture: str) -> None:
    assert any(line.endswith(f"| `{architecture}` |") for line in PAGE.splitlines())


def test_fields_without_effect_are_those_of_the_code() -> None:
    listed = PAGE.split("may have any value:")[1].split("In GGUF files")[0]
    assert sorted(listed.replace("`", "").replace(".\n", " ").replace(",", " ").split()) == sorted(IGNORED)
