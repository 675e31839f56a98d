"""The capability gate: typed reads of a raw configuration that remember what was read, and what is left is refused.

A family reads the fields it implements through a FieldReader, names those that are known not to affect the text forward
pass, and calls `finish`, which refuses the first field that nobody has explained. Nothing is ever ignored silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

import numpy as np

from edge_transformer.errors import UnsupportedModelError

MAX_INTEGER = 2**31 - 1
MAX_LAYERS = 4096
SMALLEST_NUMBER, LARGEST_NUMBER = 1e-15, 1e15  # so that float32 products of two of them stay finite and normal

_SHOWN_VALUE_CHARACTERS = 120

_HINTS = {
    "quantization_config": "quantized Hugging Face checkpoints are not read; use the unquantized model or a GGUF file",
    "quantization": "quantized checkpoints of other runtimes are not read; use the unquantized model or a GGUF file",
    "num_experts": "mixture-of-experts models are not supported",
    "num_local_experts": "mixture-of-experts models are not supported",
    "expert_count": "mixture-of-experts models are not supported",
    "auto_map": "models that bring their own code are not run",
    "text_config": "models with parts besides text are not supported",
    "vision_config": "models with parts besides text are not supported",
}


class _Required:
    """Marks a field without a default."""


REQUIRED = _Required()


class FieldReader:
    """Typed reads of one mapping (config.json, one of its sections, or the keys of one GGUF architecture).

    `where` names the file in errors, `prefix` is put before field names there. JSON null counts as absent for the
    `optional_` reads and as a wrong type for the others.
    """

    def __init__(self, raw: Mapping[str, object], where: str, prefix: str = "") -> None:
        self._raw = raw
        self._where = where
        self._prefix = prefix
        self._explained: set[str] = set()
        self._sections: list[FieldReader] = []

    def __contains__(self, name: str) -> bool:
        return name in self._raw

    def refuse(self, name: str, reason: str) -> NoReturn:
        """Raise UnsupportedModelError naming the field, its value and the reason."""
        full = f"{self._prefix}{name}"
        if name not in self._raw:
            raise UnsupportedModelError(f"{self._where}: field {full!r} is missing: {reason}")
        raise UnsupportedModelError(f"{self._where}: field {full!r} = {_shown(self._raw[name])}: {reason}")

    def integer(
        self, name: str, default: int | _Required = REQUIRED, *, minimum: int = 1, maximum: int = MAX_INTEGER
    ) -> int:
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            self.refuse(name, f"an integer from {minimum} to {maximum} is expected")
        return value

    def optional_integer(self, name: str, default: int | None = None, *, minimum: int = 1) -> int | None:
        if self._get(name, default) is None:
            return None
        return self.integer(name, default if default is not None else REQUIRED, minimum=minimum)

    def number(self, name: str, default: float | _Required = REQUIRED) -> float:
        """A finite number > 0."""
        value = self._get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(name, "a number is expected")
        if not SMALLEST_NUMBER <= value <= LARGEST_NUMBER:
            self.refuse(name, f"a number > 0, from {SMALLEST_NUMBER:g} to {LARGEST_NUMBER:g}, is expected")
        return float(value)

    def rope_base(self, name: str) -> float | None:
        """The base of rope frequencies, a number > 1, or None when absent or null."""
        value = self.optional_number(name)
        if value is not None and value <= 1:
            self.refuse(name, "a number > 1 is expected")
        return value

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        if self._get(name, default) is None:
            return None
        return self.number(name, default if default is not None else REQUIRED)

    def boolean(self, name: str, default: bool | _Required = REQUIRED) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            self.refuse(name, "true or false is expected")
        return value

    def string(self, name: str, default: str | _Required = REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            self.refuse(name, "a string is expected")
        return value

    def optional_string(self, name: str) -> str | None:
        return None if self._get(name, None) is None else self.string(name)

    def optional_strings(self, name: str) -> list[str] | None:
        """A list of strings, or None when the field is absent or null."""
        value = self._get(name, None)
        if value is None:
            return None
        strings = [item for item in _items(value) or [None] if isinstance(item, str)]
        if len(strings) != len(_items(value) or [None]):
            self.refuse(name, "a list of strings is expected")
        return strings

    def uniform_integer(self, name: str, default: int | _Required = REQUIRED) -> int:
        """An integer >= 1, also when written as a list with the same integer for every layer."""
        items = _items(self._get(name, default))
        if items is None:
            return self.integer(name, default)
        first = items[0] if items else None
        if any(item != first for item in items):
            self.refuse(name, "an integer that is the same in all layers is expected")
        if not isinstance(first, int) or isinstance(first, bool) or not 1 <= first <= MAX_INTEGER:
            self.refuse(name, f"integers from 1 to {MAX_INTEGER} are expected")
        return first

    def flags(self, name: str, count: int) -> list[bool]:
        """`count` times true or false, or 1 or 0."""
        items = _items(self._get(name, REQUIRED))
        if items is None or len(items) != count or not all(isinstance(item, int) and item in (0, 1) for item in items):
            self.refuse(name, f"a list of {count} times true or false is expected, an entry for each layer")
        return [bool(item) for item in items]

    def token_ids(self, name: str) -> tuple[int, ...]:
        """An integer >= 0, a list of them, or nothing."""
        value = self._get(name, None)
        if value is None:
            return ()
        items = _items(value)
        items = [value] if items is None else items
        ids = tuple(item for item in items if isinstance(item, int) and not isinstance(item, bool) and item >= 0)
        if len(ids) != len(items):
            self.refuse(name, "a token id or a list of token ids is expected")
        return ids

    def raw(self, name: str) -> object:
        """The value as it stands (None when absent), for fields with several spellings."""
        return self._get(name, None)

    def section(self, name: str) -> FieldReader | None:
        """A reader of a nested mapping, finished together with this one; None when absent, null or empty."""
        value = self._get(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            self.refuse(name, "a mapping is expected")
        if not value:
            return None
        section = FieldReader(value, self._where, f"{self._prefix}{name}.")
        self._sections.append(section)
        return section

    def only(self, name: str, *allowed: object, reason: str = "") -> None:
        """Accept a field only when absent or equal to one of `allowed` (true and 1 are different)."""
        value = self._get(name, allowed[0])
        if not any(type(value) is type(option) and value == option for option in allowed):
            supported = " or ".join(_shown(option) for option in allowed)
            self.refuse(name, reason or f"only {supported} is supported")

    def ignore(self, names: Sequence[str]) -> None:
        """Name fields that are known not to affect the text forward pass."""
        self._explained.update(names)

    def ignore_prefixes(self, *prefixes: str) -> None:
        """Name whole families of fields that are known not to affect the text forward pass."""
        self.ignore([name for name in self._raw if name.startswith(prefixes)])

    def finish(self) -> None:
        """Refuse the first field, here or in a section, that was neither read nor named as without effect."""
        for name in self._raw:
            if name not in self._explained:
                self.refuse(name, _HINTS.get(name, "this field is not known, so its effect cannot be ruled out"))
        for section in self._sections:
            section.finish()

    def _get(self, name: str, default: object) -> object:
        self._explained.add(name)
        if name in self._raw:
            return self._raw[name]
        if isinstance(default, _Required):
            self.refuse(name, "it is needed")
        return default


def agree(fields: FieldReader, name: str, first: float | None, other: str, second: float | None) -> float | None:
    """The one value that two spellings of a field give; refuses when both are given and differ."""
    if first is not None and second is not None and first != second:
        fields.refuse(name, f"it disagrees with {other!r}, which says {second!r}")
    return first if first is not None else second


def _items(value: object) -> list[object] | None:
    """The items of a list as plain Python values, None when it is no list (GGUF arrays may be numpy arrays)."""
    if isinstance(value, np.ndarray):
        return list(value.tolist())
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return list(value)
    return None


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE_CHARACTERS else text[: _SHOWN_VALUE_CHARACTERS - 1] + "…"
