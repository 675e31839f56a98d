"""Mapped files: changes and truncation under the mapping become errors, other faults stay what they were."""

import gc
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from edge_transformer._native import guard_range, unguard_range
from edge_transformer.errors import FileChangedError, FormatError
from edge_transformer.formats.mapping import MappedModelFile

PAGE = os.sysconf("SC_PAGESIZE")


@pytest.fixture
def file_path(tmp_path: Path) -> Path:
    path = tmp_path / "weights.bin"
    path.write_bytes(np.random.default_rng(0).integers(1, 256, 10 * PAGE + 17, np.uint8).tobytes())
    return path


def test_bytes_size_and_address(file_path: Path) -> None:
    file = MappedModelFile(file_path)
    content = file_path.read_bytes()
    assert file.nbytes == len(content)
    assert file.view(0, file.nbytes).tobytes() == content
    assert file.view(3, 5).tobytes() == content[3:8]
    assert file.view(3, 5).ctypes.data == file.address + 3
    file.check_unchanged()
    file.close()
    file.close()
    with pytest.raises(ValueError, match="closed"):
        file.check_unchanged()


def test_truncation_under_the_mapping_is_an_error_naming_the_file(file_path: Path) -> None:
    file = MappedModelFile(file_path)
    view = file.view(0, file.nbytes)
    os.truncate(file_path, 3 * PAGE)
    assert not view[3 * PAGE :].any()  # read as zeros instead of ending the process
    assert view[: 3 * PAGE].all()
    with pytest.raises(FileChangedError, match=r"weights\.bin.*to 12288 bytes"):
        file.check_unchanged()
    del view
    file.close()


def test_a_fault_is_remembered_when_the_file_grows_back(file_path: Path) -> None:
    file = MappedModelFile(file_path)
    before = os.stat(file_path)
    os.truncate(file_path, PAGE)
    assert file.view(5 * PAGE, 1)[0] == 0
    os.truncate(file_path, before.st_size)
    os.utime(file_path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(FileChangedError, match="could not be read"):
        file.check_unchanged()
    file.close()


def test_rewriting_in_place_is_seen_by_its_time(file_path: Path) -> None:
    file = MappedModelFile(file_path)
    before = os.stat(file_path)
    with file_path.open("r+b") as stream:
        stream.write(b"changed")
    os.utime(file_path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    with pytest.raises(FileChangedError, match="modification time"):
        file.check_unchanged()
    file.close()


def test_replacing_the_file_by_another_leaves_the_mapping_as_it_was(file_path: Path, tmp_path: Path) -> None:
    file = MappedModelFile(file_path)
    content = file_path.read_bytes()
    other = tmp_path / "other"
    other.write_bytes(b"something else")
    other.replace(file_path)
    assert file.view(0, file.nbytes).tobytes() == content
    file.check_unchanged()
    file.close()


def test_a_view_keeps_the_memory_after_close(file_path: Path) -> None:
    file = MappedModelFile(file_path)
    content = file_path.read_bytes()
    view = file.view(0, file.nbytes)
    file.close()
    assert view.tobytes() == content
    os.truncate(file_path, 0)
    assert not view[PAGE:].any()  # still guarded
    del view, file
    gc.collect()


def test_guard_slots_are_used_again(file_path: Path) -> None:
    first = guard_range(1 << 40, PAGE)
    unguard_range(first)
    assert guard_range(1 << 41, PAGE) == first
    unguard_range(first)
    for _ in range(5000):  # more than there are slots
        MappedModelFile(file_path).close()


def test_files_that_cannot_be_mapped(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="No such file"):
        MappedModelFile(tmp_path / "missing")
    (tmp_path / "empty").touch()
    with pytest.raises(FormatError, match="is empty"):
        MappedModelFile(tmp_path / "empty")
    with pytest.raises(FormatError, match="not a regular file"):
        MappedModelFile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="not a regular file"):
        MappedModelFile(tmp_path / "pipe")


def run_python(code: str, path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("faulthandler_first", [True, False])
def test_truncation_in_a_process_of_its_own(file_path: Path, faulthandler_first: bool) -> None:
    """As a user meets it: also with Python's own fault handler on either side of ours."""
    enable = "import faulthandler; faulthandler.enable()\n"
    code = (
        "import os, sys, pathlib\n"
        "from edge_transformer.formats.mapping import MappedModelFile\n"
        "from edge_transformer.errors import FileChangedError\n"
        f"path = pathlib.Path(sys.argv[1])\n{enable if faulthandler_first else ''}"
        "file = MappedModelFile(path)\n"
        f"{'' if faulthandler_first else enable + 'other = MappedModelFile(path)'}\n"
        "os.truncate(path, 0)\n"
        "print(int(file.view(0, file.nbytes).sum()))\n"
        "try: file.check_unchanged()\n"
        "except FileChangedError as error: print(error)\n"
    )
    result = run_python(code, file_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("0\n")
    assert str(file_path) in result.stdout


def test_a_fault_in_a_mapping_of_somebody_else_still_ends_the_process(file_path: Path) -> None:
    code = (
        "import mmap, os, sys, pathlib\n"
        "from edge_transformer.formats.mapping import MappedModelFile\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "ours = MappedModelFile(path)\n"
        "theirs = mmap.mmap(os.open(path, os.O_RDONLY), 0, access=mmap.ACCESS_READ)\n"
        "os.truncate(path, 0)\n"
        "print(theirs[0])\n"
    )
    result = run_python(code, file_path)
    assert result.returncode == -signal.SIGBUS
    assert result.stdout == ""


@pytest.mark.parametrize("times", [1, 6])
def test_a_bus_error_ends_the_process_once_another_handler_came_between_ours(file_path: Path, times: int) -> None:
    """Python's fault handler puts back what it found, ours, and raises the signal again."""
    code = (
        "import faulthandler, os, signal, sys, pathlib\n"
        "from edge_transformer.formats.mapping import MappedModelFile\n"
        "files = [MappedModelFile(pathlib.Path(sys.argv[1]))]\n"
        f"for _ in range({times}):\n"
        "    faulthandler.disable()\n"
        "    faulthandler.enable()\n"
        "    files.append(MappedModelFile(pathlib.Path(sys.argv[1])))\n"
        "os.kill(os.getpid(), signal.SIGBUS)\n"
    )
    result = run_python(code, file_path)
    assert result.returncode == -signal.SIGBUS
    assert result.stderr.count("Fatal Python error: Bus error") <= times
