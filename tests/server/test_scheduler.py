"""The scheduler: whoever shares a pass, waits, leaves or loses its memory, every answer is the one it gives alone."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from edge_transformer import LLM, GenerationConfig
from edge_transformer.engine.answer import Piece
from edge_transformer.engine.recurrent import CHECKPOINT_BORDER
from edge_transformer.engine.request import Limits, QueueFullError, Request, StoppedError
from edge_transformer.engine.scheduler import Scheduler
from edge_transformer.errors import NumericError, UsageError
from server.tiny_server import Collected, make_scheduler, submit, write_chat_model

GREEDY = GenerationConfig(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_5"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=1) as llm:
        yield llm


@pytest.fixture
def scheduler(llm: LLM) -> Iterator[Scheduler]:
    scheduler = make_scheduler(llm)
    yield scheduler
    scheduler.stop()
    assert scheduler.memory.used_bytes == 0


def text_of(length: int, seed: int) -> str:
    return "".join(random.Random(seed).choices("abcdefgh ", k=length))


def alone(path: Path, prompt: str, config: GenerationConfig, seed: int) -> list[int]:
    """What the model answers in a process of one request."""
    with LLM(path, threads=1) as llm:
        stream = llm.stream(prompt, config, raw=True, seed=seed)
        for _ in stream:
            pass
        return list(stream.result.ids)


CONFIGS = [
    GREEDY,
    GenerationConfig(max_tokens=20, temperature=1.0, ignore_eos=True),
    GenerationConfig(max_tokens=9, temperature=0.8, top_p=0.9, repetition_penalty=1.2, ignore_eos=True),
    GenerationConfig(max_tokens=15, temperature=1.5, min_p=0.02, frequency_penalty=0.5),
    GenerationConfig(max_tokens=30, temperature=1.0, stop=("e", "a")),
]


def mixed_load(path: Path, scheduler: Scheduler, count: int, llm: LLM, seed: int) -> list[tuple[list[int], list[int]]]:
    """Requests of all sizes, some joining late and some aborted: (ids, ids alone) of those that ended."""
    draw = random.Random(seed)
    waiting: list[tuple[str, GenerationConfig, int, Collected]] = []
    for index in range(count):
        prompt = text_of(draw.choice([1, 3, 63, 64, 65, 130, 600, 1100]), draw.randrange(6))
        config = draw.choice(CONFIGS)
        request, heard = submit(scheduler, llm.tokenizer.encode(prompt), config, (index,))
        if draw.random() < 0.25:
            time.sleep(draw.random() * 0.02)
            scheduler.cancel(request)
        else:
            waiting.append((prompt, config, index, heard))
        time.sleep(draw.random() * 0.01)
    return [(heard.wait().ids(), alone(path, prompt, config, index)) for prompt, config, index, heard in waiting]


@pytest.mark.parametrize("count", [1, 4, 16, 64])
def test_answers_are_those_given_alone(path: Path, llm: LLM, count: int) -> None:
    scheduler = make_scheduler(llm, Limits(sequences=count))
    for together, alone_ids in mixed_load(path, scheduler, count + 2, llm, seed=count):
        assert together == alone_ids
    if count >= 16:  # fewer may each have ended before the next comes
        assert scheduler.statistics.batch_sequences.sum > scheduler.statistics.batch_sequences.count
    scheduler.stop()
    assert scheduler.memory.used_bytes == 0


@pytest.mark.parametrize("on_host", [True, False])
def test_answers_survive_the_loss_of_their_memory(path: Path, llm: LLM, on_host: bool) -> None:
    """Their state is computed again, or, as if it lay on a GPU, moved away and back."""
    budget = 5 * sum(layer.tile_bytes for layer in llm.engine.state_shape.layers)  # one context, and a tile
    scheduler = make_scheduler(llm, Limits(sequences=16, pass_tokens=64), kv_budget=budget)
    scheduler.memory.on_host = on_host
    for together, alone_ids in mixed_load(path, scheduler, 14, llm, seed=2):
        assert together == alone_ids
    # Prompts of one tile each are let in together; as they grow into a second one, not all can stay.
    long = GenerationConfig(max_tokens=90, temperature=1.0, ignore_eos=True)
    prompts = [llm.tokenizer.encode(text_of(500, 10 + seed)) for seed in range(8)]
    heard = [(seed, submit(scheduler, prompt, long, (seed,))[1]) for seed, prompt in enumerate(prompts)]
    for seed, answer in heard:
        assert answer.wait().ids() == alone(path, text_of(500, 10 + seed), long, seed)
    assert scheduler.memory.peak_bytes <= budget
    if path.name == "llama":  # the other's layers hold a window each, so that more of its sequences fit
        assert scheduler.statistics.preemptions > 0
    scheduler.stop()


def test_choices_share_their_prompt(path: Path, llm: LLM, scheduler: Scheduler) -> None:
    config = GenerationConfig(max_tokens=10, temperature=1.0, ignore_eos=True)
    prompt = text_of(300, 5)
    _, heard = submit(scheduler, llm.tokenizer.encode(prompt), config, (7, 8, 9))
    heard.wait()
    assert [heard.ids(i) for i in range(3)] == [alone(path, prompt, config, seed) for seed in (7, 8, 9)]
    assert scheduler.statistics.prompt_tokens == 300


def test_a_prompt_that_begins_like_an_earlier_one_is_read_from_there(llm: LLM, scheduler: Scheduler) -> None:
    prompt = llm.tokenizer.encode(text_of(700, 3))
    _, first = submit(scheduler, prompt, GREEDY)
    first.wait()
    _, again = submit(scheduler, prompt, GREEDY)
    assert again.wait().ids() == first.ids()
    # Recurrent state goes on from a checkpoint, KV tiles from anywhere.
    border = 1 if llm.engine.state_shape.recurrent is None else CHECKPOINT_BORDER
    assert again.cached == 699 - 699 % border
    before = scheduler.statistics.prompt_tokens
    _, other = submit(scheduler, prompt[:650] + llm.tokenizer.encode("xyz"), GREEDY)
    other.wait()
    assert other.cached == 650 - 650 % border
    assert scheduler.statistics.prompt_tokens == before + 653 - other.cached


def test_an_aborted_prompt_is_taken_up_again(llm: LLM) -> None:
    scheduler = make_scheduler(llm, Limits(pass_tokens=64))
    _, running = submit(scheduler, [1, 2, 3], GenerationConfig(max_tokens=400, ignore_eos=True))
    running.first.wait(30)
    prompt = llm.tokenizer.encode(text_of(1500, 4))
    request, aborted = submit(scheduler, prompt, GREEDY)
    while not aborted.done_tokens:
        time.sleep(0.001)
    scheduler.cancel(request)
    _, again = submit(scheduler, prompt, GREEDY)
    again.wait()
    assert not aborted.done.is_set()
    assert again.cached >= 64
    scheduler.stop()


def test_other_answers_go_on_while_a_prompt_is_read(llm: LLM) -> None:
    scheduler = make_scheduler(llm, Limits(pass_tokens=64))
    _, running = submit(scheduler, [1, 2, 3], GenerationConfig(max_tokens=200, ignore_eos=True))
    running.first.wait(30)
    _, long = submit(scheduler, llm.tokenizer.encode(text_of(1900, 6)), GREEDY)
    long.first.wait(30)
    assert len(running.ids()) >= 1900 // 64
    scheduler.stop()


def test_a_short_prompt_does_not_wait_for_a_long_one(llm: LLM) -> None:
    scheduler = make_scheduler(llm, Limits(pass_tokens=128))
    _, running = submit(scheduler, [1], GenerationConfig(max_tokens=300, ignore_eos=True))
    running.first.wait(30)
    _, long = submit(scheduler, llm.tokenizer.encode(text_of(1900, 6)), GREEDY)
    _, short = submit(scheduler, llm.tokenizer.encode(text_of(40, 7)), GREEDY)
    short.first.wait(30)
    assert not long.first.is_set()
    scheduler.stop()


def test_cancelling_ends_a_pass_in_the_middle(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(llm)
    step = llm.engine.step
    asked: list[bool] = []

    def slow_step(chunks, cancelled):  # type: ignore[no-untyped-def]
        def look() -> bool:
            scheduler.cancel(request)
            asked.append(cancelled())
            return asked[-1]

        return step(chunks, look)

    monkeypatch.setattr(llm.engine, "step", slow_step)
    request, heard = submit(scheduler, llm.tokenizer.encode(text_of(300, 1)), GREEDY)
    deadline = time.monotonic() + 30
    while scheduler.statistics.cancelled == 0 and time.monotonic() < deadline:
        time.sleep(0.002)
    assert asked == [True]
    assert not heard.done.is_set()
    assert scheduler.running == scheduler.waiting == 0
    scheduler.stop()


def test_a_request_that_cannot_be_answered_ends_alone(llm: LLM, scheduler: Scheduler) -> None:
    nothing = GenerationConfig(logit_bias=dict.fromkeys(range(300), float("-inf")))
    _, bad = submit(scheduler, [1, 2], nothing)
    _, good = submit(scheduler, [1, 2], GREEDY)
    assert isinstance(bad.wait().error, UsageError)
    assert good.wait().error is None
    assert scheduler.failure is None


def test_a_request_let_go_of_when_it_has_ended_is_no_cancelled_one(llm: LLM, scheduler: Scheduler) -> None:
    class LetsGo(Collected):
        def piece(self, choice: int, piece: Piece) -> None:
            if piece.finish_reason is not None:
                scheduler.cancel(request)
            super().piece(choice, piece)

    request = Request([1, 2, 3], GREEDY, (0,), LetsGo())
    scheduler.submit(request)
    cast(LetsGo, request.listener).wait()
    submit(scheduler, [1, 2], GREEDY)[1].wait()
    assert scheduler.statistics.cancelled == 0


def test_a_fault_of_the_engine_is_told_to_all(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[Exception] = []
    scheduler = Scheduler(
        llm.engine, llm.tokenizer, llm.end_token_ids, llm.context_length, Limits(), 1 << 30, failures.append
    )

    def fail(*arguments: object) -> None:
        raise NumericError("NaN after layer 1")

    # A GPU that has failed does not take its memory back either.
    monkeypatch.setattr(scheduler.memory, "give_back", fail)

    _, running = submit(scheduler, [1, 2, 3], GenerationConfig(max_tokens=1000, ignore_eos=True))
    running.first.wait(30)
    monkeypatch.setattr(llm.engine, "step", fail)
    assert isinstance(running.wait().error, NumericError)
    with pytest.raises(StoppedError):
        submit(scheduler, [1], GREEDY)
    assert isinstance(failures[0], NumericError)
    scheduler.stop()


def test_stopping_tells_those_that_are_left(llm: LLM) -> None:
    scheduler = make_scheduler(llm, Limits(sequences=1))
    _, running = submit(scheduler, [1, 2, 3], GenerationConfig(max_tokens=1500, ignore_eos=True))
    _, waiting = submit(scheduler, [1], GREEDY)
    running.first.wait(30)
    scheduler.stop()
    assert isinstance(running.wait().error, StoppedError)
    assert isinstance(waiting.wait().error, StoppedError)


def test_limits_are_kept(llm: LLM) -> None:
    scheduler = make_scheduler(llm, Limits(sequences=1, queue=2))
    heard = [submit(scheduler, [1, 2, 3], GenerationConfig(max_tokens=600, ignore_eos=True))[1]]
    heard[0].first.wait(30)
    heard += [submit(scheduler, [1, 2, 3], GREEDY)[1] for _ in range(2)]
    with pytest.raises(QueueFullError, match="2 requests"):
        submit(scheduler, [1], GREEDY)
    with pytest.raises(UsageError, match="n is 2"):
        submit(scheduler, [1], GREEDY, (1, 2))
    assert scheduler.running == 1
    scheduler.stop()


def test_a_budget_that_holds_no_context_is_refused(llm: LLM) -> None:
    with pytest.raises(UsageError, match="--kv-budget"):
        make_scheduler(llm, kv_budget=1 << 16)
    tile = sum(layer.tile_bytes for layer in llm.engine.state_shape.layers)
    shortened = Scheduler(llm.engine, llm.tokenizer, (), 2048, Limits(), 5 * tile // 2, shorten_context=True)
    assert shortened.context_length == 1024
    shortened.stop()
    with pytest.raises(UsageError, match="500 sequences"):
        make_scheduler(llm, Limits(sequences=500))
    with pytest.raises(UsageError, match="pass_tokens is 63"):
        Limits(pass_tokens=63)
