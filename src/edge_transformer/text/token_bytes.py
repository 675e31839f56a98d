"""What each token is in bytes: the two ways in which vocabularies of language models spell bytes as text.

A byte-level vocabulary (GPT-2 and its heirs) writes every byte as one printable character. A SentencePiece-style one
writes text as it is, a space as U+2581, and has a token <0xXX> for each byte that no piece covers.
"""

from __future__ import annotations

import re
from enum import Enum

SPACE_MARK = "\u2581"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling(Enum):
    """How a vocabulary spells bytes."""

    BYTE_LEVEL = "byte-level"
    SENTENCE_PIECE = "sentencepiece"


def _byte_level_table() -> dict[str, int]:
    """Character to byte of byte-level vocabularies: printable Latin-1 bytes stand for themselves, the others from
    U+0100 on.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_table()
_CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
_OTHER_ASCII = {chr(byte): _CHARACTER_OF_BYTE[byte] for byte in range(128) if chr(byte) != _CHARACTER_OF_BYTE[byte]}


def spelled_byte_level(text: str) -> str:
    """The bytes of `text` in UTF-8, each as its character."""
    if not text.isascii():
        return text.encode().decode("latin-1").translate(_CHARACTER_OF_BYTE)
    for character, spelled in _OTHER_ASCII.items():
        if character in text:
            text = text.replace(character, spelled)
    return text


def token_to_bytes(token: str, spelling: Spelling) -> bytes:
    """Bytes of a vocabulary entry. An entry that does not follow the spelling stands for its own text in UTF-8."""
    if spelling is Spelling.BYTE_LEVEL:
        try:
            return bytes([_BYTE_OF_CHARACTER[character] for character in token])
        except KeyError:
            return token.encode()
    if byte := _BYTE_TOKEN.fullmatch(token):
        return bytes([int(byte[1], 16)])
    return token.replace(SPACE_MARK, " ").encode()
