"""Which tensors of a quantized file are finished: a line each, written once their bytes are on the disk."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from types import TracebackType

from edge_transformer.errors import UsageError
from edge_transformer.formats.quantize import QuantizationError

JOURNAL_FILE = "unfinished.jsonl"


class Journal:
    """The journal of one unfinished folder; `finished` has what is done. Only one process at a time holds it.

    identity: what source and settings the folder is of, comparable after a round through JSON. Raises UsageError when
    the folder's journal is of others, when another process holds it, or when the folder has files but no journal.
    """

    def __init__(self, folder: Path, identity: dict[str, object]) -> None:
        self._path = folder / JOURNAL_FILE
        self.finished: dict[str, QuantizationError] = {}
        self._lines: list[str] = []
        strangers = [name for name in os.listdir(folder) if name != JOURNAL_FILE]
        if strangers and not self._path.exists():
            raise UsageError(f"{folder} is in the way, and no unfinished work is in it ({strangers[0]}); delete it")
        self._file = self._path.open("a+", encoding="utf-8")
        try:
            self._lock(folder)
            self._read(folder, identity)
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, name: str, error: QuantizationError) -> None:
        """A tensor's bytes have been written, though they may not be on the disk yet."""
        self.finished[name] = error
        entry = {"name": name, "error": [error.squared_error, error.squared_sum, error.largest]}
        self._lines.append(json.dumps(entry) + "\n")

    def save(self) -> None:
        """What was added is on the disk."""
        self._file.writelines(self._lines)
        self._lines.clear()
        self._file.flush()
        os.fsync(self._file.fileno())

    def remove(self) -> None:
        """All is finished."""
        self._path.unlink()

    def _lock(self, folder: Path) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(f"another process is writing {folder}; wait for it") from error

    def _read(self, folder: Path, identity: dict[str, object]) -> None:
        self._file.seek(0)
        try:
            lines = self._file.read().splitlines(keepends=True)
        except UnicodeDecodeError as error:
            raise self._unreadable(error) from error
        if lines and not lines[-1].endswith("\n"):  # the line that a crash cut off
            lines.pop()
            self._file.truncate(len("".join(lines).encode()))
        if not lines:
            self._lines.append(json.dumps(identity) + "\n")
            self.save()
            return
        try:
            if json.loads(lines[0]) != json.loads(json.dumps(identity)):
                raise UsageError(
                    f"{folder} is unfinished work with another source or other settings; repeat that command, or "
                    "delete the folder"
                )
            for line in lines[1:]:
                entry = json.loads(line)
                self.finished[entry["name"]] = QuantizationError(*map(_number, entry["error"]))
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> UsageError:
        return UsageError(f"{self._path} cannot be read ({error}); delete the folder {self._path.parent}")


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{str(value)[:40]!r} is no number")
    return value
