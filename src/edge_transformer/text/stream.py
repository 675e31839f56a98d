"""Text from ids one at a time: whole characters only, and the pieces joined equal the decoded whole."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from edge_transformer.text.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4


class StreamDecoder:
    """Decodes the ids that follow a prompt; special tokens give no text.

    One per sequence; work per id does not grow with the length of the text.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._strip_next = tokenizer.strip_first_space
        # The prompt's text is not given out; its last bytes matter where it ends inside a character.
        tail = b""
        for token_id in reversed(prompt_ids):
            tail = self._bytes(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        if tail:
            self._strip_next = False
            self._decoder.decode(_from_character_start(tail))

    def push(self, token_id: int) -> str:
        """The text that is certain now: empty while a character is incomplete."""
        return self._strip(self._decoder.decode(self._bytes(token_id)))

    def finish(self) -> str:
        """The rest: U+FFFD when the ids ended inside a character, else empty."""
        return self._strip(self._decoder.decode(b"", final=True))

    def _bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._tokenizer.special_ids else self._tokenizer.token_bytes(token_id)

    def _strip(self, text: str) -> str:
        if self._strip_next and text:
            self._strip_next = False
            return text.removeprefix(" ")
        return text


def _from_character_start(tail: bytes) -> bytes:
    """`tail` without leading continuation bytes, whose character began before it."""
    start = 0
    while start < len(tail) and start < _LONGEST_CHARACTER - 1 and tail[start] & 0xC0 == 0x80:
        start += 1
    return tail[start:]
