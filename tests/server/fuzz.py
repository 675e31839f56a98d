"""Aborts × prompts being read × waiting requests, at random: python tests/server/fuzz.py [--minutes 30] [--seed N]

Clients ask, stream, wait, and hang up at any time, over a server whose memory for KV caches is short, so that answers
lose theirs and get it back. Every answer that ends must be the one its request gets alone; nothing may hang; the
server's memory must be flat. Continuous integration runs two minutes with fixed seeds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import socket
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from edge_transformer import LLM, GenerationConfig
from edge_transformer.engine.request import Limits
from edge_transformer.server.metrics import resident_bytes
from server.tiny_server import Served, serving, write_chat_model

FAMILIES = ("llama", "gemma3", "qwen3_5")
CLIENTS = 12
TILES = 4
"""Tiles of every layer that the budget holds: as many as one whole context takes."""

REQUESTS = 48
SLOWEST_S = 60.0
ROUND_S = 10.0
GROWTH_BYTES = 24 << 20


@dataclass(frozen=True)
class Asked:
    """A request and the texts of its choices when it is answered alone."""

    body: dict[str, Any]
    texts: list[str]


def make_requests(llm: LLM, draw: random.Random) -> list[Asked]:
    """Prompts that begin alike in part, of all lengths; greedy and drawn; some with stop strings."""
    stems = ["".join(draw.choices("abcdefgh ", k=1400)) for _ in range(4)]
    asked = []
    for number in range(REQUESTS):
        prompt = draw.choice(stems)[: draw.choice([1, 5, 63, 64, 65, 200, 500, 520, 900, 1300])] + f"<{number % 7}>"
        settings: dict[str, Any] = {
            "max_tokens": draw.choice([1, 2, 8, 30, 60]),
            "temperature": draw.choice([0.0, 1.0]),
            "seed": number,
            "ignore_eos": draw.random() < 0.5,
        }
        stop = draw.choice([[], ["a"], ["e", "th"]])
        config = GenerationConfig(**settings, stop=tuple(stop))
        text = llm.generate(prompt, config, raw=True).text
        asked.append(Asked({"model": "tiny", "prompt": prompt, **settings, "stop": stop or None}, [text]))
    return asked


class Fuzz:
    """Clients against one server, until the time is over or something is wrong."""

    def __init__(self, served: Served, requests: list[Asked], seed: int, ends: float) -> None:
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._served = served
        self._requests = requests
        self._ends = ends
        self._threads = [
            threading.Thread(target=self._client, args=(random.Random(f"{seed} {number}"),), daemon=True)
            for number in range(CLIENTS)
        ]

    def run(self) -> None:
        for thread in self._threads:
            thread.start()
        for thread in self._threads:
            thread.join(max(0.0, self._ends - time.monotonic()) + 2 * SLOWEST_S)
            if thread.is_alive():
                self.wrong.append("a client hangs")

    def _client(self, draw: random.Random) -> None:
        while time.monotonic() < self._ends and not self.wrong:
            asked = draw.choice(self._requests)
            stream = draw.random() < 0.5
            patience = draw.choice([0.0, 0.001, 0.01, 0.05, 0.2]) if draw.random() < 0.5 else None
            try:
                self._ask(asked, stream, patience, draw)
            except (OSError, ValueError, KeyError, AssertionError) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
            time.sleep(draw.choice([0, 0, 0.002, 0.02]))

    def _ask(self, asked: Asked, stream: bool, patience: float | None, draw: random.Random) -> None:
        body = json.dumps({**asked.body, "stream": stream}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        with contextlib.closing(socket.create_connection(("127.0.0.1", self._served.port))) as raw:
            raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if patience is not None:
                self.counts["aborted"] += 1
                if draw.random() < 0.5:
                    raw.settimeout(max(patience, 0.001))
                    with contextlib.suppress(TimeoutError):
                        raw.recv(draw.choice([1, 100, 10_000]))
                else:
                    time.sleep(patience)
                return
            raw.settimeout(SLOWEST_S)
            answer = b"".join(iter(lambda: raw.recv(65536), b""))
        status, _, content = answer.partition(b"\r\n\r\n")
        if b" 429 " in status.split(b"\r\n")[0]:
            self.counts["refused"] += 1
            return
        assert b" 200 " in status.split(b"\r\n")[0], answer[:300]
        text = _streamed(_unchunked(content)) if stream else json.loads(content)["choices"][0]["text"]
        assert text == asked.texts[0], f"{asked.body}: {text!r} instead of {asked.texts[0]!r}"
        self.counts["answered"] += 1


def _unchunked(content: bytes) -> bytes:
    """The body of a chunked answer."""
    parts = []
    while content:
        size, _, rest = content.partition(b"\r\n")
        count = int(size, 16)
        parts.append(rest[:count])
        content = rest[count + 2 :]
        if count == 0:
            return b"".join(parts)
    raise ValueError("the stream was cut")


def _streamed(content: bytes) -> str:
    """The text that a stream's chunks add up to."""
    lines = [line for line in content.decode().split("\n") if line.startswith("data: ")]
    assert lines[-1] == "data: [DONE]", lines[-1]
    chunks = [json.loads(line[6:]) for line in lines[:-1]]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks].count(None) == len(chunks) - 1
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def run(family: str, seed: int, seconds: float, report: Any = print) -> None:
    """Raises AssertionError with what is wrong."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        path = write_chat_model(Path(folder) / "tiny", family)
        with LLM(path, threads=1) as llm:
            requests = make_requests(llm, draw)
            budget = TILES * sum(layer.tile_bytes for layer in llm.engine.state_shape.layers)
        limits = Limits(sequences=5, pass_tokens=64, queue=8)
        with serving(path, limits, kv_budget=budget) as served:
            scheduler = served.scheduler
            ends = time.monotonic() + seconds
            total: Counter[str] = Counter()
            warm = 0
            while True:
                fuzz = Fuzz(served, requests, draw.randrange(1 << 32), min(ends, time.monotonic() + ROUND_S))
                fuzz.run()
                total += fuzz.counts
                assert not fuzz.wrong, fuzz.wrong[0]
                quiet = time.monotonic() + SLOWEST_S
                while scheduler.running or scheduler.waiting:
                    assert time.monotonic() < quiet, "requests are left that nobody waits for"
                    time.sleep(0.01)
                assert scheduler.failure is None
                assert scheduler.memory.peak_bytes <= budget
                resident = resident_bytes()
                warm = warm or resident
                assert resident <= warm + GROWTH_BYTES, f"memory has grown from {warm} to {resident} bytes"
                if time.monotonic() >= ends:
                    break
            counts = scheduler.statistics
            report(
                f"{family}, seed {seed}: {dict(total)}, {counts.preemptions} lost their memory, "
                f"{counts.passes_given_up} passes given up, {counts.cached_tokens} prompt tokens found, "
                f"memory {warm / 2**20:.0f} -> {resident / 2**20:.0f} MiB"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    for number, family in enumerate(FAMILIES):
        run(family, options.seed + number, 60 * options.minutes / len(FAMILIES))


if __name__ == "__main__":
    main()
