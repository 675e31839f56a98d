"""Options that several subcommands share, and what they are turned into."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from edge_transformer import LLM, GenerationConfig
    from edge_transformer.hub import Progress

Command = TypeVar("Command", bound=Callable[..., Any])

# Names are the fields of GenerationConfig, with dashes.
_GENERATION: dict[str, dict[str, Any]] = {
    "max-tokens": {
        "metavar": "N",
        "type": click.IntRange(1),
        "default": 512,
        "show_default": True,
        "help": "End the answer after this many tokens.",
    },
    "temperature": {
        "metavar": "T",
        "type": click.FloatRange(0),
        "default": 0.0,
        "show_default": True,
        "help": "Randomness; 0 always takes the likeliest token.",
    },
    "top-k": {
        "metavar": "K",
        "type": click.IntRange(0),
        "default": 0,
        "help": "Draw from this many likeliest tokens (0: off).",
    },
    "top-p": {
        "metavar": "P",
        "type": click.FloatRange(0, 1, min_open=True),
        "default": 1.0,
        "help": "Draw from the likeliest tokens that have this probability together (1: off).",
    },
    "min-p": {
        "metavar": "P",
        "type": click.FloatRange(0, 1),
        "default": 0.0,
        "help": "Draw from tokens that are at least this fraction as likely as the likeliest (0: off).",
    },
    "repetition-penalty": {
        "metavar": "X",
        "type": click.FloatRange(0, min_open=True),
        "default": 1.0,
        "help": "Make tokens seen in prompt or answer less likely by this factor (1: off).",
    },
    "presence-penalty": {
        "metavar": "X",
        "type": float,
        "default": 0.0,
        "help": "Subtract this from the logits of tokens seen in the answer (0: off).",
    },
    "frequency-penalty": {
        "metavar": "X",
        "type": float,
        "default": 0.0,
        "help": "Subtract this from a token's logit for each time it is in the answer (0: off).",
    },
    "seed": {
        "metavar": "N",
        "type": click.IntRange(0, 2**64 - 1),
        "help": "Same seed, same text (default: a new one each time).",
    },
    "stop": {"multiple": True, "metavar": "TEXT", "help": "End before TEXT appears in the answer; can be repeated."},
}

# Names are the parameters of LLM, with dashes, but for --ctx.
_ENGINE: dict[str, dict[str, Any]] = {
    "threads": {
        "metavar": "N",
        "type": click.IntRange(1),
        "help": "CPU threads (default: every core this process may use).",
    },
    "ctx": {
        "metavar": "N",
        "type": click.IntRange(1),
        "help": "Tokens of context, for prompt and answer together (default: the model's limit).",
    },
    "kv-dtype": {
        "type": click.Choice(["bf16", "f32"]),
        "default": "bf16",
        "show_default": True,
        "help": "Numbers in the KV cache; f32 is exact and takes twice the memory.",
    },
    "backend": {
        "type": click.Choice(["cpu", "reference"]),
        "default": "cpu",
        "show_default": True,
        "help": "What computes; reference is numpy: slow, for checking.",
    },
    "offline": {"is_flag": True, "help": "Use only what is on this machine."},
}


def generation_options(command: Command) -> Command:
    """Add the options that `generation_config` takes."""
    return _add(_GENERATION, command)


def engine_options(command: Command) -> Command:
    """Add the options that `load_model` takes."""
    return _add(_ENGINE, command)


def generation_config(options: dict[str, Any], **more: Any) -> GenerationConfig:
    """What the generation options among `options` ask for. Raises UsageError for a nan, which click lets through."""
    from edge_transformer import GenerationConfig

    fields = {name: options[name] for name in (option.replace("-", "_") for option in _GENERATION)}
    return GenerationConfig(**fields, **more)


def load_model(model: str, options: dict[str, Any], progress: Progress) -> LLM:
    """The model, loaded as the engine options among `options` ask."""
    from edge_transformer import LLM

    return LLM(
        model,
        context_length=options["ctx"],
        threads=options["threads"],
        kv_dtype=options["kv_dtype"],
        backend=options["backend"],
        offline=options["offline"],
        progress=progress,
    )


def _add(options: dict[str, dict[str, Any]], command: Command) -> Command:
    for name, settings in reversed(options.items()):
        command = click.option(f"--{name}", **settings)(command)
    return command
