"""docs/command-line.md says what the commands say."""

import importlib.util

from paths import REPOSITORY


def test_the_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("command_line_page", REPOSITORY / "docs" / "command_line.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text(encoding="utf-8") == module.page(), "run: python docs/command_line.py"
