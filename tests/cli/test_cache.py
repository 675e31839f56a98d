"""`ete cache` on a folder of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from edge_transformer.cli.main import ete
from edge_transformer.cuda.cubin_cache import KernelCache


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ETE_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(ete, ["cache", *arguments])
    assert result.exit_code == 0, result.output
    return result


def test_an_empty_cache(folder: Path) -> None:
    assert f"No compiled kernels in {folder}" in run().stderr
    assert json.loads(run("--json").stdout) == []
    run("--clear")


def test_showing_and_clearing(folder: Path) -> None:
    for key, size in (("a", 3000), ("b", 2000)):
        KernelCache().put("gemv-sm_75", key, bytes(size))
    KernelCache().put("norm-sm_75", "c", b"")
    (folder / "left.tmp").write_bytes(b"by a process that was killed")
    (folder / "notes.txt").write_text("not ours")
    shown = run()
    assert [line.split()[:3] for line in shown.stdout.splitlines()] == [
        ["gemv-sm_75", "2", "variants"],
        ["norm-sm_75", "1", "variants"],
    ]
    assert "3 kernels" in shown.stderr
    listed = json.loads(run("--json").stdout)
    assert [kernel["name"] for kernel in listed] == ["gemv-sm_75", "gemv-sm_75", "norm-sm_75"]
    assert all(Path(kernel["path"]).stat().st_size == kernel["bytes"] for kernel in listed)
    assert "cleared" in run("--clear").stderr
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
