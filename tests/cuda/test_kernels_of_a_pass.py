"""Which kernels a pass launches, in which order: what the emulator, which compiles each at its first launch and runs
them one after another, would not notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda.opened import BUDGET, MODES, model_path, open_on_gpu, tokens_of
from cuda.test_compile_matrix import all_sources
from edge_transformer.cuda.compiler import KERNEL_FOLDER
from edge_transformer.cuda.runtime import Kernel, KernelSource
from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.placement.plan import HeadPlace, Wishes
from emulator import EmulatedGpu

ON_THE_CPU = Wishes(BUDGET, resident_layers=0, slots=2, kv_offload=True, head=HeadPlace.CPU)


class ListeningGpu(EmulatedGpu):
    """`prepared`: what was compiled at load; `launched`: what was queued since, in its order."""

    def __init__(self) -> None:
        super().__init__(0)
        self.prepared: set[KernelSource] = set()
        self.launched: list[KernelSource] = []

    def prepare(self, sources: Sequence[KernelSource]) -> None:
        self.prepared |= set(sources)
        super().prepare(sources)

    def launch(self, kernel: Kernel, *arguments: Any, **more: Any) -> None:
        self.launched.append(kernel.source)
        super().launch(kernel, *arguments, **more)


def passes(engine: Engine, gpu: ListeningGpu) -> list[list[KernelSource]]:
    """What a pass of a prompt launches, and one of a new token, each up to its logits."""
    sequence, launched = engine.new_sequence(), []
    for count, kind in ((9, "prompt"), (1, "decode")):
        gpu.launched.clear()
        result = engine.step([Chunk(sequence, tokens_of(count), kind, "last")])  # type: ignore[arg-type]
        assert result is not None
        assert result.likeliest() == [int(np.argmax(result.logits()))]
        launched.append(list(gpu.launched))
    return launched


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_who_starts_early_waits_and_nobody_else_does(capability: tuple[int, int]) -> None:
    for source in all_sources(capability):
        waits = "wait_for_kernels_ahead();" in (KERNEL_FOLDER / source.file).read_text(encoding="utf-8")
        assert waits == source.early_start, source


@pytest.mark.parametrize("mode", ["all resident", "all streamed, KV cache on the host"])
def test_the_batch_has_arrived_before_a_kernel_may_start_early(folder: Path, closing: list[Engine], mode: str) -> None:
    """Its arrays, cos and sin of the one rope, and the embedding's rows are read by a kernel each, which waits for the
    one ahead. The first that starts early waits for the last of them before it reads the rows, not before the arrays.
    """
    gpu = ListeningGpu()
    closing.append(open_on_gpu(model_path(folder, "llama"), MODES[mode], gpu=gpu).engine)
    for launched in passes(closing[0], gpu):
        first = next(number for number, source in enumerate(launched) if source.early_start)
        assert [source.entry for source in launched[:first]] == ["read_host_rows"] * 4


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_5"])
@pytest.mark.parametrize("wishes", [*MODES.values(), ON_THE_CPU], ids=[*MODES, "least"])
def test_no_pass_waits_for_a_compiler(folder: Path, closing: list[Engine], name: str, wishes: Wishes) -> None:
    gpu = ListeningGpu()
    closing.append(open_on_gpu(model_path(folder, name), wishes, gpu=gpu).engine)
    for launched in passes(closing[0], gpu):
        assert set(launched) <= gpu.prepared
