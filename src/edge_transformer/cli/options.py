"""Options that several subcommands share, and what they are turned into."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import click

from edge_transformer.cli.console import note

if TYPE_CHECKING:
    from edge_transformer import LLM, GenerationConfig, GpuSettings
    from edge_transformer.cuda.timeline import Timeline
    from edge_transformer.hub import Progress

# The base class is generic for type checkers only, in the click versions that are supported.
if TYPE_CHECKING:
    _SizeType = click.ParamType[int]
    _CapabilityType = click.ParamType[tuple[int, int]]
    _PromptTextType = click.ParamType[str]
else:
    _SizeType = _CapabilityType = _PromptTextType = click.ParamType

Command = TypeVar("Command", bound=Callable[..., Any])


class PromptText(_PromptTextType):
    """A text for the model: UTF-8 as it was typed, whatever the locale says. Other bytes are refused, as in a file."""

    name = "text"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        data = os.fsencode(value)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            self.fail(f"this text is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}.", param, ctx)


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
    "stop": {
        "multiple": True,
        "metavar": "TEXT",
        "type": PromptText(),
        "help": "End before TEXT appears in the answer; can be repeated.",
    },
}


class Size(_SizeType):
    """A number of bytes: 512MiB, 3.5GB, 400000000."""

    name = "size"
    units: ClassVar[dict[str, int]] = {
        "": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30,
        "K": 2**10, "M": 2**20, "G": 2**30,
    }  # fmt: skip

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"([0-9]{1,12}(?:\.[0-9]{1,9})?) ?([a-zA-Z]*)", str(value))
        if match is None or match[2].upper() not in self.units:
            self.fail(f"{value!r} is no size; write it like 512MiB, 3.5GB or a number of bytes.", param, ctx)
        return int(float(match[1]) * self.units[match[2].upper()])


class Capability(_CapabilityType):
    """A compute capability: 7.5."""

    name = "capability"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        match = re.fullmatch(r"([0-9]{1,2})\.([0-9])", str(value))
        if match is None:
            self.fail(f"{value!r} is no compute capability; write it like 7.5.", param, ctx)
        return int(match[1]), int(match[2])


_GPU_OPTIONS = {
    "device": "device",
    "vram": "vram_bytes",
    "resident_layers": "resident_layers",
    "slots": "slots",
    "kv_offload": "kv_offload",
    "lm_head": "lm_head",
    "fast_prefill": "fast_prefill",
    "gpu_arch": "force_capability",
}
"""Option to field of GpuSettings."""

# Names are the parameters of LLM, with dashes, but for --ctx.
_ENGINE: dict[str, dict[str, Any]] = {
    "threads": {
        "metavar": "N",
        "type": click.IntRange(1),
        "help": "CPU threads (default: ETE_THREADS, or every core this process may use).",
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
        "type": click.Choice(["cpu", "cuda", "reference"]),
        "default": "cpu",
        "show_default": True,
        "help": "What computes; cuda is an NVIDIA GPU, reference is numpy: slow, for checking.",
    },
    "device": {"metavar": "N", "type": click.IntRange(0), "help": "With cuda: which GPU (default: 0)."},
    "vram": {
        "metavar": "SIZE",
        "type": Size(),
        "help": "With cuda: never take more GPU memory for weights and caches than this, such as 512MiB or 3.5GB "
        "(default: what is free).",
    },
    "resident-layers": {
        "metavar": "N",
        "type": click.IntRange(-1),
        "help": "With cuda: layers whose weights stay on the GPU, the others are streamed; -1 is all (default: as many "
        "as fit).",
    },
    "slots": {
        "metavar": "N",
        "type": click.IntRange(2),
        "help": "With cuda: buffers for streamed layers (default: 2).",
    },
    "kv-offload/--no-kv-offload": {
        "default": None,
        "help": "With cuda: keep the KV cache in host memory and stream it (default: where it does not fit).",
    },
    "lm-head": {
        "type": click.Choice(["gpu", "streamed", "split", "cpu"]),
        "help": "With cuda: where the output projection is computed: resident on the GPU, streamed to it, split "
        "between that and the CPU, or on the CPU (default: on the GPU where it fits, else where it is fastest).",
    },
    "fast-prefill": {
        "is_flag": True,
        "help": "With cuda: round the activations of prompts to bf16 (about 1e-3 of error instead of 1e-6).",
    },
    "gpu-arch": {
        "metavar": "MAJOR.MINOR",
        "type": Capability(),
        "help": "With cuda: take the path of an older GPU, such as 7.5; for checking.",
    },
    "offline": {"is_flag": True, "help": "Use only what is on this machine."},
}


def generation_options(command: Command) -> Command:
    """Add the options that `generation_config` takes."""
    return _add(_GENERATION, command)


def engine_options(command: Command) -> Command:
    """Add the options that `load_model` takes."""
    return _add(_ENGINE, command)


def trace_options(command: Command) -> Command:
    """Add both, as a trace needs them: few tokens, and always a GPU."""
    few = _GENERATION | {"max-tokens": _GENERATION["max-tokens"] | {"default": 32}}
    return _add(few | {name: settings for name, settings in _ENGINE.items() if name != "backend"}, command)


def generation_config(options: dict[str, Any], **more: Any) -> GenerationConfig:
    """What the generation options among `options` ask for. Raises UsageError for a nan, which click lets through."""
    from edge_transformer import GenerationConfig

    fields = {name: options[name] for name in (option.replace("-", "_") for option in _GENERATION)}
    return GenerationConfig(**fields, **more)


def load_model(
    model: str,
    options: dict[str, Any],
    progress: Progress,
    timeline: Timeline | None = None,
    sequences: int | None = None,
    kv_bytes: int | None = None,
) -> LLM:
    """The model, loaded as the engine options among `options` ask. timeline: records what a GPU does. sequences: that
    share a pass on a GPU. kv_bytes: of a KV cache that is resident there.
    """
    from edge_transformer import LLM
    from edge_transformer.cpu.threads import usable_processors

    processors = usable_processors()
    if options["threads"] is not None and options["threads"] > processors:
        note(f"--threads {options['threads']}: this process may use {processors} processors; more threads are slower")
    return LLM(
        model,
        context_length=options["ctx"],
        threads=options["threads"],
        kv_dtype=options["kv_dtype"],
        backend=options["backend"],
        gpu=_gpu_settings(options, timeline, sequences or 1, kv_bytes),
        offline=options["offline"],
        progress=progress,
    )


def _gpu_settings(
    options: dict[str, Any], timeline: Timeline | None, sequences: int, kv_bytes: int | None
) -> GpuSettings | None:
    """What the options of a GPU ask for, None for another backend. Raises UsageError for an option without a GPU."""
    given = {name: options[name] for name in _GPU_OPTIONS if options[name] is not None}
    if not options["fast_prefill"]:  # a flag that was not given
        del given["fast_prefill"]
    if options["backend"] != "cuda":
        if given:
            option = next(iter(given))
            name = ("no-" if given[option] is False else "") + option.replace("_", "-")
            raise click.UsageError(f"--{name} needs --backend cuda.")
        return None
    from edge_transformer import GpuSettings

    fields = {_GPU_OPTIONS[name]: value for name, value in given.items()}
    return GpuSettings(**fields, timeline=timeline, sequences=sequences, kv_bytes=kv_bytes)


def _add(options: dict[str, dict[str, Any]], command: Command) -> Command:
    for name, settings in reversed(options.items()):
        command = click.option(f"--{name}", **settings)(command)
    return command
