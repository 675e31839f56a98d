"""Which files of a repository make one model: by names alone, so that it is decided before a byte is loaded."""

from __future__ import annotations

import re
from collections.abc import Collection

from edge_transformer.errors import ModelNotFoundError, UnsupportedModelError
from edge_transformer.formats.file_names import (
    INDEX_FILE,
    PICKLED_SUFFIXES,
    SINGLE_FILE,
    gguf_part_names,
    split_name,
)

# Beside weights: what the readers look at. All of it is small and is fetched first, so that weights are never alone.
_SIDE_FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    INDEX_FILE,
}
_NAMED_TEMPLATE = re.compile(r"additional_chat_templates/[^/]+\.jinja")


def side_files(names: Collection[str]) -> list[str]:
    """The configuration, tokenizer and template files of a safetensors model."""
    return sorted(name for name in names if name in _SIDE_FILES or _NAMED_TEMPLATE.fullmatch(name))


def has_safetensors(names: Collection[str]) -> bool:
    return any(name.endswith(".safetensors") and "/" not in name for name in names)


def single_weights_file(names: Collection[str], where: str) -> str:
    """The weights file of a safetensors model without an index."""
    found = sorted(name for name in names if name.endswith(".safetensors") and "/" not in name)
    if SINGLE_FILE in found:
        return SINGLE_FILE
    if len(found) == 1:
        return found[0]
    raise ModelNotFoundError(
        f"{where} has no {INDEX_FILE} and several weights files, so the model is not known: {', '.join(found)}"
    )


def check_tokenizer(names: Collection[str], where: str) -> None:
    """Refuse a repository whose tokenizer is not read, before its weights are loaded."""
    if "tokenizer.json" not in names:
        raise UnsupportedModelError(
            f"{where} has no tokenizer.json (a lone tokenizer.model or vocab.json is not read); save it with "
            "`AutoTokenizer.from_pretrained(...).save_pretrained(...)` of transformers, or use a GGUF of the same model"
        )


def gguf_groups(names: Collection[str]) -> dict[str, list[str]]:
    """GGUF models by the name that selects them: the file itself, or the first part of a split one, to all files of it.

    Projectors of vision models (mmproj) are no text models and are left out.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(names):
        if not name.endswith(".gguf") or name.rpartition("/")[2].startswith("mmproj"):
            continue
        part = split_name(name)
        if part is None:
            groups[name] = [name]
        elif part[1] == 1:
            groups[name] = gguf_part_names(part[0], part[2])
    return groups


def choose_gguf(names: Collection[str], selector: str | None, where: str) -> list[str]:
    """The files of the GGUF model that `selector` (a file name, or a format such as Q4_K_M) names; None: the only one.

    Raises ModelNotFoundError that lists what there is when none or several fit.
    """
    groups = gguf_groups(names)
    if not groups:
        raise _nothing_usable(names, where)
    fitting = [name for name in groups if selector is None or _fits(name, selector)]
    if len(fitting) == 1:
        return groups[fitting[0]]
    listed = "".join(f"\n  {name}" for name in (fitting or groups))
    wanted = f"fit {selector!r}" if selector is not None else "are there"
    raise ModelNotFoundError(
        f"{where}: {len(fitting)} GGUF models {wanted}; name one as {where}:FILE or {where}:FORMAT, out of{listed}"
    )


def _fits(name: str, selector: str) -> bool:
    if selector.endswith(".gguf"):
        return name == selector
    part = split_name(name)
    stem = (name.removesuffix(".gguf") if part is None else part[0]).rpartition("/")[2]
    return re.search(rf"(^|[-.]){re.escape(selector)}$", stem, re.IGNORECASE) is not None


def _nothing_usable(names: Collection[str], where: str) -> ModelNotFoundError | UnsupportedModelError:
    if pickled := sorted(name for name in names if name.endswith(PICKLED_SUFFIXES)):
        return UnsupportedModelError(
            f"{where} has its weights as pickled files only ({', '.join(pickled[:3])}), which can run code when they "
            "are read and are never loaded; use a repository with .safetensors or .gguf files, or convert it with "
            "transformers' save_pretrained"
        )
    return ModelNotFoundError(f"{where} has neither .safetensors nor .gguf files; {len(names)} other files are there")
