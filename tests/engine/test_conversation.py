"""Conversations: every token is computed once, and a call says what it would say had there been no call before it.

Tokens of an answer were computed one by one, those of a prompt many at once: sums are rounded otherwise. With a KV
cache in f32 that changes log-probabilities by less than LOGPROB_BOUND. A cache in bf16 rounds much more coarsely, and
keys that differ in the last bit of an f32 may round to two neighbours: what then differs is what bf16 costs anyway.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edge_transformer import LLM
from edge_transformer.cli.conversation import Conversation
from edge_transformer.engine.core import Engine
from edge_transformer.engine.generation import Generation
from engine.test_llm import VOCABULARY, write_chat_model
from paths import hybrid_path, smollm2_path

TURNS = 10
LOGPROB_BOUND = 1e-4
SAME_BITS = 1e-12  # two ways of taking the logarithm of a softmax in fp64
BF16_KV_MEAN_KL_BOUND = 5e-5


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("conversations")
    return {name: write_chat_model(folder / name, name) for name in ("qwen3_5", "llama", "gemma3")}


@pytest.fixture
def talk(paths: dict[str, Path], request: pytest.FixtureRequest) -> Iterator[Talk]:
    with LLM(paths[request.param], threads=2, kv_dtype="f32") as llm:
        yield Talk(llm)


class Talk:
    """A conversation in token ids: tiny random models do not speak in characters."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.rows = 0
        self._original: Any = llm.engine.step
        llm.encode = lambda prompt, raw=False: list(prompt)  # type: ignore[method-assign, assignment, misc]
        llm.engine.step = self._count  # type: ignore[method-assign, assignment]

    def ask(self, ids: list[int], **settings: Any) -> Generation:
        return self.llm.generate(ids, logprobs=20, ignore_eos=True, **settings)  # type: ignore[arg-type]

    def _count(self, chunks: Any, cancelled: Any = None) -> Any:
        self.rows += sum(len(chunk.tokens) for chunk in chunks)
        return self._original(chunks, cancelled)


def random_ids(count: int, seed: int) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, VOCABULARY, count).tolist()
    return ids


def recomputed(engine: Engine, ids: list[int]) -> npt.NDArray[np.float64]:
    """Log-probabilities after the last of `ids`, from nothing."""
    sequence = engine.new_sequence()
    logits = engine.prefill(sequence, ids)
    sequence.close()
    assert logits is not None
    wide = logits.astype(np.float64) - logits.max()
    result: npt.NDArray[np.float64] = wide - np.log(np.exp(wide).sum())
    return result


def assert_as_recomputed(engine: Engine, ids: list[int], answer: Generation, bound: float) -> None:
    assert answer.logprobs is not None
    expected = recomputed(engine, ids)
    errors = [abs(logprob - expected[token]) for token, logprob in answer.logprobs[0].top]
    assert max(errors) <= bound, max(errors)


@pytest.mark.parametrize("talk", ["qwen3_5", "llama", "gemma3"], indirect=True)
def test_ten_turns_compute_each_token_once(talk: Talk) -> None:
    ids: list[int] = []
    for turn in range(TURNS):
        ids += random_ids(37 + turn, seed=turn)
        answer = talk.ask(ids, max_tokens=23)
        # The last token of an answer is not computed before a prompt holds it.
        assert talk.rows == len(ids) + len(answer.ids) - 1
        assert answer.timings.processed_tokens == 37 + turn + (1 if turn else 0)
        ids += answer.ids
    assert len(ids) > 600


@pytest.mark.parametrize("talk", ["qwen3_5", "llama", "gemma3"], indirect=True)
def test_every_turn_says_what_a_fresh_start_says(talk: Talk) -> None:
    ids: list[int] = []
    for turn in range(TURNS):
        ids += random_ids(50, seed=turn)
        answer = talk.ask(ids, max_tokens=11)
        assert_as_recomputed(talk.llm.engine, ids, answer, LOGPROB_BOUND)
        ids += answer.ids


@pytest.mark.parametrize("talk", ["qwen3_5", "llama", "gemma3"], indirect=True)
@pytest.mark.parametrize("length", [30, 64, 100, 700])
def test_the_same_prompt_twice_has_the_same_bits(talk: Talk, length: int) -> None:
    ids = random_ids(length, seed=1)
    first = talk.ask(ids, max_tokens=20)
    talk.rows = 0
    second = talk.ask(ids, max_tokens=20)
    assert second.ids == first.ids
    assert second.logprobs == first.logprobs
    assert second.timings.processed_tokens <= 64


@pytest.mark.parametrize("talk", ["qwen3_5", "llama"], indirect=True)
def test_prompts_with_the_same_beginning_have_the_bits_of_a_fresh_start(talk: Talk) -> None:
    """Whatever was asked before: the tokens both have in common were prompt tokens in both."""
    ids = random_ids(500, seed=1)
    talk.ask(ids, max_tokens=9)
    for common in (499, 450, 448, 300, 64, 10):
        other = ids[:common] + random_ids(40, seed=common)
        answer = talk.ask(other, max_tokens=1)
        assert_as_recomputed(talk.llm.engine, other, answer, SAME_BITS)
        talk.ask(ids, max_tokens=9)


@pytest.mark.parametrize("talk", ["qwen3_5"], indirect=True)
def test_an_edited_message_is_computed_from_the_checkpoint_before_it(talk: Talk) -> None:
    ids: list[int] = []
    starts: list[int] = []
    for turn in range(TURNS):
        starts.append(len(ids))
        ids += random_ids(60, seed=turn)
        ids += talk.ask(ids, max_tokens=30).ids
    for turn in (7, 4, 1):
        talk.rows = 0
        edited = ids[: starts[turn] + 20] + random_ids(33, seed=99 + turn)
        answer = talk.ask(edited, max_tokens=1)
        # There is a checkpoint where this message's prompt went on from the answer before (without its last token).
        assert talk.rows == answer.timings.processed_tokens <= len(edited) - (starts[turn] - 1)
        assert_as_recomputed(talk.llm.engine, edited, answer, LOGPROB_BOUND)


@pytest.mark.parametrize("talk", ["qwen3_5", "llama"], indirect=True)
def test_an_answer_that_was_stopped_can_be_gone_on_from(talk: Talk) -> None:
    ids = random_ids(100, seed=1)
    stream = talk.llm.stream(ids, ignore_eos=True, max_tokens=50, logprobs=20)  # type: ignore[arg-type]
    while len(stream.result.ids) < 7:
        next(stream, None)
    stream.cancel()
    list(stream)
    ids += [*stream.result.ids, *random_ids(20, seed=2)]
    answer = talk.ask(ids, max_tokens=1)
    assert answer.timings.processed_tokens <= 22
    assert_as_recomputed(talk.llm.engine, ids, answer, LOGPROB_BOUND)


@pytest.mark.real_model
@pytest.mark.parametrize("kv_dtype", ["bf16", "f32"])
@pytest.mark.parametrize("name", ["demo", "hybrid"])
def test_ten_turns_of_a_real_model(name: str, kv_dtype: str) -> None:
    path = smollm2_path() if name == "demo" else hybrid_path()
    divergences: list[float] = []
    with LLM(path, threads=2, kv_dtype=kv_dtype, context_length=2048) as llm:
        talk = Talk(llm)
        ids: list[int] = []
        for turn in range(TURNS):
            question = f"Question {turn}: what is {turn} times {turn + 1}, and why?\nAnswer:"
            ids += llm.tokenizer.encode(question, add_bos=False)
            answer = talk.ask(ids, max_tokens=24)
            assert talk.rows == len(ids) + len(answer.ids) - 1
            if kv_dtype == "f32":
                assert_as_recomputed(llm.engine, ids, answer, LOGPROB_BOUND)
            assert answer.logprobs is not None
            expected = recomputed(llm.engine, ids)
            divergences.append(sum(np.exp(p) * (p - expected[token]) for token, p in answer.logprobs[0].top))
            talk.rows = len(ids) + len(answer.ids) - 1  # without those of the comparison
            ids += answer.ids
    assert np.mean(divergences) <= BF16_KV_MEAN_KL_BOUND


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["demo", "hybrid"])
def test_ten_turns_of_a_chat(name: str) -> None:
    """Messages, which are rendered and tokenized anew in every turn, with the text of the answers so far."""
    path = smollm2_path() if name == "demo" else hybrid_path()
    with LLM(path, threads=2, context_length=4096) as llm:
        conversation = Conversation(llm, max_tokens=40)
        seen = 0
        for turn in range(TURNS):
            question = f"Question {turn}: what is {turn} plus {turn + 1}?"
            messages, _, _ = conversation.open_turn(question)
            answer = llm.generate(messages, max_tokens=30)
            conversation.close_turn(question, answer)
            last = 1 if turn else 0  # the last token of the answer before
            assert answer.timings.processed_tokens == len(answer.prompt_ids) - seen + last
            seen = len(answer.prompt_ids) + len(answer.ids)
