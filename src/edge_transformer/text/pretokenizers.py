"""How byte-level vocabularies cut text into words before merging, by the name a GGUF file gives (tokenizer.ggml.pre).

Each entry is the normalizer, the pattern and the merge rule of the tokenizer.json the name was derived from. A name
that is not here is refused: with the wrong cut a model still answers, only worse.
"""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from edge_transformer.errors import TextError

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
_LLAMA3 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_HEAD = r"[^\r\n\p{L}\p{N}]?"
_TEKKEN = rf"{_HEAD}{_UPPER}*{_LOWER}+|{_HEAD}{_UPPER}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*" + _TAIL
_GPT4O = (
    rf"{_HEAD}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_HEAD}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """`pattern`: words are its matches; None: GPT-2's own pattern, after single digits when `digits`.

    `nfc`: text is normalized to NFC first. `ignore_merges`: a word that is in the vocabulary is taken whole.
    `add_bos`: whether a BOS comes first where the file does not say.
    """

    pattern: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        """What text goes through before it is cut."""
        return normalizers.NFC() if self.nfc else None

    def words(self) -> pre_tokenizers.PreTokenizer:
        """What cuts text into words, spelled byte-level."""
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None)
        if self.pattern is not None:
            split = pre_tokenizers.Split(Regex(self.pattern), behavior="isolated")
            return pre_tokenizers.Sequence([split, byte_level])
        if self.digits:
            return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
        return byte_level


_LLAMA3_WORDS = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)
_SINGLE_DIGITS = PreTokenizer(digits=True)

PRE_TOKENIZERS: dict[str, PreTokenizer] = {
    "gpt-2": PreTokenizer(),
    "phi-2": PreTokenizer(),
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "command-r": PreTokenizer(digits=True, nfc=True),
    "llama3": _LLAMA3_WORDS,
    "llama-v3": _LLAMA3_WORDS,
    "llama-bpe": _LLAMA3_WORDS,
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, add_bos=True),
    "gpt-4o": PreTokenizer(_GPT4O, ignore_merges=True),
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "qwen35": PreTokenizer(_QWEN35, nfc=True),
}


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer GGUF files call `name`; TextError for any other name."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise TextError(
            f"tokenizer.ggml.pre is {name!r}, a way of cutting text that is not known here "
            f"(known: {', '.join(sorted(PRE_TOKENIZERS))}). "
            "Use the model's Hugging Face folder with its tokenizer.json instead."
        ) from None
