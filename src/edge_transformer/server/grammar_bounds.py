"""Grammars that would take too long to compile are refused, after a trial in a process that can be ended.

llguidance's own limits do not reach what some regular expressions ask for: the remainders of a `multipleOf` of a
million, the intersection of thirty patterns. A thread that compiles those cannot be stopped.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
import threading

from edge_transformer.server import grammar_trial
from edge_transformer.server.errors import ApiError, invalid

SECONDS = 2
"""Of a core. Schemas in use take a few hundredths."""

MEMORY_BYTES = 1 << 30
"""Address space of the process."""

WAIT_SECONDS = 60
"""The process gives way to whoever makes tokens: on a busy machine it may take long."""

AT_ONCE = 2

REMEMBERED = 256

PLAIN_CHARACTERS = 20_000
"""Grammars of so many are not tried, unless a keyword is in them that can take long."""

_KEYWORDS = ("multipleOf", "pattern", "allOf")
_NUMBER = re.compile(r'"multipleOf"\s*:\s*(-?[0-9.eE+-]+)')
_PATTERN = re.compile(r'"pattern"\s*:\s*("(?:[^"\\]|\\.)*")')
_SHOWN_CHARACTERS = 60


class GrammarBounds:
    """What the trials have said. May be used from several threads."""

    def __init__(self) -> None:
        self._places = threading.BoundedSemaphore(AT_ONCE)
        self._verdicts: dict[bytes, bool] = {}  # sha256 of a grammar, the newest last: whether it is compiled in time

    def check(self, grammar: str, param: str) -> None:
        """Raises ApiError, naming `param`, for a grammar that takes too long or too much to compile. A grammar that is
        wrong passes.
        """
        if len(grammar) <= PLAIN_CHARACTERS and not any(keyword in grammar for keyword in _KEYWORDS):
            return
        key = hashlib.sha256(grammar.encode()).digest()
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._try(grammar)
            self._verdicts[key] = verdict
            for old in list(self._verdicts)[:-REMEMBERED]:
                self._verdicts.pop(old, None)
        if not verdict:
            raise invalid(
                f"{param} takes more than {SECONDS} seconds or {MEMORY_BYTES >> 20} MiB to compile"
                f"{_what_may(grammar)}; leave that to a check of the answer",
                param,
                "invalid_schema",
            )

    def _try(self, grammar: str) -> bool:
        """Raises RuntimeError where the process cannot be had; ApiError where it had no time."""
        if not self._places.acquire(timeout=WAIT_SECONDS):
            raise ApiError(503, "other schemas are being compiled; try again", code="busy", retry_after=SECONDS)
        command = [sys.executable, "-P", "-m", grammar_trial.__name__, str(SECONDS), str(MEMORY_BYTES)]
        try:
            ended = subprocess.run(
                command, input=grammar.encode(), capture_output=True, timeout=WAIT_SECONDS, check=False
            )
        except subprocess.TimeoutExpired as error:  # says nothing about the grammar: there was no time
            raise ApiError(503, "a schema could not be tried yet; try again", code="busy", retry_after=60) from error
        finally:
            self._places.release()
        if grammar_trial.BEGUN.encode() not in ended.stdout:
            raise RuntimeError(f"a grammar cannot be tried: {ended.stderr.decode(errors='replace')[-1000:]}")
        return ended.returncode == 0


def _what_may(grammar: str) -> str:
    """The keywords and values that most likely are why."""
    numbers = sorted(set(_NUMBER.findall(grammar)), key=lambda number: (_digits(number), number))
    patterns = sorted(set(_PATTERN.findall(grammar)), key=lambda pattern: (len(pattern), pattern))
    found = [f"multipleOf {_shortened(number)}" for number in numbers[-1:]]
    found += [f"pattern {_shortened(pattern)}" for pattern in patterns[-1:]]
    return f" (look at {' and '.join(found)})" if found else ""


def _digits(number: str) -> int:
    """Those of a multiple without noughts at the end: about so many remainders are followed."""
    return int(re.sub("[^0-9]", "", number.lower().partition("e")[0])[:30].rstrip("0") or 0)


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
