"""JSON of a known, flat shape, walked front to back: a hostile file fails at its first wrong byte, at little cost.

A general parser would build all of `[[],[],[],...` first, at thirty times its size, before anyone could say that it is
not what was expected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from edge_transformer.errors import FormatError

FLAT_OBJECT_CHARACTERS = 2000

_SPACE = re.compile(r"[ \t\n\r]*+")
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]++|\\.)*+"')
_FLAT_OBJECT = re.compile(rf"\{{[^{{}}]{{0,{FLAT_OBJECT_CHARACTERS}}}+\}}")


class JsonScanner:
    """A position in a JSON text of file `path`; `what` names the text in errors. All methods raise FormatError."""

    def __init__(self, path: Path, text: bytes, what: str) -> None:
        self._path = path
        self._what = what
        self._position = 0
        try:
            self._text = text.decode("utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(path, f"{what} is not valid JSON: {error}") from error
        self._skip_space()

    def members(self) -> Iterator[str]:
        """The keys of the object at this place. The caller reads each value before it takes the next key."""
        self._expect("{")
        if self._accept("}"):
            return
        seen: set[str] = set()
        while True:
            key = self.string()
            if key in seen:
                raise FormatError(self._path, f"{self._what} has the key {key[:200]!r} twice")
            seen.add(key)
            self._expect(":")
            yield key
            if self._accept("}"):
                return
            self._expect(",")

    def string(self) -> str:
        """The string at this place."""
        raw = self._match(_STRING, "string")
        if "\\" not in raw:
            return raw[1:-1]
        value = self._decode(raw)
        try:
            str(value).encode("utf-8")
        except UnicodeEncodeError as error:  # an escaped half of a surrogate pair
            raise self.fail("a string that is no Unicode text") from error
        return str(value)

    def string_map(self) -> dict[str, str]:
        """The object of strings at this place."""
        return {key: self.string() for key in self.members()}

    def flat_object(self) -> dict[str, object]:
        """The short object without objects inside at this place."""
        raw = self._match(_FLAT_OBJECT, f"object without objects inside, of up to {FLAT_OBJECT_CHARACTERS} characters")
        return cast(dict[str, object], self._decode(raw, unique_keys=True))  # it is in braces

    def end(self) -> None:
        """Nothing follows."""
        if self._position != len(self._text):
            raise self.fail("something after its end")

    def fail(self, found: str) -> FormatError:
        """The error for what was found at this place."""
        place = f"{found} at character {self._position}"
        return FormatError(self._path, f"{self._what} is not valid JSON of its kind: {place}")

    def _decode(self, raw: str, unique_keys: bool = False) -> object:
        def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
            found = dict(pairs)
            if len(found) != len(pairs):
                raise self.fail(f"an object with a key twice ({raw[:80]})")
            return found

        try:
            return json.loads(raw, object_pairs_hook=unique if unique_keys else None)
        except (ValueError, RecursionError) as error:
            raise self.fail(f"{str(error)[:200]},") from error

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self._text, self._position)
        if match is None:
            raise self.fail(f"no {expected}")
        self._position = match.end()
        self._skip_space()
        return match[0]

    def _accept(self, character: str) -> bool:
        if not self._text.startswith(character, self._position):
            return False
        self._position += 1
        self._skip_space()
        return True

    def _expect(self, character: str) -> None:
        if not self._accept(character):
            raise self.fail(f"no {character!r}")

    def _skip_space(self) -> None:
        match = _SPACE.match(self._text, self._position)
        if match is not None:
            self._position = match.end()
