"""The tokenizer the rest of the product sees: text to ids, ids to text, ids to bytes, and which ids are special.

How text is cut into ids is an encoder's business (`gguf_tokenizer`, `huggingface_tokenizer`, `sentencepiece_bpe`).
Ids to text is the same for all: the bytes of the tokens joined and read as UTF-8, an invalid sequence as U+FFFD. For
byte-level vocabularies that is what transformers gives for any ids; for SentencePiece-style ones transformers writes
one U+FFFD per byte of an invalid run, where this writes one per maximal invalid subsequence, so that text can be
streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from edge_transformer.errors import TextError
from edge_transformer.text.token_bytes import Spelling, token_to_bytes


class Encoder(Protocol):
    """Cuts text into ids."""

    def encode(self, text: str, *, parse_special: bool) -> list[int]:
        """Ids of valid Unicode text, nothing added. Without `parse_special`, control tokens in it are ordinary text."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """What is known of the tokens themselves.

    `token_text(id)` gives the vocabulary entry or None where there is none; `added` the text of tokens that are
    matched as a whole (special and user-defined ones), which are not spelled byte-level; `special_ids` those that
    `skip_special` hides.
    """

    size: int
    token_text: Callable[[int], str | None]
    token_id: Callable[[str], int | None]
    spelling: Spelling
    added: Mapping[int, str]
    special_ids: frozenset[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokenizer:
    """Text to ids and back. Immutable; may be used from several threads.

    `prefix_ids` is what `encode` puts first by the model's own settings (a BOS, or nothing). `named_tokens` holds the
    texts of bos_token, eos_token, unk_token, pad_token, ... as chat templates see them. `strip_first_space` says that
    encoding put a space before the text, which decoding takes away again.
    """

    encoder: Encoder
    vocabulary: Vocabulary
    prefix_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    named_tokens: Mapping[str, str] = field(default_factory=dict)
    strip_first_space: bool = False

    @property
    def vocab_size(self) -> int:
        """Number of tokens known to the tokenizer; a model's matrices may have more rows (padding)."""
        return self.vocabulary.size

    @property
    def special_ids(self) -> frozenset[int]:
        return self.vocabulary.special_ids

    def encode(self, text: str, *, add_bos: bool | None = None, parse_special: bool = True) -> list[int]:
        """Ids of `text`.

        `add_bos`: None as the model's settings say, True or False to force it. A rendered chat is encoded with False,
        since its template writes the BOS itself. No EOS is ever added: the text is to be continued. `parse_special`:
        special tokens written in the text become their ids; else they are cut like any text. Halves of a surrogate
        pair are joined, a lone surrogate becomes U+FFFD. Raises TextError when a BOS is forced and there is none.
        """
        if add_bos is None or (add_bos and self.prefix_ids):
            prefix = list(self.prefix_ids)
        elif not add_bos:
            prefix = []
        elif self.bos_token_id is None:
            raise TextError("add_bos=True, but the tokenizer has no BOS token: use add_bos=None or False")
        else:
            prefix = [self.bos_token_id]
        return prefix + self.encoder.encode(valid_unicode(text), parse_special=parse_special)

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes the token stands for; empty for ids without a token (padding rows of the model's vocabulary)."""
        vocabulary = self.vocabulary
        if vocabulary.spelling is Spelling.BYTE_LEVEL and (content := vocabulary.added.get(token_id)) is not None:
            return content.encode()
        text = vocabulary.token_text(token_id)
        return b"" if text is None else token_to_bytes(text, vocabulary.spelling)

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """Text of `ids`; incomplete or invalid UTF-8 becomes U+FFFD. `skip_special` leaves special tokens out."""
        skipped = self.special_ids if skip_special else frozenset()
        text = b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")
        return text[1:] if self.strip_first_space and text.startswith(" ") else text

    def token_id(self, text: str) -> int | None:
        """Id of the vocabulary entry or added token with exactly this text."""
        return self.vocabulary.token_id(text)


def valid_unicode(text: str) -> str:
    """`text` with surrogate halves joined to characters where they pair up, and U+FFFD where they do not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
