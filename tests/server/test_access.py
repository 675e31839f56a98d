"""Who may ask, and what careless or hostile clients do to the server: nothing."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from edge_transformer.server import connection
from edge_transformer.server.access import AccessSettings, hosts_of, read_keys
from edge_transformer.server.app import AppSettings
from server.tiny_server import Served, serving

TEXT = "/v1/completions"
BODY = {"model": "tiny", "prompt": "abc", "max_tokens": 1}


@pytest.fixture(scope="module")
def guarded(model_path: Path) -> Iterator[Served]:
    access = AccessSettings(("first-key", "second-key"), ("https://page.example",), hosts_of("127.0.0.1"))
    with serving(model_path, settings=AppSettings(access, max_body_bytes=10_000)) as served:
        yield served


def with_key(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def test_a_key_is_asked_for(guarded: Served) -> None:
    for headers in ({}, with_key("wrong"), with_key(""), with_key("first-ke"), {"authorization": "first-key"}):
        for method, path in (("POST", TEXT), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/status")):
            status, answer = guarded.ask(method, path, json.dumps(BODY).encode(), **headers)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
    for key in ("first-key", "second-key"):
        assert guarded.post(TEXT, BODY, **with_key(key))[0] == 200
    assert guarded.ask("GET", "/health")[0] == 200
    client = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong", max_retries=0)
    with pytest.raises(openai.AuthenticationError):
        client.models.list()


def test_what_is_refused_is_in_the_log_too_and_makes_one_line(
    guarded: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="edge_transformer.server")
    assert guarded.ask("GET", "/x%0aPOST%20/y")[0] == 401
    deadline = time.monotonic() + 10
    while not (lines := [line for line in caplog.messages if "/x" in line]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [line.rpartition(" ")[0].rpartition(" ")[0] for line in lines] == ["GET /x%0APOST%20/y 401"]


def test_keys_are_lines() -> None:
    assert read_keys(["one\n\n two \n", "three"]) == ("one", "two", "three")


def test_pages_of_other_hosts_are_kept_out(guarded: Served, served: Served) -> None:
    key = with_key("first-key")
    status, _ = guarded.post(TEXT, BODY, origin="https://evil.example", **key)
    assert status == 403
    assert guarded.post(TEXT, BODY, origin="null", **key)[0] == 403
    assert guarded.post(TEXT, BODY, origin="https://page.example", **key)[0] == 200
    assert served.post(TEXT, BODY, origin=served.url)[0] == 200
    assert served.post(TEXT, BODY, origin="https://evil.example")[0] == 403


def test_preflight(guarded: Served) -> None:
    with contextlib.closing(socket.create_connection(("127.0.0.1", guarded.port))) as raw:
        raw.sendall(
            b"OPTIONS /v1/models HTTP/1.1\r\nHost: localhost\r\nOrigin: https://page.example\r\n"
            b"Access-Control-Request-Method: GET\r\nConnection: close\r\n\r\n"
        )
        answer = b"".join(iter(lambda: raw.recv(4096), b"")).lower()
    assert answer.startswith(b"http/1.1 204")
    assert b"access-control-allow-origin: https://page.example" in answer


def test_a_name_that_is_not_its_own(model_path: Path) -> None:
    with serving(model_path, settings=AppSettings(AccessSettings(hosts=hosts_of("127.0.0.1")))) as served:
        assert served.post(TEXT, BODY, host="evil.example")[0] == 403
        assert served.post(TEXT, BODY, host="LOCALHOST:1234")[0] == 200
        assert served.post(TEXT, BODY, host="[::1]:80")[0] == 200
    assert hosts_of("0.0.0.0") == frozenset()


def test_a_body_that_is_too_large(guarded: Served) -> None:
    key = with_key("first-key")
    status, answer = guarded.post(TEXT, {**BODY, "prompt": "x" * 20_000}, **key)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    with contextlib.closing(socket.create_connection(("127.0.0.1", guarded.port))) as raw:
        raw.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer first-key\r\n".encode())
        raw.sendall(b"Transfer-Encoding: chunked\r\n\r\n")
        with contextlib.suppress(OSError):
            for _ in range(1000):
                raw.sendall(b"1000\r\n" + b"x" * 4096 + b"\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert raw.recv(100).startswith(b"HTTP/1.1 413")
    assert guarded.post(TEXT, BODY, **key)[0] == 200


@pytest.mark.parametrize("data", [b"\x16\x03\x01", b"GET\r\n\r\n", b"POST / HTTP/1.1\r\nContent-Length: x\r\n\r\n"])
def test_what_is_no_http(served: Served, data: bytes) -> None:
    with contextlib.closing(socket.create_connection(("127.0.0.1", served.port), timeout=10)) as raw:
        raw.sendall(data + b"\r\n\r\n")
        answer = raw.recv(1000)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 400")
    assert served.post(TEXT, BODY)[0] == 200


def test_a_client_that_leaves_in_the_middle_of_a_body_is_no_error(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="edge_transformer.server")
    with contextlib.closing(socket.create_connection(("127.0.0.1", served.port), timeout=10)) as raw:
        raw.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n".encode() + b"{")
    deadline = time.monotonic() + 10
    left: list[logging.LogRecord] = []
    while not left and time.monotonic() < deadline:
        time.sleep(0.01)
        # The line of an answer follows it: that of an earlier test's request may come in this one.
        left = [record for record in caplog.records if not record.getMessage().startswith(f"POST {TEXT} 200 ")]
    (record,) = left
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith(f"POST {TEXT} 499 ")


def test_connections_that_say_nothing_are_closed(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REQUEST_SECONDS", 0.3)
    silent = [socket.create_connection(("127.0.0.1", served.port), timeout=10) for _ in range(100)]
    for raw in silent[::2]:
        raw.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
    assert served.post(TEXT, BODY)[0] == 200
    for raw in silent:
        assert raw.recv(100) == b""
        raw.close()


def test_a_client_that_does_not_read(served: Served) -> None:
    """Its answer is made, its state is freed, and others do not wait."""
    before = served.scheduler.statistics.answer_tokens
    with contextlib.closing(socket.socket()) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        raw.connect(("127.0.0.1", served.port))
        body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": True})
        raw.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())
        assert served.post(TEXT, BODY)[0] == 200
        deadline = time.monotonic() + 30
        while served.scheduler.statistics.answer_tokens < before + 1501 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert served.scheduler.statistics.answer_tokens == before + 1501
        assert served.scheduler.running == 0


def test_a_client_that_takes_nothing_is_cut_off(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "WRITE_SECONDS", 0.3)
    with serving(model_path) as served, contextlib.ExitStack() as stack:
        service = served.service
        raws = []
        for _ in range(2):
            raw = stack.enter_context(contextlib.closing(socket.socket()))
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
            raw.connect(("127.0.0.1", served.port))
            body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 1500, "n": 4, "stream": True,
                               "logprobs": 20, "ignore_eos": True})  # fmt: skip
            raw.sendall(f"POST {TEXT} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode())
            raw.sendall(body.encode())
            raws.append(raw)
        deadline = time.monotonic() + 60
        while service.running.scheduler.statistics.cancelled < 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert service.running.scheduler.statistics.cancelled == 2
        assert served.post(TEXT, BODY)[0] == 200


def test_more_requests_than_may_be_answered(model_path: Path) -> None:
    with serving(model_path, settings=AppSettings(AccessSettings(max_requests=1))) as served:
        client = served.client()
        settings = {**BODY, "max_tokens": 1500, "stream": True, "extra_body": {"ignore_eos": True}}
        with (
            client.completions.create(**settings),
            pytest.raises(openai.InternalServerError, match="try again later"),
        ):
            client.completions.create(**BODY)
