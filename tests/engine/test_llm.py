"""The public object in careless hands: closed too early, called from several threads, abandoned in the middle."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from edge_transformer import LLM
from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import CapacityError, ContextLengthError, TextError, UsageError
from edge_transformer.formats.mapping import MappedModelFile
from tiny.models import MODELS, TinyModel
from tiny.weights import make_weights
from tiny.write import write_hf

VOCABULARY = 300
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def write_chat_model(folder: Path, name: str = "llama") -> Path:
    """A tiny model with a tokenizer of single bytes and a chat template."""
    config = MODELS[name].config | {"vocab_size": VOCABULARY, "max_position_embeddings": 2048}
    weights = make_weights(TinyModel(name, config, {}))
    path = write_hf(folder, config, weights)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_model(tmp_path_factory.mktemp("models") / "chat")


@pytest.fixture
def llm(path: Path) -> Iterator[LLM]:
    with LLM(path, threads=2) as llm:
        yield llm


def test_what_is_open_is_closed_when_the_engine_cannot_be_made(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    def fail(*arguments: object) -> None:
        raise CapacityError("no room for the workspace")

    def record(owner: type, name: str) -> None:
        original = owner.close  # type: ignore[attr-defined]
        monkeypatch.setattr(owner, "close", lambda self: (closed.append(name), original(self)))

    monkeypatch.setattr(CpuBackend, "reserve", fail)
    record(HostWeights, "weights")
    record(CpuBackend, "backend")
    record(MappedModelFile, "file")
    with pytest.raises(CapacityError, match="no room"):
        LLM(path, threads=1)
    assert closed == ["weights", "backend", "file"]


def test_stream_of_a_closed_model_is_an_error(llm: LLM) -> None:
    stream = llm.stream("one", ignore_eos=True)
    next(stream)
    llm.close()
    with pytest.raises(UsageError, match="closed"):
        list(stream)
    assert stream.result.ids


@pytest.mark.parametrize("use", [lambda llm: llm.generate("one"), lambda llm: list(llm.score_blocks([1, 2]))])
def test_closed_model_says_so(llm: LLM, use: Callable[[LLM], Any]) -> None:
    llm.close()
    with pytest.raises(UsageError, match="this LLM has been closed"):
        use(llm)


def test_closing_while_another_thread_generates(path: Path) -> None:
    for _ in range(5):
        outcome: list[object] = []
        llm = LLM(path, threads=2)
        stream = llm.stream("one", max_tokens=1500, ignore_eos=True)
        next(stream)

        def iterate(stream: Iterator[str] = stream, outcome: list[object] = outcome) -> None:
            try:
                outcome.append(len(list(stream)))
            except UsageError as error:
                outcome.append(str(error))

        thread = threading.Thread(target=iterate)
        thread.start()
        llm.close()
        thread.join(30)
        assert outcome == ["this model has been closed"]


def test_closing_a_stream_that_another_thread_iterates_ends_it(llm: LLM) -> None:
    stream = llm.stream("one", max_tokens=1500, ignore_eos=True)
    next(stream)
    thread = threading.Thread(target=lambda: list(stream))
    thread.start()
    stream.close()
    thread.join(30)
    assert not thread.is_alive()
    assert stream.result.finish_reason == "interrupted"


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8])
def test_scores_of_tokens_in_an_array(llm: LLM, kind: type) -> None:
    (expected,) = [block.copy() for _, block in llm.score_blocks([1, 2, 250])]
    (block,) = [block for _, block in llm.score_blocks(np.array([1, 2, 250], kind))]
    assert np.array_equal(block, expected)


@pytest.mark.parametrize("ids", [[1.0], ["1"], "1", np.zeros((2, 2), int), np.array([1.5]), [None]])
def test_what_is_no_token_is_not_scored(llm: LLM, ids: Any) -> None:
    with pytest.raises(UsageError, match="whole numbers"):
        list(llm.score_blocks(ids))


def test_scores_do_not_change_by_calls_between_blocks(llm: LLM) -> None:
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 600).tolist()  # more than one chunk
    undisturbed = [block.copy() for _, block in llm.score_blocks(ids)]
    disturbed = []
    for _, block in llm.score_blocks(ids):
        list(llm.score_blocks(ids[:90:-1]))
        llm.generate("one", max_tokens=2)
        disturbed.append(block)
    for ours, theirs in zip(disturbed, undisturbed, strict=True):
        assert np.array_equal(ours, theirs)


def test_abandoned_scores_do_not_stop_other_threads(llm: LLM) -> None:
    blocks = llm.score_blocks(list(range(40)))
    next(blocks)
    thread = threading.Thread(target=lambda: llm.generate("one", max_tokens=2), daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    blocks.close()


def test_interleaved_streams_equal_lone_ones(llm: LLM) -> None:
    settings: dict[str, Any] = {"max_tokens": 20, "temperature": 1.0, "seed": 5, "ignore_eos": True}
    alone = [llm.generate(prompt, **settings).ids for prompt in ("one", "another")]
    streams = [llm.stream(prompt, **settings) for prompt in ("one", "another")]
    for _ in range(20):
        for stream in streams:
            next(stream, None)
    for stream, ids in zip(streams, alone, strict=True):
        list(stream)
        assert stream.result.ids == ids


def test_prompt_given_up_in_the_middle_counts_what_was_processed(llm: LLM) -> None:
    stream = llm.stream("x" * 1200, prefill_progress=lambda done, total: stream.cancel())
    assert list(stream) == []
    assert stream.result.finish_reason == "interrupted"
    assert stream.result.timings.processed_tokens == 512
    assert stream.result.timings.prompt_tokens == 1200


def test_error_in_the_callers_loop_leaves_the_model_usable(llm: LLM) -> None:
    expected = llm.generate("one", max_tokens=5).ids
    with pytest.raises(ZeroDivisionError):
        fail_on_first(llm.stream("one"))
    assert llm.generate("one", max_tokens=5).ids == expected


def fail_on_first(pieces: Iterator[str]) -> None:
    for _ in pieces:
        raise ZeroDivisionError


@pytest.mark.parametrize("length", [0, -1, 2049, 10**30, 2.5])
def test_context_length_out_of_range_is_refused(path: Path, length: Any) -> None:
    with pytest.raises(UsageError, match="context length"):
        LLM(path, context_length=length)


@pytest.mark.parametrize("context", [4, 5, 17])
def test_prompt_and_answer_fill_the_context_and_no_more(path: Path, context: int) -> None:
    """Three tokens of prompt: the answer is the same as in a longer context, as far as it goes."""
    with LLM(path, threads=1) as llm:
        longer = llm.generate("one", max_tokens=20, ignore_eos=True)
    with LLM(path, threads=1, context_length=context) as llm:
        answer = llm.generate("one", max_tokens=20, ignore_eos=True)
        assert len(answer.prompt_ids) == 3
        assert answer.ids == longer.ids[: context - 3]
        assert answer.finish_reason == "context"
        full = "x" * context
        with pytest.raises(ContextLengthError, match=f"has {context} tokens.*holds {context} for prompt and answer"):
            llm.generate(full)
        assert sum(len(block) for _, block in llm.score_blocks(llm.encode(full))) == context


def test_raw_prompt_must_be_text(llm: LLM) -> None:
    with pytest.raises(UsageError, match="raw=True"):
        llm.generate([{"role": "user", "content": "one"}], raw=True)
    with pytest.raises(TextError, match="at least one message"):
        llm.generate([])


def test_a_generation_prints_as_its_text(llm: LLM) -> None:
    generation = llm.generate("a", raw=True, max_tokens=4, ignore_eos=True)
    assert f"{generation}" == str(generation) == generation.text


@pytest.mark.parametrize("raw", [True, False])
def test_an_empty_prompt_is_refused(llm: LLM, raw: bool) -> None:
    for use in (llm.encode, llm.generate):
        with pytest.raises(UsageError, match="the prompt is empty"):
            use("", raw=raw)


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (5, "prompt is 5; allowed: a text, or a list of messages"),
        (None, "prompt is None; allowed: a text, or a list of messages"),
        (b"hello", "prompt is b'hello'; allowed: a text, or a list of messages"),
        (
            {"role": "user", "content": "one"},
            "prompt is {'role': 'user', 'content': 'one'}; allowed: a text, or",
        ),
        (["one"], "prompt[0] is 'one'; allowed: a message such as"),
        (
            [{"role": "user", "content": "one"}, {"role": "robot", "content": "two"}],
            "prompt[1]['role'] is 'robot'; allowed: system, developer, user, assistant, tool",
        ),
        ([{"content": "one"}], "prompt[0]['role'] is None; allowed: system, developer"),
        ([{"role": ["user"], "content": "one"}], "prompt[0]['role'] is ['user']; allowed: system, developer"),
        ([{"role": "user", "content": 5}], "prompt[0]['content'] is 5; allowed: a text"),
        ([{"role": "user", "text": "one"}], "prompt[0]['content'] is None; allowed: a text"),
        ([{"role": "tool", "content": None}], "prompt[0]['content'] is None; allowed: a text"),
        (range(10**9), "prompt[0] is 0; allowed: a message such as"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_value(llm: LLM, prompt: Any, told: str) -> None:
    for use in (llm.encode, llm.generate, llm.stream):
        with pytest.raises(UsageError, match=re.escape(told)):
            use(prompt)
    with pytest.raises(UsageError):
        llm.encode(prompt, raw=True)


def test_a_developer_is_a_system(llm: LLM) -> None:
    """As for the server. What the caller gave is left as it is."""
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "one"}]
    assert llm.encode(messages) == llm.encode([{"role": "system", "content": "Be brief."}, messages[1]])
    assert messages[0]["role"] == "developer"


def test_settings_that_are_none_are_refused_by_their_value(llm: LLM, path: Path) -> None:
    wrong: Any = {"max_tokens": 3}
    for use in (llm.generate, llm.stream):
        with pytest.raises(UsageError, match=r"config is \{'max_tokens': 3\}; allowed: a GenerationConfig, or"):
            use("one", wrong)
    for model in (3, None, b"demo", ["demo"]):
        with pytest.raises(UsageError, match=rf"model is {re.escape(repr(model))}; allowed: a name or path"):
            LLM(model)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="threads is 0; give a whole number from 1 to"):
        LLM(path, threads=0)
    with pytest.raises(UsageError, match=r"gpu is 'T1000'; allowed: a GpuSettings"):
        LLM(path, threads=1, backend="cuda", gpu="T1000")  # type: ignore[arg-type]


def test_a_prompt_too_long_names_the_way_to_a_longer_context_where_there_is_one(path: Path) -> None:
    told = r"or raise the context length \(context_length in Python, --ctx at the command line\), here up to 2048$"
    with LLM(path, threads=1, context_length=8) as llm, pytest.raises(ContextLengthError, match=told):
        llm.generate("x" * 20)
    with LLM(path, threads=1) as llm, pytest.raises(ContextLengthError, match=r"this model was made for no more$"):
        llm.generate("x" * 3000)
