"""Happens-before of queued work by vector clocks: which reads and writes of device memory are not ordered.

Knows streams by name and memory by address ranges; nothing of what the work does. The order of queued work follows from
the order of calls alone, so a missing wait is found when the later work is queued, whatever order it would run in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


class RaceError(AssertionError):
    """Two pieces of queued work touch the same memory, one of them writes, and nothing orders them."""


Clock = dict[str, int]


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes [start, end) of memory, named `label`, that a piece of work reads or writes."""

    start: int
    end: int
    writes: bool
    label: str


@dataclass(frozen=True, slots=True)
class _Past:
    access: Access
    work: str
    stream: str
    tick: int


def merge(into: Clock, other: Clock) -> None:
    for stream, tick in other.items():
        into[stream] = max(into.get(stream, 0), tick)


class Clocks:
    """What is known to have happened, per stream and on the host."""

    def __init__(self) -> None:
        self._streams: dict[str, Clock] = {}
        self._host: Clock = {}
        self._past: list[_Past] = []

    def queue(self, stream: str, work: str, accesses: Sequence[Access]) -> Clock:
        """Note that `work` was queued on `stream`. Returns what has happened once it is done.

        Raises RaceError when an access is not ordered with an earlier one.
        """
        clock = self._streams.setdefault(stream, {})
        merge(clock, self._host)
        for access in accesses:
            self._check(access, work, stream, clock)
        clock[stream] = clock.get(stream, 0) + 1
        for access in accesses:
            self._remember(_Past(access, work, stream, clock[stream]), clock)
        return dict(clock)

    def wait(self, stream: str, event: Clock) -> None:
        merge(self._streams.setdefault(stream, {}), event)

    def host_wait(self, stream: str | None) -> None:
        """The host waited for a stream, or for all."""
        for clock in self._streams.values() if stream is None else [self._streams.get(stream, {})]:
            merge(self._host, clock)
        self._past = [past for past in self._past if self._host.get(past.stream, 0) < past.tick]

    def forget(self, start: int, end: int) -> None:
        """Memory was given back."""
        self._past = [past for past in self._past if past.access.end <= start or end <= past.access.start]

    def _check(self, access: Access, work: str, stream: str, clock: Clock) -> None:
        for past in self._past:
            other = past.access
            if other.end <= access.start or access.end <= other.start or not (access.writes or other.writes):
                continue
            if clock.get(past.stream, 0) < past.tick:
                raise RaceError(
                    f"{work} on stream {stream!r} {_verb(access)} {access.label!r}, which {past.work} on stream "
                    f"{past.stream!r} {_verb(other)}, and nothing orders them: {stream!r} has to wait for an event "
                    f"recorded on {past.stream!r} after {past.work}"
                )

    def _remember(self, new: _Past, clock: Clock) -> None:
        def replaced(past: _Past) -> bool:
            inside = new.access.start <= past.access.start and past.access.end <= new.access.end
            if new.access.writes:  # whoever is ordered after the new one is ordered after the old one
                return inside
            return inside and not past.access.writes and past.stream == new.stream

        self._past = [past for past in self._past if not replaced(past)]
        self._past.append(new)


def _verb(access: Access) -> str:
    return "writes" if access.writes else "reads"
