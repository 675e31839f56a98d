"""Where the turns of a chat come from: typed at a terminal, or one a line from a pipe or file."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from edge_transformer.cli.console import note
from edge_transformer.errors import UsageError

MAX_BYTES = 64 << 20
"""Of a prompt, or a line of a chat: far more than any context holds. What never ends, like /dev/zero, is refused."""


def typed_turns() -> Iterator[str]:
    """Turns typed at the terminal. Ctrl-C clears the line, Ctrl-D ends; Alt-Enter starts a new line in a turn."""
    from prompt_toolkit import PromptSession
    from prompt_toolkit.key_binding import KeyBindings, KeyPressEvent
    from prompt_toolkit.output import create_output

    keys = KeyBindings()

    @keys.add("escape", "enter")
    def new_line(event: KeyPressEvent) -> None:
        event.current_buffer.insert_text("\n")

    # The prompt is drawn on the terminal even when the answers go to a file.
    session: PromptSession[str] = PromptSession(key_bindings=keys, output=create_output(always_prefer_tty=True))
    while True:
        try:
            yield session.prompt(">>> ", prompt_continuation="... ")
        except KeyboardInterrupt:
            note("(Ctrl-D or /exit leaves)")
        except EOFError:
            return


def piped_turns() -> Iterator[str]:
    """One turn for each line of standard input. Raises UsageError for a line that is not UTF-8, or endless."""
    for number, line in enumerate(iter(lambda: sys.stdin.buffer.readline(MAX_BYTES + 1), b""), start=1):
        if len(line) > MAX_BYTES:
            raise UsageError(f"line {number} of standard input is longer than {MAX_BYTES >> 20} MiB")
        try:
            yield line.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise UsageError(
                f"line {number} of standard input is not UTF-8: byte {error.start} is 0x{line[error.start]:02x}"
            ) from error
