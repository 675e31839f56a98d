"""All that concerns text of a model, from its files."""

from __future__ import annotations

from typing import NamedTuple

from edge_transformer.formats.checkpoint import Checkpoint
from edge_transformer.text.chat_template import ChatTemplate
from edge_transformer.text.chat_template_files import gguf_chat_template, huggingface_chat_template
from edge_transformer.text.end_tokens import gguf_end_token_ids, huggingface_end_token_ids
from edge_transformer.text.gguf_tokenizer import gguf_tokenizer
from edge_transformer.text.tokenizer import Tokenizer


class ModelText(NamedTuple):
    """`chat_template` is None where the model has none; `end_token_ids` are the ids after which an answer is
    complete.
    """

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    end_token_ids: tuple[int, ...]


def load_text(checkpoint: Checkpoint) -> ModelText:
    """Tokenizer, chat template and end tokens: from a GGUF file's metadata, else from the files of the model's folder.

    Raises TextError when they are missing, corrupt or of an unknown kind. Takes no lock and keeps no global state: it
    may run in a thread of its own while weights are read, and does there what the first chat would wait for.
    """
    if checkpoint.container == "gguf":
        tokenizer = gguf_tokenizer(checkpoint.metadata)
        template = gguf_chat_template(checkpoint.metadata, tokenizer.named_tokens)
        end_token_ids = gguf_end_token_ids(checkpoint.metadata, tokenizer)
    else:
        from edge_transformer.text.huggingface_tokenizer import huggingface_tokenizer

        folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
        tokenizer = huggingface_tokenizer(folder)
        template = huggingface_chat_template(folder, tokenizer.named_tokens)
        end_token_ids = huggingface_end_token_ids(folder, tokenizer)
    if template is not None:
        template.prepare()
    return ModelText(tokenizer, template, end_token_ids)
