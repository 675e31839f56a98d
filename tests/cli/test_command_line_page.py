"""docs/command-line.md says what the commands say."""

import importlib.util
import re

from edge_transformer.cli.main import EPILOG
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
    read = set(re.findall(r'environ\w*(?:\.get\(|\[)"(ETE_\w+)"', source))
    assert read >= {"ETE_CACHE", "ETE_CPU_ISA", "ETE_THREADS"}
    assert [name for name in sorted(read) if name not in EPILOG] == []
