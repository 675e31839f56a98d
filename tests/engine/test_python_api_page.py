"""docs/python-api.md: its blocks run, and its tables name what there is."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest

import edge_transformer
from edge_transformer import GenerationConfig, errors
from engine.test_llm import write_chat_model
from paths import REPOSITORY, smollm2_path

PAGE = (REPOSITORY / "docs" / "python-api.md").read_text(encoding="utf-8")


def run_blocks(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All Python blocks as one program, with `model` in place of "demo"."""
    monkeypatch.chdir(folder)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) > 8
    program = "\n".join(blocks)
    assert program.count('LLM("demo"') == 1
    exec(compile(program.replace('LLM("demo"', f"LLM({str(model)!r}"), "python-api.md", "exec"), {})


def test_the_blocks_run_on_a_tiny_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(write_chat_model(tmp_path / "model"), tmp_path, monkeypatch)


@pytest.mark.real_model
def test_the_blocks_run_on_the_demo_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_blocks(smollm2_path(), tmp_path, monkeypatch)


def test_every_error_is_in_the_table_with_its_exit_code() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]
    assert len(kinds) > 8
    assert [kind.__name__ for kind in kinds if f"| `{kind.__name__}` | {kind.exit_code} |" not in PAGE] == []


def test_every_setting_and_public_name_is_on_the_page() -> None:
    assert [field.name for field in fields(GenerationConfig) if f"`{field.name}`" not in PAGE] == []
    public = [name for name in edge_transformer.__all__ if not name.startswith("__")]
    assert set(edge_transformer.__all__) <= set(dir(edge_transformer))  # so that they are completed
    assert [name for name in public if name not in PAGE and name not in ("Timings", "TokenLogprobs")] == []
