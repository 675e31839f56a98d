"""A tiny chat model of single bytes, and a scheduler over it."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edge_transformer import LLM, GenerationConfig
from edge_transformer.engine.answer import Piece
from edge_transformer.engine.request import Limits, Request
from edge_transformer.engine.scheduler import Scheduler
from edge_transformer.server.app import AppSettings, make_app
from edge_transformer.server.run import BACKLOG, bind, configuration
from edge_transformer.server.service import Service
from tiny.models import MODELS, TinyModel
from tiny.weights import make_weights
from tiny.write import write_hf

VOCABULARY = 300
SPECIAL = ("<|im_start|>", "<|im_end|>")
MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_chat_model(folder: Path, family: str = "llama", template: str = TEMPLATE, context: int = 2048) -> Path:
    """A tiny model with a tokenizer of single bytes, a few tokens with names, and a chat template."""
    config = MODELS[family].config | {"vocab_size": VOCABULARY, "max_position_embeddings": context, "eos_token_id": 257}
    path = write_hf(folder, config, make_weights(TinyModel(family, config, {})))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in MARKS])
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"chat_template": template, "eos_token": "<|im_end|>"}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path


def make_scheduler(llm: LLM, limits: Limits | None = None, kv_budget: int = 1 << 30) -> Scheduler:
    return Scheduler(llm.engine, llm.tokenizer, llm.end_token_ids, llm.context_length, limits or Limits(), kv_budget)


@dataclass
class Collected:
    """A Listener that keeps what it hears. `done` is set when every choice has ended, or the request failed."""

    choices: int = 1
    pieces: list[list[Piece]] = field(default_factory=list)
    done_tokens: list[int] = field(default_factory=list)
    cached: int = 0
    error: Exception | None = None
    done: threading.Event = field(default_factory=threading.Event)
    first: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.pieces = [[] for _ in range(self.choices)]

    def progress(self, done: int, cached: int, total: int) -> None:
        self.done_tokens.append(done)
        self.cached = cached

    def piece(self, choice: int, piece: Piece) -> None:
        assert not self.done.is_set()
        self.pieces[choice].append(piece)
        self.first.set()
        if all(pieces and pieces[-1].finish_reason for pieces in self.pieces):
            self.done.set()

    def failed(self, error: Exception) -> None:
        self.error = error
        self.done.set()

    def ids(self, choice: int = 0) -> list[int]:
        return [piece.token for piece in self.pieces[choice]]

    def text(self, choice: int = 0) -> str:
        return "".join(piece.text for piece in self.pieces[choice])

    def wait(self, timeout: float = 60) -> Collected:
        assert self.done.wait(timeout), "the request does not end"
        return self


def submit(
    scheduler: Scheduler, prompt: Sequence[int], config: GenerationConfig, seeds: Sequence[int] = (0,)
) -> tuple[Request, Collected]:
    heard = Collected(len(seeds))
    request = Request(list(prompt), config, seeds, heard)
    scheduler.submit(request)
    return request, heard


@dataclass
class Served:
    """A server that runs. `url` without a slash at its end."""

    url: str
    port: int
    service: Service

    @property
    def scheduler(self) -> Scheduler:
        return self.service.running.scheduler

    def client(self, **settings: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, **settings)

    def post(self, path: str, body: object, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of an answer. A body of bytes is sent as it is."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.ask("POST", path, data, **headers)

    def ask(self, method: str, path: str, data: bytes | None = None, **headers: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request(method, path, data, {"content-type": "application/json", **headers})
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def events(self, path: str, body: object) -> list[str]:
        """Lines of a stream of events, blank ones left out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", path, json.dumps(body).encode(), {"content-type": "application/json"})
            response = connection.getresponse()
            assert response.status == 200, response.read()
            assert response.headers["content-type"].startswith("text/event-stream")
            return [line for line in response.read().decode().split("\n") if line]
        finally:
            connection.close()


class _ThreadServer(uvicorn.Server):
    """Signals belong to the tests."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@contextlib.contextmanager
def serving(
    path: Path,
    limits: Limits | None = None,
    settings: AppSettings | None = None,
    kv_budget: int = 1 << 30,
    open_model: Callable[[], LLM] | None = None,
) -> Iterator[Served]:
    """A server of the model at `path`, named "tiny", on a free port."""
    opening = open_model or (lambda: LLM(path, threads=1))
    service = Service(opening, "tiny", limits or Limits(), lambda llm: kv_budget)
    listening = bind("127.0.0.1", 0)
    listening.listen(BACKLOG)
    server = _ThreadServer(configuration(make_app(service, settings or AppSettings())))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listening])), daemon=True)
    thread.start()
    port = listening.getsockname()[1]
    try:
        yield Served(f"http://127.0.0.1:{port}", port, service)
    finally:
        service.stop()
        server.should_exit = True
        thread.join(20)
        assert not thread.is_alive(), "the server does not end"
        service.close()
        listening.close()
