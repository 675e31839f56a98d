"""ETE_TEST_GPU=1: the tests here that take a Gpu run on the real one instead of the emulated one.

    ETE_TEST_GPU=1 pytest tests/cuda/test_intrinsics.py tests/cuda/test_linear.py ...

What only an emulator can show (orders of threads, missing waits) is not shown then.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

import emulator
import emulator.gpu
from edge_transformer.cuda.runtime import Gpu
from edge_transformer.engine.core import Engine

_opened: list[Gpu] = []

if os.environ.get("ETE_TEST_GPU"):
    from edge_transformer.cuda.driver import CudaGpu

    class RealGpu(CudaGpu):
        """The GPU under the signature of EmulatedGpu. It takes the path of `capability` where the card can."""

        def __init__(
            self,
            seed: int,
            order: str = "random",
            capability: tuple[int, int] = (7, 5),
            total_bytes: int = 0,
            refuse_registration: bool = False,
            check_order: bool = True,
        ) -> None:
            super().__init__(forced_capability=capability)
            _opened.append(self)

    emulator.EmulatedGpu = emulator.gpu.EmulatedGpu = RealGpu  # type: ignore[misc, assignment]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(autouse=True)
def _close_real_gpus() -> Iterator[None]:
    """At the end of the test: the garbage collector would do it while another records a graph."""
    yield
    while _opened:
        _opened.pop().close()


@pytest.fixture
def closing(_close_real_gpus: None) -> Iterator[list[Engine]]:
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        engine.close()
