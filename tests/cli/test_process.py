"""`ete` as a process: signals, pipes, streams that close, what help imports, terminals."""

import errno
import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest

from edge_transformer.cli.console import progress_bar
from edge_transformer.cli.main import exit_codes

FAKE = [sys.executable, str(Path(__file__).with_name("fake_llm.py"))]
REAL = [sys.executable, "-c", "from edge_transformer.cli.entry import main; main()"]

HEAVY = ["numpy", "rich", "tokenizers", "jinja2", "huggingface_hub", "prompt_toolkit", "edge_transformer._native"]


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["chat", "--help"], ["rm", "-h"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", *REAL[1:], *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    assert imported.isdisjoint(HEAVY)


def read_until(stream: int, expected: bytes, seconds: float = 30) -> bytes:
    seen = b""
    deadline = time.monotonic() + seconds
    while expected not in seen:
        ready, _, _ = select.select([stream], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{expected!r} did not come; there was {seen!r}"
        piece = os.read(stream, 4096)
        assert piece, f"ended before {expected!r}; there was {seen!r}"
        seen += piece
    return seen


@pytest.mark.parametrize("json", [False, True])
def test_ctrl_c_ends_the_answer_with_what_there_is(json: bool) -> None:
    command = [*FAKE, "run", "slow", "hello there", *(["--json"] if json else [])]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    seen = b""
    if json:
        time.sleep(1.5)
    else:
        seen = read_until(process.stdout.fileno(), b"You said: hello")
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    output = seen + output
    assert process.returncode == 130
    assert b"Traceback" not in errors
    if json:
        assert b'"finish_reason": "interrupted"' in output
    else:
        assert output.startswith(b"You said: hello")
        assert output.endswith(b"\n")
        assert errors.startswith(b"prompt 3 tokens")


def test_ctrl_c_while_the_model_is_loaded_ends_quietly(tmp_path: Path) -> None:
    # A named pipe for the prompt keeps the program waiting.
    os.mkfifo(tmp_path / "pipe")
    process = subprocess.Popen(
        [*FAKE, "run", "m", "--prompt-file", str(tmp_path / "pipe")], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    writer = os.open(tmp_path / "pipe", os.O_WRONLY)  # returns once the program reads
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    os.close(writer)
    assert (process.returncode, output) == (130, b"")
    assert b"Traceback" not in errors


@pytest.mark.parametrize("ignored", [False, True])
def test_ctrl_c_before_the_command_has_started(tmp_path: Path, ignored: bool) -> None:
    """While click is imported: a stand-in for it takes its time. Where SIGINT is ignored it stays ignored."""
    (tmp_path / "click.py").write_text(
        "import sys, time\nprint('importing', flush=True)\nsys.stdin.readline()\nsys.exit(7)\n"
    )
    process = subprocess.Popen(
        [*REAL, "--version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler),
    )
    assert process.stdout is not None
    read_until(process.stdout.fileno(), b"importing")
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(b"go on\n", timeout=30)
    assert process.returncode == (7 if ignored else -signal.SIGINT)
    assert errors == b""


@pytest.mark.parametrize("arguments", [["run", "slow", "hello"], ["run", "m", "word " * 60], ["--help"]])
def test_a_reader_that_goes_away_ends_the_program_quietly(arguments: list[str]) -> None:
    reader, writer = os.pipe()
    process = subprocess.Popen([*FAKE, *arguments], stdout=writer, stderr=subprocess.PIPE)
    os.close(writer)
    if "slow" in arguments:
        read_until(reader, b"You")
    os.close(reader)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 141
    assert errors == b""


def test_output_that_the_terminal_cannot_show_does_not_stop_the_program() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "latin-1"}
    done = subprocess.run([*FAKE, "run", "m", "ü🙂"], capture_output=True, env=environment, check=True)
    assert done.stdout == b"You said: \xfc?\n"


def test_a_prompt_is_utf8_whatever_the_locale_says_and_is_refused_otherwise() -> None:
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    for environment in (dict(os.environ), ascii_only):
        command = [*FAKE, "run", "m", "ä日".encode(), "--json"]
        done = subprocess.run(command, capture_output=True, check=True, env=environment)
        assert json.loads(done.stdout)["text"].startswith("You said: ä日")
        done = subprocess.run([*FAKE, "run", "m", b"\xff"], capture_output=True, env=environment)
        assert (done.returncode, done.stdout) == (2, b"")
        assert b"this text is not UTF-8: byte 0 is 0xff." in done.stderr


def on_a_terminal(command: list[str], environment: dict[str, str]) -> bytes:
    """What a command without input writes to a terminal."""
    master, slave = pty.openpty()
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env={**os.environ, **environment})
    os.close(slave)
    written = b""
    while True:
        try:
            piece = os.read(master, 4096)
        except OSError:  # how Linux says that no process has the terminal open any more
            break
        if not piece:
            break
        written += piece
    os.close(master)
    process.wait(timeout=30)
    return written


BAR = """
import time
from edge_transformer.cli.console import progress_bar
with progress_bar() as progress:
    for done in range(20):
        progress("loading [weird] name", done, 20)
        time.sleep(0.03)
"""


TWO_WORKS = """
import time
from rich.progress import Progress
from edge_transformer.cli.console import progress_bar

for name in ("reset", "update"):
    def drawn(self, *args, _call=getattr(Progress, name), **fields):
        _call(self, *args, **fields)
        self.refresh()
    setattr(Progress, name, drawn)
with progress_bar() as progress:
    time.sleep(0.4)
    progress("first", 4 << 20, 4 << 20)
    progress("second", 1 << 20, 9 << 20)
"""


def test_a_progress_bar_is_drawn_on_a_terminal_and_nowhere_else() -> None:
    command = [sys.executable, "-c", BAR]
    drawn = on_a_terminal(command, {"TERM": "xterm-256color", "COLUMNS": "120"})
    assert b"loading [weird] name" in drawn
    colours = [part for part in drawn.split(b"\x1b[")[1:] if b"m" in part[:12] and not part.startswith(b"0m")]
    assert colours
    plain = on_a_terminal(command, {"TERM": "xterm-256color", "COLUMNS": "120", "NO_COLOR": "1"})
    assert b"loading [weird] name" in plain
    assert b"\x1b[38;" not in plain
    assert b"\x1b[3" not in plain
    done = subprocess.run(command, capture_output=True, check=True)
    assert (done.stdout, done.stderr) == (b"", b"")


def test_a_bar_of_the_next_work_never_shows_the_work_before() -> None:
    """It may be drawn between any two calls: here after each."""
    drawn = on_a_terminal(
        [sys.executable, "-c", TWO_WORKS], {"TERM": "xterm-256color", "COLUMNS": "120", "NO_COLOR": "1"}
    )
    lines = [line for line in drawn.decode().replace("\r", "\n").splitlines() if "MiB" in line]
    assert any("first" in line and "4.0 MiB of 4.0 MiB" in line for line in lines)
    assert any("second" in line and "1.0 MiB of 9.0 MiB" in line for line in lines)
    assert [line for line in lines if ("4.0 MiB" in line) != ("first" in line)] == []
    assert [line for line in lines if "4.0 MiB of" in line and "100%" not in line] == []


def test_long_work_leaves_lines_where_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter((100.0, 101.0, 102.5, 102.5, 103.0, 112.0, 113.0, 113.0))
    monkeypatch.setattr("edge_transformer.cli.console.time.monotonic", lambda: next(clock))
    with progress_bar() as progress:
        for mebibytes in (101, 102, 103, 112, 113):
            progress("downloading x", mebibytes << 20, 200 << 20)
    assert capsys.readouterr().err == "downloading x: 102.0 MiB of 200.0 MiB\ndownloading x: 113.0 MiB of 200.0 MiB\n"


def test_without_a_prompt_on_a_terminal_the_program_asks_for_one_instead_of_hanging() -> None:
    assert b"No prompt" in on_a_terminal([*FAKE, "run", "m"], {})


@pytest.mark.parametrize(
    "arguments", [["run", "m", "hello"], ["run", "m", "hello", "--json"], ["list", "--json"], ["-h"]]
)
def test_a_disk_full_under_standard_output_is_an_error_with_its_reason(arguments: list[str]) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*FAKE, *arguments], stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 9
    expected = b"Error: standard output: No space left on device; make room, or write elsewhere\n"
    assert done.stderr == expected


@pytest.mark.parametrize(
    ("number", "code", "told"),
    [
        (errno.ENOSPC, 9, "folder/file: No space left on device; make room, or write elsewhere"),
        (errno.EROFS, 1, "folder/file: Read-only file system"),
    ],
)
def test_what_the_system_refuses_elsewhere_is_not_laid_to_standard_output(
    number: int, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.exceptions.Exit) as caught, exit_codes():
        raise OSError(number, os.strerror(number), "folder/file")
    assert caught.value.exit_code == code
    assert capsys.readouterr().err == f"Error: {told}\n"


@pytest.mark.parametrize(("error", "said"), [(MemoryError(), ""), (MemoryError("std::bad_alloc"), " (std::bad_alloc)")])
def test_memory_that_is_refused_to_others_than_the_engine_is_no_traceback(
    error: MemoryError, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(click.exceptions.Exit) as ended, exit_codes():
        raise error
    assert ended.value.exit_code == 9
    assert capsys.readouterr().err == (
        f"Error: the system refused memory{said}: free some, or use a smaller model or a shorter context (--ctx)\n"
    )


@pytest.mark.parametrize("arguments", [["pull", "demo"], ["run", "demo", "hello"]])
@pytest.mark.parametrize("variable", ["ETE_CACHE", "XDG_CACHE_HOME"])
@pytest.mark.parametrize("folder", ["/dev/null", "/proc/none", "{tmp_path}/file/cache"])
def test_a_cache_folder_that_cannot_be_made_is_an_error_with_its_name(
    tmp_path: Path, folder: str, variable: str, arguments: list[str]
) -> None:
    (tmp_path / "file").touch()
    folder = folder.format(tmp_path=tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ("ETE_CACHE", "XDG_CACHE_HOME")}
    done = subprocess.run([*REAL, *arguments], capture_output=True, text=True, env={**environment, variable: folder})
    cache = folder if variable == "ETE_CACHE" else f"{folder}/edge-transformer"
    assert done.returncode == 1
    assert done.stderr.startswith(f"Error: the cache folder of {variable}, {cache}, cannot be used: {folder}")
    assert done.stderr.endswith(
        "; name one that can be written with ETE_CACHE (or XDG_CACHE_HOME, which counts where ETE_CACHE is not set)\n"
    )
    assert "Errno" not in done.stderr


@pytest.mark.parametrize("closed", ["2>&-", ">&-", "<&-", "<&- >&- 2>&-"])
def test_closed_standard_streams_are_no_error(closed: str, tmp_path: Path) -> None:
    script = f'"$0" "$@" --max-tokens 3 > {tmp_path}/out 2> {tmp_path}/err {closed}'
    done = subprocess.run(["sh", "-c", script, *FAKE, "run", "fake", "hello there"], timeout=60)
    assert done.returncode == 0
    if closed in ("2>&-", "<&-"):
        assert (tmp_path / "out").read_text().startswith("You said")
    assert "Traceback" not in (tmp_path / "err").read_text()


def test_prompt_from_a_closed_standard_input_is_empty() -> None:
    done = subprocess.run(["sh", "-c", '"$0" "$@" <&-', *FAKE, "run", "fake"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "The prompt is empty" in done.stderr
