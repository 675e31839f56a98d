"""Against transformers in fp32 on the same weights, where PyTorch and transformers are installed (the group golden).

The only file of the package that imports them, and only when the link runs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path
from typing import Any

from edge_transformer.hub.progress import Progress
from edge_transformer.memory import available_memory
from edge_transformer.verify.feed import Prompt, Way, feed
from edge_transformer.verify.link import Link, Outcome, not_run
from edge_transformer.verify.material import Material
from edge_transformer.verify.record import Record, same_to_rounding
from edge_transformer.verify.subject import Subject

NAME = "CPU against transformers"
PACKAGES = ("torch", "transformers")


class CannotLoadError(Exception):
    """transformers does not load this model, or not here; says why."""


def transformers_link(subject: Subject, given: Material) -> Link:
    """The whole model on the CPU against transformers."""
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"no {' and '.join(missing)} (pip install {' '.join(missing)}; in the repository: --group golden)"
        return Link(NAME, lambda _: not_run(reason))
    return Link(NAME, lambda progress: _against_transformers(subject, given.short, progress))


def _against_transformers(subject: Subject, prompt: Prompt, progress: Progress) -> Outcome:
    needed, available = 5 * subject.all_parameters, available_memory()
    if needed > available:
        return not_run(f"the model in fp32 takes {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free")
    try:
        truth = _transformers_record(subject, prompt.tokens, progress)
    except CannotLoadError as error:
        return not_run(str(error))
    with subject.on_cpu() as engine:
        return same_to_rounding([truth], feed(engine, [prompt], Way(), progress, "the CPU"))


def _transformers_record(subject: Subject, tokens: list[int], progress: Progress) -> Record:
    """One forward pass in fp32, attention in its plain form. Raises CannotLoadError."""
    progress("importing transformers", 0, 0)
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(subject.threads)
    progress("loading with transformers", 0, 0)
    with contextlib.redirect_stderr(io.StringIO()):  # its own progress bars
        model = _load(subject.parts.checkpoint.path, subject.parts.checkpoint.container)
    progress("transformers", 0, 0)
    with torch.no_grad():
        logits = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    record = Record(tokens, subject.spec.config.vocab_size)
    for position, row in enumerate(logits):
        record.add(position, row)
    return record


def _load(path: Path, container: str) -> Any:
    """The model in fp32. Raises CannotLoadError with transformers' own words."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        if container == "gguf":
            return _load_gguf(path)
        config = AutoConfig.from_pretrained(path)
        return AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype="float32", attn_implementation="eager", local_files_only=True
        ).eval()
    except (ValueError, KeyError, OSError, ImportError, NotImplementedError, RuntimeError) as error:
        raise CannotLoadError(f"transformers does not load it: {str(error).strip().splitlines()[0]}") from error


def _load_gguf(path: Path) -> Any:
    """A GGUF file without the package accelerate, which `from_pretrained` would want."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name, local_files_only=True)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype="float32", attn_implementation="eager")
    weights = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    found = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    lost = [name for name in found.missing_keys if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if lost or found.unexpected_keys:
        raise ValueError(f"tensors missing: {lost}, left over: {found.unexpected_keys}")
    return model.eval()
