"""Clients that go away, an engine that fails, a server that is told to end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from click.testing import CliRunner

from edge_transformer import LLM
from edge_transformer.cli.main import ete
from edge_transformer.engine.request import Limits
from edge_transformer.errors import CapacityError, GpuError
from edge_transformer.server import delivery, job, run, service
from edge_transformer.server.errors import public_reason
from server.tiny_server import Served, serving, write_chat_model

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it does not happen"
        time.sleep(0.002)


@contextlib.contextmanager
def slow_layers(served: Served, seconds: float) -> Iterator[None]:
    """Each look between layers takes so long."""
    engine = served.service.running.llm.engine
    step = engine.step

    def slow(chunks: Any, cancelled: Callable[[], bool]) -> Any:
        def look() -> bool:
            time.sleep(seconds)
            return cancelled()

        return step(chunks, look)

    engine.step = slow  # type: ignore[method-assign]
    try:
        yield
    finally:
        engine.step = step  # type: ignore[method-assign]


@contextlib.contextmanager
def asking(served: Served, path: str, **body: Any) -> Iterator[socket.socket]:
    """A connection that has asked and not read."""
    text = json.dumps({"model": "tiny", **body})
    with contextlib.closing(socket.create_connection(("127.0.0.1", served.port))) as raw:
        raw.sendall(f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())
        yield raw


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_while_its_prompt_is_read(served: Served, stream: bool) -> None:
    scheduler = served.scheduler
    before = scheduler.statistics.cancelled
    with slow_layers(served, 0.2):
        with asking(served, TEXT, prompt="x" * 1500, stream=stream):
            until(lambda: scheduler.running == 1)
        started = time.monotonic()
        until(lambda: scheduler.running == 0)
        assert time.monotonic() - started < 0.2 * 3  # a layer, and what the machine takes
    assert scheduler.statistics.cancelled == before + 1


def test_a_client_that_leaves_the_queue(model_path: Path) -> None:
    with serving(model_path, Limits(sequences=1)) as served:
        scheduler = served.scheduler
        with slow_layers(served, 0.01), asking(served, TEXT, prompt="a", max_tokens=2000, ignore_eos=True):
            until(lambda: scheduler.running == 1)
            with asking(served, TEXT, prompt="b"):
                until(lambda: scheduler.waiting == 1)
            until(lambda: scheduler.waiting == 0)
            assert scheduler.running == 1
        until(lambda: scheduler.running == 0)


def test_leaving_one_does_not_disturb_the_others(served: Served) -> None:
    settings: dict[str, Any] = {"model": "tiny", "max_tokens": 60, "seed": 3, "temperature": 1.0}
    alone = [served.post(TEXT, {**settings, "prompt": "p" * n})[1]["choices"][0]["text"] for n in range(1, 9)]
    with ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(served.post, TEXT, {**settings, "prompt": "p" * n}) for n in range(1, 9)]
        for _ in range(12):
            with asking(served, TEXT, prompt="q" * 900, stream=True):
                time.sleep(0.003)
        assert [future.result()[1]["choices"][0]["text"] for future in futures] == alone
    until(lambda: served.scheduler.running == 0)


def test_recurrent_state_of_answers_has_a_line_of_its_own(tmp_path: Path) -> None:
    with serving(write_chat_model(tmp_path / "hybrid", "qwen3_5")) as served:
        state = served.service.running.llm.memory["recurrent_state"]
        with slow_layers(served, 0.01), contextlib.ExitStack() as asked:
            for _ in range(3):
                asked.enter_context(asking(served, TEXT, prompt="a", max_tokens=2000, ignore_eos=True))
            until(lambda: served.scheduler.running == 3)
            ledger = {line["what"]: line["bytes"] for line in served.ask("GET", "/status")[1]["ledger"]}
        assert ledger["recurrent state of answers in the making"] == 3 * state > 0


def test_a_long_wait_is_kept_alive(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job, "STREAM_WAIT_S", 0.05)
    monkeypatch.setattr("edge_transformer.server.completion.STREAM_WAIT_S", 0.05)
    monkeypatch.setattr(job, "KEEP_ALIVE_S", 0.05)
    with slow_layers(served, 0.1):
        lines = served.events(TEXT, {"model": "tiny", "prompt": "x" * 100, "max_tokens": 1, "stream": True})
    assert lines[0] == ": keep-alive"
    assert lines[-1] == "data: [DONE]"
    assert delivery.KEEP_ALIVE_S <= 15


def test_a_fault_is_told_and_the_engine_opened_again(model_path: Path) -> None:
    opened: list[LLM] = []
    may_open = threading.Event()
    may_open.set()

    def open_model() -> LLM:
        if not may_open.is_set():
            raise GpuError("the GPU is away")
        opened.append(LLM(model_path, threads=1))
        return opened[-1]

    with serving(model_path, open_model=open_model) as served:
        client = served.client()
        settings: dict[str, Any] = {"model": "tiny", "prompt": "abc", "extra_body": {"ignore_eos": True}}
        before = client.completions.create(**settings, seed=1).choices[0].text
        stream = client.completions.create(**settings, max_tokens=2000, stream=True)
        next(iter(stream))
        may_open.clear()

        def fail(*arguments: object) -> None:
            raise GpuError("cuLaunchKernel failed: an illegal address")

        opened[0].engine.step = fail  # type: ignore[method-assign, assignment]
        with pytest.raises(openai.APIError, match="an illegal address"):
            for _ in stream:
                pass
        until(lambda: served.ask("GET", "/health")[0] == 503)
        until(lambda: "the GPU is away" in served.ask("GET", "/health")[1].get("reason", ""))
        status, answer = served.post(TEXT, {"model": "tiny", "prompt": "abc"})
        assert (status, answer["error"]["code"]) == (503, "engine_unavailable")
        assert served.ask("GET", "/v1/models")[0] == 200
        may_open.set()
        until(lambda: served.ask("GET", "/health")[0] == 200)
        assert client.completions.create(**settings, seed=1).choices[0].text == before
        assert len(opened) == 2


def test_a_fault_of_the_engine_that_nobody_has_foreseen(model_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with serving(model_path) as served:

        def fail(*arguments: object) -> None:
            raise ValueError("/srv/me/models: hello")

        served.service.running.llm.engine.step = fail  # type: ignore[method-assign, assignment]
        status, answer = served.post(TEXT, {"model": "tiny", "prompt": "hello"})
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "ValueError" in answer["error"]["message"]
        assert "/srv" not in str(answer)
        assert "hello" not in str(answer)
        until(lambda: served.service.reason is None and served.service.ready)
    failures = [record for record in caplog.records if "the engine failed" in record.message]
    assert len(failures) == 1
    assert failures[0].exc_info


@pytest.mark.parametrize(
    ("kind", "status", "code"), [(CapacityError, 503, "out_of_memory"), (MemoryError, 500, "engine_error")]
)
def test_an_engine_without_memory_takes_no_request_until_it_is_open_again(
    model_path: Path, kind: type[Exception], status: int, code: str
) -> None:
    fault = kind("KV cache: the system refused 4194304 bytes")
    may_open = threading.Event()
    may_open.set()

    def open_model() -> LLM:
        if not may_open.is_set():
            raise fault
        return LLM(model_path, threads=1)

    def fail(*arguments: object) -> None:
        raise fault

    with serving(model_path, open_model=open_model) as served:
        may_open.clear()
        served.service.running.llm.engine.step = fail  # type: ignore[method-assign, assignment]
        answered, answer = served.post(TEXT, {"model": "tiny", "prompt": "abc"})
        assert (answered, answer["error"]["code"]) == (status, code)
        reason = public_reason(fault)
        assert kind.__name__ in reason
        until(lambda: served.ask("GET", "/health") == (503, {"status": "restarting", "reason": reason}))
        answered, answer = served.post(TEXT, {"model": "tiny", "prompt": "abc"})
        assert (answered, answer["error"]["code"]) == (503, "engine_unavailable")
        assert reason in answer["error"]["message"]
        may_open.set()
        until(lambda: served.ask("GET", "/health")[0] == 200)
        assert served.post(TEXT, {"model": "tiny", "prompt": "abc", "max_tokens": 1})[0] == 200


def test_reasons_that_anybody_may_read_have_no_internals() -> None:
    assert public_reason(GpuError("the GPU is away")) == "GpuError: the GPU is away"
    assert "/srv" not in public_reason(OSError(2, "no such file", "/srv/me/model"))


@contextlib.contextmanager
def process(model_path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], Served]]:
    """`ete serve` as it is started by people."""
    program = "import sys\nfrom edge_transformer.cli.main import main\nsys.argv[0] = 'ete'\nmain()"
    command = [
        sys.executable,
        "-c",
        program,
        "serve",
        str(model_path),
        "--name",
        "tiny",
        "--port",
        "0",
        "--threads",
        "1",
    ]
    running = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert running.stderr is not None
    try:
        line = ""
        while "served at" not in line:
            line = running.stderr.readline()
            assert line, "it ended before it began"
        url = line.split()[-1]
        yield running, Served(url, int(url.rpartition(":")[2]), None)  # type: ignore[arg-type]
    finally:
        running.kill()
        running.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_answers_end(model_path: Path, number: signal.Signals) -> None:
    with process(model_path) as (running, served), ThreadPoolExecutor(1) as pool:
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 1500, "ignore_eos": True}
        answer = pool.submit(served.post, TEXT, body)
        until(lambda: b"ete_requests_running 1" in metrics_of(served))
        running.send_signal(number)
        assert answer.result()[1]["usage"]["completion_tokens"] == 1500
        log = running.communicate(timeout=20)[1].splitlines()
        assert running.returncode == 0
        assert [line.partition(",")[2][4:] for line in log] == [
            "1 answer has 30 seconds to end; Ctrl-C or SIGTERM again ends at once"
        ]


def test_connections_while_answers_end(model_path: Path) -> None:
    body = json.dumps({"model": "tiny", "prompt": "abc", "max_tokens": 1900, "ignore_eos": True}).encode()
    with process(model_path) as (running, served):
        idle, busy = (http.client.HTTPConnection("127.0.0.1", served.port, timeout=60) for _ in range(2))
        idle.request("GET", "/health")
        assert idle.getresponse().read() == b'{"status":"ok"}'
        busy.request("POST", TEXT, body, {"content-type": "application/json"})
        until(lambda: b"ete_requests_running 1" in metrics_of(served))
        running.send_signal(signal.SIGTERM)
        assert idle.sock.recv(1) == b""
        with pytest.raises(ConnectionRefusedError):
            served.ask("GET", "/health")
        assert running.poll() is None
        response = busy.getresponse()
        assert json.loads(response.read())["usage"]["completion_tokens"] == 1900
        assert response.headers["connection"] == "close"
        assert running.wait(20) == 0


def test_an_interrupt_before_the_first_request_closes_the_model(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[Path] = []
    close = LLM.close
    monkeypatch.setattr(LLM, "close", lambda self: (closed.append(self.path), close(self)))

    def interrupted(*arguments: object) -> None:
        raise KeyboardInterrupt

    for owner, name in ((run, "configuration"), (service, "Grammars")):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, interrupted)
            done = CliRunner().invoke(ete, ["serve", str(model_path), "--port", "0", "--threads", "1"])
        assert done.exit_code == 130
        assert closed == [model_path]
        closed.clear()


def test_more_connections_than_files_may_be_open(model_path: Path) -> None:
    """Those that are too many are closed at once, with one line in the log, and the server lives on."""
    with process(model_path) as (running, served):
        resource.prlimit(running.pid, resource.RLIMIT_NOFILE, (100, 100))
        with contextlib.ExitStack() as stack:
            raws = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(300)]
            for raw in raws:
                raw.settimeout(10)
                raw.connect(("127.0.0.1", served.port))
            assert raws[-1].recv(1) == b""
            assert len(os.listdir(f"/proc/{running.pid}/fd")) <= 75
            raws[0].sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert raws[0].recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: len(os.listdir(f"/proc/{running.pid}/fd")) < 50)
        assert served.post(TEXT, {"model": "tiny", "prompt": "abc", "max_tokens": 2})[0] == 200
        running.send_signal(signal.SIGTERM)
        log = running.communicate(timeout=20)[1].splitlines()
        assert [line.partition(" 75 files are open")[2][:35] for line in log] == ["; more connections are closed at on"]


@pytest.mark.parametrize("asked", [False, True])
def test_prompts_are_in_the_log_only_when_asked(model_path: Path, asked: bool) -> None:
    with process(model_path, "--log-requests", *(["--log-prompts"] if asked else [])) as (running, served):
        assert served.post(TEXT, {"model": "tiny", "prompt": "open-sesame", "max_tokens": 2})[0] == 200
        assert served.post(TEXT, {"model": "tiny", "prompt": "open-sesame" * 500})[0] == 400
        assert served.post(CHAT, {"model": "tiny", "messages": [{"role": "user", "content": "open-sesame"}], "n": 9})
        running.send_signal(signal.SIGTERM)
        log = running.communicate(timeout=20)[1]
    assert f"POST {TEXT} 200" in log
    assert ("open-sesame" in log) == asked


def test_a_second_signal_cuts(model_path: Path) -> None:
    with process(model_path, "--parallel", "1") as (running, served):
        body = {"prompt": "abc", "max_tokens": 2000, "ignore_eos": True}
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(asking(served, TEXT, **body))
            until(lambda: b"ete_requests_running 1" in metrics_of(served))
            running.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            running.send_signal(signal.SIGTERM)
            assert running.wait(10) == 0


def test_the_drain_has_an_end(model_path: Path) -> None:
    options = ("--parallel", "1", "--drain-seconds", "1")
    with process(model_path, *options) as (running, served), contextlib.ExitStack() as stack:
        for _ in range(30):
            stack.enter_context(asking(served, TEXT, prompt="abc", max_tokens=2000, ignore_eos=True))
        until(lambda: b"ete_requests_running 1" in metrics_of(served))
        running.send_signal(signal.SIGTERM)
        assert running.wait(15) == 0


def metrics_of(served: Served) -> bytes:
    with contextlib.closing(socket.create_connection(("127.0.0.1", served.port))) as raw:
        raw.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        return b"".join(iter(lambda: raw.recv(4096), b""))
