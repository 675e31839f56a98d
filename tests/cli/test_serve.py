"""`ete serve`: options that would open a server to everybody, or to nobody, are refused before a model is opened."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from edge_transformer.cli.main import ete
from edge_transformer.server.app import AppSettings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--host", ""), "'--host': it is empty"),
        (("--api-key", ""), "'--api-key': it is empty"),
        (("--api-key", "secret", "--api-key", " "), "'--api-key': it is empty"),
        (("--api-key-file", "binary"), "The keys in binary are not UTF-8: byte 2 is 0xff."),
        (("--api-key-file", "/dev/zero"), "/dev/zero is longer than 1024 KiB: that is no file of keys."),
        (("--api-key-file", "blank"), "There is no key in blank."),
        (("--cors-origin", "https://example.org/"), "is no origin: write scheme, host and port"),
        (("--cors-origin", "example.org"), "is no origin"),
        (("--cors-origin", ""), "is no origin"),
        (("--max-body", "0"), "0 would refuse every request"),
        (("--drain-seconds", "nan"), "nan is no number of seconds"),
        (("--drain-seconds", "inf"), "inf is no number of seconds"),
    ],
)
def test_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], message: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"ab\xff\n")
    Path("blank").write_text(" \n\n")
    result = CliRunner().invoke(ete, ["serve", "nowhere", *options])
    assert result.exit_code == 2
    assert message in result.stderr


def test_keys_and_origins_as_they_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AppSettings] = []
    monkeypatch.setattr("edge_transformer.server.app.make_app", lambda service, settings: made.append(settings))
    monkeypatch.setattr("edge_transformer.server.service.Service", lambda *arguments: SimpleNamespace(close=list))
    monkeypatch.setattr("edge_transformer.server.run.serve", lambda *arguments: None)
    file = tmp_path / "keys"
    file.write_bytes("\ufeffone\r\n\n two \n".encode())
    arguments: list[Any] = ["serve", "nowhere", "--api-key", "three", "--api-key-file", str(file)]
    result = CliRunner().invoke(ete, [*arguments, "--cors-origin", "https://Example.org:8443", "--cors-origin", "*"])
    assert result.exit_code == 0, result.stderr
    (settings,) = made
    assert settings.access.api_keys == ("three", "one", "two")
    assert settings.access.origins == ("https://example.org:8443", "*")
