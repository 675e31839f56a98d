"""Both parsers on broken files: an error that names the file, or a model; never a crash, a hang or much memory."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from formats import format_fuzzing

SAMPLES = format_fuzzing.sample_models()
BOMBS = format_fuzzing.bomb_models()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.mark.parametrize("sample", range(len(SAMPLES)))
def test_samples_are_valid(folder: Path, sample: int) -> None:
    name, files = SAMPLES[sample]
    format_fuzzing.write_model(folder, files)
    assert format_fuzzing.check_model(folder, name)


@settings(max_examples=800)
@given(seed=st.integers(0, 1 << 40))
def test_injured_files(folder: Path, seed: int) -> None:
    format_fuzzing.fuzz_once(seed, folder, SAMPLES)


@settings(max_examples=300)
@given(content=st.binary(max_size=400), name=st.sampled_from(["x.gguf", "x.safetensors"]))
def test_any_bytes_behind_a_valid_start(folder: Path, content: bytes, name: str) -> None:
    for start in (b"", b"GGUF\3\0\0\0", len(content).to_bytes(8, "little")):
        format_fuzzing.write_model(folder, {name: start + content})
        format_fuzzing.check_model(folder, name)


@pytest.mark.parametrize("bomb", range(len(BOMBS)))
def test_bombs(folder: Path, bomb: int) -> None:
    """Much out of little: bounded by the size of the file and the constants that the parsers name."""
    name, files = BOMBS[bomb]
    format_fuzzing.write_model(folder, files)
    format_fuzzing.check_model(folder, name, constant=32 << 20)
