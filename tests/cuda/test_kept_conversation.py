"""A GPU has room for one sequence, which the conversation kept for the next call holds: whoever needs it gets it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import emulator
from edge_transformer import LLM, GpuSettings
from edge_transformer.cuda import driver
from edge_transformer.errors import CapacityError
from engine.test_llm import VOCABULARY, write_chat_model

CONTEXT = 600  # a second KV tile of each layer is needed beyond 512

FIRST = "a" * 500
IDS = np.random.default_rng(5).integers(0, VOCABULARY, 530).tolist()


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("kept")
    return {name: write_chat_model(folder / name, name) for name in ("qwen3_5", "llama")}


@pytest.fixture(params=["qwen3_5", "llama"])
def opened(
    paths: dict[str, Path], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], LLM]]:
    """Opens a model whose recurrent state, or whose KV cache, has room for one sequence of the whole context."""
    monkeypatch.setattr(driver, "CudaGpu", lambda *_, **__: emulator.EmulatedGpu(0))
    settings = GpuSettings(vram_bytes=1 << 28, kv_offload=request.param == "qwen3_5", lm_head="gpu")
    llms: list[LLM] = []

    def open_model() -> LLM:
        llms.append(LLM(paths[request.param], threads=1, backend="cuda", gpu=settings, context_length=CONTEXT))
        return llms[-1]

    yield open_model
    for llm in llms:
        llm.close()


def scores(llm: LLM) -> np.ndarray:
    return np.concatenate([block.copy() for _, block in llm.score_blocks(IDS)])


def answer(llm: LLM) -> tuple[int, ...]:
    return llm.generate("x" * 520, max_tokens=2, ignore_eos=True).ids


def test_scores_after_an_answer(opened: Callable[[], LLM]) -> None:
    expected = scores(opened())
    llm = opened()
    llm.generate(FIRST, max_tokens=20, ignore_eos=True)
    assert np.array_equal(scores(llm), expected)


def test_answers_of_which_nothing_is_wanted_any_more(opened: Callable[[], LLM]) -> None:
    """A stream that was never begun, one that was left in the middle, one that ended while another was waiting."""
    expected = answer(opened())
    llm = opened()
    with llm.stream("x" * 515):
        pass
    assert answer(llm) == expected
    llm.stream("x" * 515)
    assert answer(llm) == expected
    for _ in llm.stream(FIRST, max_tokens=30, ignore_eos=True):
        break
    assert answer(llm) == expected
    waiting, other = (llm.stream("x" * 520, max_tokens=2, ignore_eos=True) for _ in range(2))
    list(other)
    list(waiting)
    assert waiting.result.ids == other.result.ids == expected


def test_what_is_in_use_is_not_given_up(opened: Callable[[], LLM]) -> None:
    llm = opened()
    stream = llm.stream("x" * 520, max_tokens=3, ignore_eos=True)
    next(stream)
    with pytest.raises(CapacityError, match="in use"):
        scores(llm)
    list(stream)
    assert len(stream.result.ids) == 3
    scores(llm)
