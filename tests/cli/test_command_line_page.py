"""docs/command-line.md says what the commands say."""

import importlib.util
import inspect
import re

from edge_transformer import errors
from edge_transformer.cli.console import size
from edge_transformer.cli.main import BROKEN_PIPE, EPILOG, INTERRUPTED
from edge_transformer.hub.demo import DEMO
from paths import REPOSITORY


def test_the_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("command_line_page", REPOSITORY / "docs" / "command_line.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python docs/command_line.py"


def test_every_variable_that_is_read_is_in_the_help() -> None:
    source = "".join(path.read_text() for path in (REPOSITORY / "src" / "edge_transformer").rglob("*.py"))
    read = set(re.findall(r'environ\w*(?:\.get\(|\[)"((?:ETE|XDG)_\w+)"', source))
    assert read >= {"ETE_CACHE", "ETE_CPU_ISA", "ETE_THREADS", "XDG_CACHE_HOME"}
    assert [name for name in sorted(read) if name not in EPILOG] == []


def test_every_exit_code_is_in_the_help_and_what_ends_a_server() -> None:
    kinds = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)]
    codes = {INTERRUPTED, BROKEN_PIPE, *(kind.exit_code for kind in kinds)}
    assert len(codes) > 10
    assert [code for code in sorted(codes) if not re.search(rf"(^|  ) *{code}  \w", EPILOG, re.MULTILINE)] == []
    assert "A server that Ctrl-C ends while it serves is done: 0; while it starts: 130." in EPILOG


def test_the_size_of_the_demo_model_and_its_place_are_the_same_everywhere() -> None:
    """As `ete list` and `ete info` show it, rounded."""
    readme = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    assert size(DEMO.nbytes) == "93.8 MiB"
    for text in (EPILOG, readme):
        assert re.findall(r"SmolLM2-135M-Instruct\W+(?:Apache-2\.0, )?(\d+ \w+)", text)[0] == "94 MiB"
        assert "XDG_CACHE_HOME" in text
