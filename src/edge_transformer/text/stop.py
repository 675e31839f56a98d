"""Stop strings in streamed text, also across the borders of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from edge_transformer.errors import UsageError


class StopStrings:
    """Passes text through until a stop string appears, and keeps back what may be the beginning of one.

    Of several stop strings the one that is complete first counts; of those complete at the same character, the
    longest, so that least is given out. That does not depend on how the text is cut into pieces. The stop string
    itself is not given out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises UsageError for an empty stop string, which would stop at once."""
        if any(not stop for stop in stops):
            raise UsageError("a stop string must not be empty")
        self._stops = tuple(dict.fromkeys(stops))
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.hit: str | None = None

    def push(self, text: str) -> tuple[str, bool]:
        """(text that can be given out, whether a stop string is complete). After a hit always ("", True)."""
        if self.hit is not None:
            return "", True
        text = self._held + text
        found = [(start + len(stop), start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            _, start, self.hit = min(found)
            self._held = ""
            return text[:start], True
        keep = self._possible_beginning(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What was kept back, when the text has ended without a stop string."""
        held, self._held = self._held, ""
        return held

    def _possible_beginning(self, text: str) -> int:
        """Length of the longest end of `text` that a stop string begins with."""
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
