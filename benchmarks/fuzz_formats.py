"""Fuzz both file parsers for some minutes: `python benchmarks/fuzz_formats.py --minutes 10 [--seed N]`.

Injures valid safetensors and GGUF models at random. Every one must open or give a FormatError or UnsupportedModelError,
in under two seconds, with at most twice its size of memory and a small constant. The seed of a failure is printed; the
broken files stay in the folder that is named with it.
"""

import argparse
import faulthandler
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from formats import format_fuzzing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0, help="the first seed; later ones count up")
    arguments = parser.parse_args()

    samples = format_fuzzing.sample_models()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-formats-"))
    seed, opened = arguments.seed, 0
    end = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < end:
        faulthandler.dump_traceback_later(20, exit=True)  # a hang in native code shows where
        try:
            opened += format_fuzzing.fuzz_once(seed, folder, samples)
        except Exception as error:
            print(f"seed {seed}: {type(error).__name__}: {str(error)[:500]}; files in {folder}", file=sys.stderr)
            raise
        seed += 1
    faulthandler.cancel_dump_traceback_later()
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    count = seed - arguments.seed
    print(f"{count} broken models in {arguments.minutes:g} minutes: {count - opened} refused, {opened} opened")
    return 0


if __name__ == "__main__":
    sys.exit(main())
