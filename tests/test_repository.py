"""The repository itself: imports are light, every package is described, no file speaks of one machine."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from paths import REPOSITORY

PACKAGE = REPOSITORY / "src" / "edge_transformer"

# What the command line, the server and the references need, and the engine does not.
COMMAND_LINE_AND_SERVER = {"click", "rich", "prompt_toolkit", "starlette", "uvicorn", "msgspec"}
REFERENCES = {"torch", "transformers", "gguf", "safetensors"}

# Without a model there is no tokenizer to build, no template to render, no hub to ask.
HEAVY = {"numpy", "tokenizers", "jinja2", "huggingface_hub", "rich", "prompt_toolkit", "edge_transformer._native"}


def modules_after(code: str) -> set[str]:
    """Names of all modules that a fresh interpreter has loaded after running `code`."""
    program = f"{code}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)), file=sys.__stdout__)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_the_engine_imports_without_the_packages_of_command_line_server_and_reference() -> None:
    assert not modules_after("from edge_transformer import LLM") & (COMMAND_LINE_AND_SERVER | REFERENCES)


def test_command_line_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom edge_transformer.cli.main import main\nsys.argv = ['ete', '--help']\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code"
    )
    assert not modules_after(code) & HEAVY


def test_every_package_is_named_in_the_architecture_page() -> None:
    page = (REPOSITORY / "ARCHITECTURE.md").read_text(encoding="utf-8")
    packages = [path.parent.relative_to(PACKAGE).as_posix() for path in PACKAGE.glob("**/__init__.py")]
    assert [name for name in packages if name != "." and f"| `{name}` |" not in page] == []


def tracked_files() -> list[Path]:
    done = subprocess.run(["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip("not a git checkout")
    return [path for name in done.stdout.splitlines() if (path := REPOSITORY / name).is_file()]


def test_no_file_names_a_path_of_one_machine() -> None:
    own_folders = re.compile(rb"/(work|root|home/\w+|Users/\w+|opt/pypi)/")
    # The one place that may look beside the repository is tests/paths.py.
    beside = re.compile(rb"\.\./shared")
    found = []
    for path in tracked_files():
        if path == Path(__file__).resolve():
            continue
        content = path.read_bytes()
        if own_folders.search(content) or (beside.search(content) and path.name != "paths.py"):
            found.append(path.relative_to(REPOSITORY).as_posix())
    assert found == []


def test_no_model_weights_are_tracked() -> None:
    big = [path.name for path in tracked_files() if path.stat().st_size > 2 << 20]
    assert big == []


def test_readme_commands_are_what_continuous_integration_runs() -> None:
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8").splitlines()
    assert len([line for line in readme if line.endswith("-m pytest")]) == 1
    assert "grep -m 1 -- '-m pytest$' README.md" in (REPOSITORY / ".ci" / "run").read_text(encoding="utf-8")
