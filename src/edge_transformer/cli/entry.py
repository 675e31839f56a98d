"""The start of the installed command `ete`: until it can end in order, Ctrl-C ends it at once, without a traceback."""

from __future__ import annotations

import signal

# Unless it is ignored, as in a shell's background: then it stays so. Before the imports that take time.
_INTERRUPTIBLE = signal.getsignal(signal.SIGINT) is signal.default_int_handler
if _INTERRUPTIBLE:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Entry point of the installed command."""
    from edge_transformer.cli.main import INTERRUPTED
    from edge_transformer.cli.main import main as run

    if _INTERRUPTIBLE:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # What is left after `run` is the end of the interpreter, where a second Ctrl-C would be answered with a traceback.
    try:
        try:
            run()
        finally:
            if _INTERRUPTIBLE:
                signal.signal(signal.SIGINT, signal.SIG_DFL)
    except KeyboardInterrupt:
        raise SystemExit(INTERRUPTED) from None
