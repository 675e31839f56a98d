"""Standard output that says what it is when it cannot be written: a full disk behind it has no file's name."""

from __future__ import annotations

import io
import sys
from typing import Any


class _Output(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise OSError(error.errno, error.strerror, "standard output") from error


def name_standard_output() -> None:
    """From here on OSErrors of writing to sys.stdout have the file name `standard output`."""
    stream = sys.stdout
    if not isinstance(stream, io.TextIOWrapper) or stream is not sys.__stdout__:  # /dev/null in its place never fails
        return
    stream.flush()
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]  # both are one, as they were
        io.BufferedWriter(_Output(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
