"""`ete rm` asks at a terminal: what each answer does. The demo model is a file of its size without contents."""

import errno
import os
import pty
import select
import signal
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from cli.test_process import REAL, read_until
from edge_transformer.cli.main import ete
from edge_transformer.hub.demo import DEMO


@pytest.fixture
def demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A demo model that takes no room."""
    monkeypatch.setenv("ETE_CACHE", str(tmp_path))
    path = tmp_path / "demo" / DEMO.file_name
    path.parent.mkdir()
    path.touch()
    os.truncate(path, DEMO.nbytes)
    return path


@pytest.mark.parametrize(
    ("answer", "code", "said"),
    [
        (b"y\n", 0, b"deleted demo: 93.8 MiB freed"),
        (b"n\n", 1, b"nothing was deleted"),
        (b"\n", 1, b"nothing was deleted"),
        (b"\x04", 1, b"\r\nnothing was deleted"),  # Ctrl-D
        (None, 130, b"\r\n"),  # Ctrl-C
    ],
)
def test_answers(demo: Path, answer: bytes | None, code: int, said: bytes) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen([*REAL, "rm", "demo"], stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    seen = read_until(master, b"Delete demo from this machine? [y/N]: ")
    if answer is None:
        process.send_signal(signal.SIGINT)
        while not select.select([master], [], [], 2)[0]:  # it came just before the program began to wait for a key
            process.send_signal(signal.SIGINT)
    else:
        os.write(master, answer)
    seen += read_until(master, said)
    assert said in seen
    assert process.wait(timeout=30) == code
    os.close(master)
    assert demo.exists() is (code != 0)
    assert b"Traceback" not in seen
    assert b"Aborted" not in seen


def test_an_answer_from_a_pipe_is_refused_and_help_says_so(demo: Path) -> None:
    for answer in ("y\n", "n\n"):
        done = subprocess.run([*REAL, "rm", "demo"], input=answer, capture_output=True, text=True)
        assert done.returncode == 2
        assert "standard input is no terminal" in done.stderr
        assert "--yes (-y)" in done.stderr
        assert demo.exists()
    told = subprocess.run([*REAL, "rm", "--help"], capture_output=True, text=True, check=True).stdout
    assert "needs a terminal" in " ".join(told.split())
    assert "--yes goes without" in " ".join(told.split())
    assert subprocess.run([*REAL, "rm", "demo", "-y"], stdin=subprocess.DEVNULL, check=True).returncode == 0
    assert not demo.exists()


def test_what_cannot_be_deleted_is_named(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unlink(path: Path) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "unlink", unlink)
    result = CliRunner().invoke(ete, ["rm", "demo", "-y"])
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: demo cannot be deleted: {demo}: Permission denied; make its folder writable (chmod u+w), or let the "
        "user delete it whose it is\n"
    )
