"""`ete serve`: options that would open a server to everybody, or to nobody, are refused before a model is opened."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from edge_transformer.cli.main import ete
from edge_transformer.cli.serve import _kv_budget
from edge_transformer.errors import UsageError
from edge_transformer.server.app import AppSettings
from edge_transformer.server.run import bind, serve


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
        (("--kv-budget", "0"), "0 would refuse every request"),
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


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("127.0.0.1", "port {port} is in use: choose another with --port"),
        ("no-such-host.invalid", "host 'no-such-host.invalid' is no address of this machine ("),
        ("a" * 300, "' is no address of this machine ("),
        (
            "192.0.2.1",
            "host '192.0.2.1' is no address of this machine (Cannot assign requested address): give one with",
        ),
    ],
)
def test_an_address_that_cannot_be_had_is_told_before_the_model_is_opened(
    monkeypatch: pytest.MonkeyPatch, host: str, message: str
) -> None:
    monkeypatch.setattr(
        "edge_transformer.server.service.Service", lambda *arguments: pytest.fail("the model is opened")
    )
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = CliRunner().invoke(ete, ["serve", "nowhere", "--host", host, "--port", str(port)])
    assert result.exit_code == 2, result.stderr
    assert message.format(port=port) in result.stderr
    assert "Errno" not in result.stderr
    assert "Everybody who can reach" not in result.stderr  # nobody can
    if host != "127.0.0.1":
        assert result.stderr.endswith("give one with --host, such as 127.0.0.1, or 0.0.0.0 for all\n")


def test_an_address_that_is_taken_while_the_model_loads_is_told_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it is served nobody is kept waiting there, and so another program may come first."""
    monkeypatch.setattr("edge_transformer.server.run._raise_file_limit", lambda: None)
    bound = bind("127.0.0.1", 0)
    port = bound.getsockname()[1]
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    service: Any = SimpleNamespace(close=list)
    with socket.create_server(("127.0.0.1", port)), pytest.raises(UsageError, match=f"port {port} is in use"):
        serve(object(), service, bound, 1.0, lambda address: pytest.fail("it is served"))  # type: ignore[arg-type]
    assert bound.fileno() == -1


def test_a_port_of_the_system_is_refused_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: object, address: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr("edge_transformer.server.run.Listener.bind", refuse)
    with pytest.raises(
        UsageError, match=r"port 80 is not open to this user \(Permission denied\): choose one from 1024"
    ):
        bind("127.0.0.1", 80)


def test_keys_and_origins_as_they_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[AppSettings] = []
    monkeypatch.setattr("edge_transformer.server.app.make_app", lambda service, settings: made.append(settings))
    monkeypatch.setattr("edge_transformer.server.service.Service", lambda *arguments: SimpleNamespace(close=list))
    monkeypatch.setattr("edge_transformer.server.run.serve", lambda *arguments: None)
    file = tmp_path / "keys"
    file.write_bytes("\ufeffone\r\n\n two \n".encode())
    arguments: list[Any] = ["serve", "nowhere", "--port", "0", "--api-key", "three", "--api-key-file", str(file)]
    result = CliRunner().invoke(ete, [*arguments, "--cors-origin", "https://Example.org:8443", "--cors-origin", "*"])
    assert result.exit_code == 0, result.stderr
    (settings,) = made
    assert settings.access.api_keys == ("three", "one", "two")
    assert settings.access.origins == ("https://example.org:8443", "*")


@pytest.mark.parametrize(("plan", "where"), [(None, "in host memory"), (SimpleNamespace(kv="host"), "on the GPU")])
def test_recurrent_state_is_told_beside_the_kv_caches(
    plan: Any, where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    memory = {"recurrent_state": 50 << 20}
    if plan is not None:
        plan.ledger = (("KV cache", 1),)
    assert _kv_budget(SimpleNamespace(plan=plan, memory=memory), 4 << 30, 16) == 4 << 30
    assert capsys.readouterr().err.splitlines() == [
        "KV caches: up to 4.00 GiB",
        f"recurrent state: 800.0 MiB {where} for 16 answers, and checkpoints of up to 2.00 GiB in host memory",
    ]
    memory["recurrent_state"] = 0
    _kv_budget(SimpleNamespace(plan=plan, memory=memory), 4 << 30, 16)
    assert capsys.readouterr().err.splitlines() == ["KV caches: up to 4.00 GiB"]
