"""`ete serve`: the HTTP server."""

from __future__ import annotations

import logging
import math
import re
from contextlib import closing
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO

import click

from edge_transformer.cli.console import note, progress_bar, size
from edge_transformer.cli.expectation import available_memory, expectation
from edge_transformer.cli.ledger import ledger_of
from edge_transformer.cli.options import Size, engine_options, load_model

MAX_KEYS_BYTES = 1 << 20

_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s]+")


def _no_blank(context: click.Context, parameter: click.Parameter, value: Any) -> Any:
    """What an unset variable of a script makes of a key or an address must not open a server to everybody."""
    if any(not text.strip() for text in ([value] if isinstance(value, str) else value)):
        raise click.BadParameter("it is empty")
    return value


def _origins(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """As browsers write them."""
    origins = tuple(origin.lower() for origin in value)
    for origin in origins:
        if origin not in ("*", "null") and _ORIGIN.fullmatch(origin) is None:
            raise click.BadParameter(f"{origin!r} is no origin: write scheme, host and port, as https://example.org")
    return origins


def _not_zero(context: click.Context, parameter: click.Parameter, value: int | None) -> int | None:
    if value == 0:
        raise click.BadParameter("0 would refuse every request")
    return value


def _finite(context: click.Context, parameter: click.Parameter, value: float) -> float:
    if not math.isfinite(value):
        raise click.BadParameter(f"{value} is no number of seconds")
    return value


@click.command("serve", short_help="Serve a model over HTTP, as OpenAI's interface.")
@click.argument("model")
@click.option(
    "--host",
    metavar="ADDRESS",
    default="127.0.0.1",
    show_default=True,
    callback=_no_blank,
    help="Address to listen on.",
)
@click.option(
    "--port", metavar="N", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0 is a free one."
)
@click.option(
    "--name",
    metavar="NAME",
    help="The model's name for clients (default: MODEL; of a file or folder here, its last part).",
)
@click.option(
    "--parallel",
    metavar="N",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Answers made at once; more requests wait.",
)
@click.option(
    "--pass-tokens",
    metavar="N",
    type=click.IntRange(64),
    help="Prompt tokens in one pass while other answers are being made: fewer delay them less, more read prompts "
    "faster (default: 128 on the CPU, 512 on a GPU).",
)
@click.option(
    "--queue", metavar="N", type=click.IntRange(1), default=256, show_default=True, help="Requests that may wait."
)
@click.option(
    "--kv-budget",
    metavar="SIZE",
    type=Size(),
    callback=_not_zero,
    help="Memory for the KV caches of all answers together, such as 2GiB (default: what the GPU's plan has for them, "
    "or half of the memory that is free).",
)
@click.option(
    "--api-key",
    "api_keys",
    metavar="KEY",
    multiple=True,
    callback=_no_blank,
    envvar="ETE_API_KEY",
    help="Ask for this key; can be repeated (default: ETE_API_KEY, or nobody is asked).",
)
@click.option("--api-key-file", metavar="FILE", type=click.File("rb"), help="Keys, one a line.")
@click.option(
    "--cors-origin",
    "origins",
    metavar="ORIGIN",
    multiple=True,
    callback=_origins,
    help="Let web pages of this origin ask, such as https://example.org; can be repeated; * is all (default: none).",
)
@click.option(
    "--max-body",
    metavar="SIZE",
    type=Size(),
    callback=_not_zero,
    default=16 << 20,
    show_default="16MiB",
    help="Refuse larger requests.",
)
@click.option("--log-requests", is_flag=True, help="Write a line for each request: path, status, seconds.")
@click.option("--log-prompts", is_flag=True, help="Write the prompts too (default: nothing of them is ever written).")
@click.option(
    "--drain-seconds",
    metavar="S",
    type=click.FloatRange(1),
    callback=_finite,
    default=30.0,
    show_default=True,
    help="After SIGTERM: how long answers in the making may take to end.",
)
@engine_options
def command(
    model: str,
    host: str,
    port: int,
    name: str | None,
    parallel: int,
    pass_tokens: int | None,
    queue: int,
    kv_budget: int | None,
    api_keys: tuple[str, ...],
    api_key_file: BinaryIO | None,
    origins: tuple[str, ...],
    max_body: int,
    log_requests: bool,
    log_prompts: bool,
    drain_seconds: float,
    **options: Any,
) -> None:
    """Serve MODEL (a folder, a .gguf file, a hub id, or `demo`) over HTTP.

    Clients of OpenAI's interface use the address with /v1 at its end. SIGTERM or Ctrl-C ends the server after the
    answers in the making (exit code 0); a second one ends it at once. Ctrl-C while the model loads: exit code 130.
    """
    missing = [name for name in ("starlette", "uvicorn", "msgspec", "llguidance") if find_spec(name) is None]
    if missing:
        raise click.UsageError(f"{missing[0]} is not installed: pip install 'edge-transformer-engine[server]'")
    from edge_transformer.engine.request import Limits
    from edge_transformer.server.access import AccessSettings, hosts_of, read_keys
    from edge_transformer.server.app import AppSettings, make_app
    from edge_transformer.server.run import bind, serve
    from edge_transformer.server.service import Service

    def open_model() -> Any:
        with progress_bar() as progress:
            llm = load_model(model, options, progress, sequences=parallel, kv_bytes=kv_budget)
        if (placed := ledger_of(llm)) is not None:
            note(placed)
        if (expected := expectation(llm)) is not None:
            note(expected)
        return llm

    level = logging.INFO if log_requests or log_prompts else logging.WARNING
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.WARNING)
    logging.getLogger("edge_transformer.server").setLevel(level)
    keys = read_keys([*api_keys, "" if api_key_file is None else _text(api_key_file)])
    if api_key_file is not None and not keys:
        raise click.UsageError(f"There is no key in {api_key_file.name}.")
    access = AccessSettings(keys, origins, hosts_of(host))
    limits = Limits(parallel, pass_tokens or (512 if options["backend"] == "cuda" else 128), queue)
    budget, shortens = partial(_kv_budget, asked=kv_budget, answers=parallel), options["ctx"] is None
    known_as = name or _name_of(model)
    # An address that cannot be had is told before a model is loaded for it.
    with bind(host, port) as bound:
        if not keys and not access.hosts:
            note(f"Everybody who can reach {host} can use this server: --api-key asks for a key.")
        with closing(Service(open_model, known_as, limits, budget, shortens)) as service:
            app = make_app(service, AppSettings(access, max_body, log_prompts))
            serve(app, service, bound, drain_seconds, lambda address: note(f"{service.name} is served at {address}"))


def _name_of(model: str) -> str:
    """What clients call it: paths of this machine are nothing that they need to know."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _text(file: BinaryIO) -> str:
    """Of a file of keys."""
    data = file.read(MAX_KEYS_BYTES + 1)
    if len(data) > MAX_KEYS_BYTES:
        raise click.UsageError(f"{file.name} is longer than {MAX_KEYS_BYTES >> 10} KiB: that is no file of keys.")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"The keys in {file.name} are not UTF-8: byte {error.start} is 0x{data[error.start]:02x}."
        ) from error


def _kv_budget(llm: Any, asked: int | None, answers: int) -> int:
    """Bytes for KV caches: what was asked; else what the GPU's plan has for them, or half of the memory there is. Says
    what else grows with them.
    """
    from edge_transformer.engine.scheduler import STATE_SHARE

    planned = dict(llm.plan.ledger)["KV cache"] if llm.plan is not None and llm.plan.kv == "gpu" else None
    budget: int = planned or asked or available_memory() // 2
    note(f"KV caches: up to {size(budget)}{'' if planned is None else ' on the GPU'}")
    if state := llm.memory["recurrent_state"]:
        where = "on the GPU" if llm.plan is not None else "in host memory"
        checkpoints = 2 * (budget // STATE_SHARE)  # of answers in the making, and of kept prompts
        note(
            f"recurrent state: {size(answers * state)} {where} for {answers} answers, and checkpoints of up to "
            f"{size(checkpoints)} in host memory"
        )
    return budget
