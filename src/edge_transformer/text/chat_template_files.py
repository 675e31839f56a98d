"""Where a model's chat templates may stand, in order of precedence (that of transformers)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from edge_transformer.errors import FormatError, TextError
from edge_transformer.formats.json_file import read_bounded
from edge_transformer.text.chat_template import MAX_TEMPLATE_CHARS, ChatTemplate
from edge_transformer.text.metadata import read_json_object, read_string

_GGUF_KEY = "tokenizer.chat_template"


def gguf_chat_template(metadata: Mapping[str, object], named_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Templates of a GGUF file: tokenizer.chat_template ("default") and tokenizer.chat_template.NAME; None without
    any.
    """
    templates = {}
    for key in metadata:
        if key == _GGUF_KEY or key.startswith(_GGUF_KEY + "."):
            source = read_string(metadata, key)
            if source is not None:
                templates[key[len(_GGUF_KEY) + 1 :] or "default"] = source
    return ChatTemplate(templates, named_tokens) if templates else None


def huggingface_chat_template(folder: Path, named_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """Templates of a model folder, None without any.

    chat_template.jinja and additional_chat_templates/NAME.jinja go before "chat_template" in tokenizer_config.json (a
    string, or a list of {"name", "template"}), and that before chat_template.json, where older multimodal models keep
    theirs.
    """
    templates = _jinja_files(folder)
    for name in ("tokenizer_config.json", "chat_template.json"):
        if not templates:
            value = read_json_object(folder / name).get("chat_template")
            templates = _named_templates(value, f"chat_template of {folder / name}")
    return ChatTemplate(templates, named_tokens) if templates else None


def _jinja_files(folder: Path) -> dict[str, str]:
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (main := folder / "chat_template.jinja").is_file():
        files["default"] = main
    return {name: _read_template(path) for name, path in files.items()}


def _read_template(path: Path) -> str:
    try:
        source = read_bounded(path, 4 * MAX_TEMPLATE_CHARS).decode("utf-8")
    except (FormatError, UnicodeDecodeError) as error:
        raise TextError(f"the chat template {path} cannot be read: {error}") from error
    return source.replace("\r\n", "\n").replace("\r", "\n")


def _named_templates(value: object, what: str) -> dict[str, str]:
    if value is None:
        return {}
    if isinstance(value, str):
        return {"default": value}
    entries = (
        value
        if isinstance(value, list)
        else [{"name": k, "template": v} for k, v in value.items()]
        if isinstance(value, dict)
        else None
    )
    if entries is None:
        raise TextError(f"{what} must be a string or a list of named templates, got {type(value).__name__}")
    templates = {}
    for entry in entries:
        name, source = (entry.get("name"), entry.get("template")) if isinstance(entry, dict) else (None, None)
        if not isinstance(name, str) or not isinstance(source, str):
            raise TextError(f"{what}: each named template needs a name and a template, got {entry!r:.80}")
        templates[name] = source
    return templates
