"""OpenAI's own client against the server: whole and streamed answers, all parameters, sync and async."""

from __future__ import annotations

import asyncio
import json
import math

import openai
import pytest

from edge_transformer import LLM, GenerationConfig
from server.tiny_server import Served

HELLO = [{"role": "user", "content": "hello"}]


def alone(served: Served, **settings: object) -> str:
    """What the engine answers without a server."""
    llm: LLM = served.service.running.llm
    with LLM(llm.path, threads=1) as other:
        return other.generate(HELLO, GenerationConfig(**settings)).text  # type: ignore[arg-type]


def test_models(served: Served) -> None:
    client = served.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "edge-transformer-engine"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_chat_is_what_the_engine_answers(served: Served) -> None:
    answer = served.client().chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=20)
    assert answer.choices[0].message.content == alone(served, max_tokens=20)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == "length"
    usage = answer.usage
    assert usage is not None
    prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert usage.prompt_tokens == len(served.service.running.llm.tokenizer.encode(prompt))
    assert usage.completion_tokens == 20
    assert usage.total_tokens == usage.prompt_tokens + 20


def test_drawn_text_depends_on_the_seed_alone(served: Served) -> None:
    client = served.client()
    settings = {"temperature": 1.2, "top_p": 0.95, "presence_penalty": 0.3, "frequency_penalty": 0.2}
    texts = [
        client.chat.completions.create(
            model="tiny", messages=HELLO, seed=seed, max_tokens=24, **settings, extra_body={"top_k": 50, "min_p": 0.01}
        )
        .choices[0]
        .message.content
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]
    assert texts[0] == alone(served, max_tokens=24, seed=1, top_k=50, min_p=0.01, **settings)


def test_a_stream_is_the_whole_answer_in_pieces(served: Served) -> None:
    client = served.client()
    settings = {"model": "tiny", "messages": HELLO, "seed": 3, "max_tokens": 30, "n": 3}
    whole = client.chat.completions.create(**settings)
    texts = ["", "", ""]
    usage = None
    for chunk in client.chat.completions.create(**settings, stream=True, stream_options={"include_usage": True}):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        usage = chunk.usage or usage
    assert texts == [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    assert usage is not None
    assert usage.completion_tokens == 90
    assert whole.usage is not None
    assert usage.total_tokens == whole.usage.total_tokens


def test_async_streams_at_once_equal_those_alone(served: Served) -> None:
    def settings(seed: int) -> dict[str, object]:
        return {"model": "tiny", "messages": [{"role": "user", "content": "x" * seed}], "seed": seed, "max_tokens": 16}

    async def stream(client: openai.AsyncOpenAI, seed: int) -> str:
        parts = []
        async for chunk in await client.chat.completions.create(**settings(seed), stream=True):  # type: ignore[call-overload]
            parts.append(chunk.choices[0].delta.content or "")
        return "".join(parts)

    async def all_streams() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(stream(client, seed) for seed in range(1, 20)))

    together = asyncio.run(all_streams())
    client = served.client()
    for seed, text in enumerate(together, start=1):
        answer = client.chat.completions.create(**settings(seed))  # type: ignore[call-overload]
        assert answer.choices[0].message.content == text


def test_order_of_chunks(served: Served) -> None:
    body = {
        "model": "tiny",
        "messages": HELLO,
        "max_tokens": 4,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    lines = served.events("/v1/chat/completions", body)
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-2])
    assert all("role" not in chunk["choices"][0]["delta"] for chunk in chunks[1:-1])
    assert chunks[-2]["choices"][0] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}


FLAG = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], "additionalProperties": False}
ENDS: dict[str, tuple[dict[str, object], str]] = {
    "its first token": ({"max_tokens": 1}, "length"),
    "a stop string": ({"stop": list("abcdefgh"), "max_tokens": 200}, "stop"),
    "several answers": ({"n": 3, "max_tokens": 5}, "length"),
    "a grammar": ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": FLAG}}}, "stop"),
    "a call": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": FLAG}}], "tool_choice": "required"},
        "tool_calls",
    ),
    "nothing": ({}, "stop"),
}


@pytest.mark.parametrize("usage", [True, False])
@pytest.mark.parametrize("end", ENDS)
def test_however_an_answer_ends_its_reason_has_a_chunk_of_its_own(served: Served, end: str, usage: bool) -> None:
    settings, reason = ENDS[end]
    if end == "nothing":  # the end of the answer is its first token
        settings = {"logit_bias": {str(served.service.running.llm.end_token_ids[0]): 100}}
    body = {"model": "tiny", "messages": HELLO, "temperature": 0, "stream": True, **settings}
    lines = served.events("/v1/chat/completions", body | ({"stream_options": {"include_usage": True}} if usage else {}))
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert [bool(chunk["choices"]) for chunk in chunks] == [True] * (len(chunks) - usage) + [False] * usage
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    for index in range(max(choice["index"] for choice in choices) + 1):
        own = [choice for choice in choices if choice["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert [choice["finish_reason"] for choice in own] == [None] * (len(own) - 1) + [reason]
        assert own[-1]["delta"] == {}
        assert all(choice["delta"] and None not in choice["delta"].values() for choice in own[:-1])


def test_stop_strings_end_a_text_and_are_not_in_it(served: Served) -> None:
    client = served.client()
    whole = client.completions.create(model="tiny", prompt="abc", temperature=0, max_tokens=40).choices[0].text
    stop = whole[10:12]
    settings = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 40, "stop": ["@@@", stop]}
    cut = client.completions.create(**settings).choices[0]
    assert cut.text == whole[: whole.index(stop)]
    assert cut.finish_reason == "stop"
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(**settings, stream=True))
    assert streamed == cut.text


def test_completions_of_many_prompts(served: Served) -> None:
    client = served.client()
    prompts = ["one", "two", "three"]
    answer = client.completions.create(model="tiny", prompt=prompts, n=2, seed=5, max_tokens=8, echo=True)
    assert [choice.index for choice in answer.choices] == list(range(6))
    for index, choice in enumerate(answer.choices):
        assert choice.text.startswith(prompts[index // 2])
    single = client.completions.create(model="tiny", prompt=[ord("a") - 33, 5], seed=5, temperature=0)
    assert single.usage is not None
    assert (single.usage.prompt_tokens, single.usage.completion_tokens) == (2, 16)


def test_logprobs(served: Served) -> None:
    client = served.client()
    answer = client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=4
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 4
        assert entry.logprob == max(other.logprob for other in entry.top_logprobs) <= 0
    assert sum(math.exp(other.logprob) for other in logprobs.content[0].top_logprobs) <= 1
    joined = b"".join(bytes(entry.bytes or []) for entry in logprobs.content)
    assert joined.decode("utf-8", "replace") == answer.choices[0].message.content
    legacy = client.completions.create(model="tiny", prompt="hello", max_tokens=5, temperature=0, logprobs=2)
    old = legacy.choices[0].logprobs
    assert old is not None
    assert old.tokens is not None
    assert len(old.tokens) == len(old.token_logprobs or []) == len(old.text_offset or []) == 5


def test_logit_bias_bans_and_forces(served: Served) -> None:
    client = served.client()
    settings = {"model": "tiny", "prompt": "abc", "temperature": 0, "max_tokens": 3}
    forced = client.completions.create(**settings, logit_bias={"66": 100}).choices[0].text
    assert forced == served.service.running.llm.tokenizer.decode([66, 66, 66])


def test_progress_is_told_when_asked_for(served: Served) -> None:
    body = {
        "model": "tiny",
        "prompt": "".join(chr(97 + index % 23) for index in range(1100)),
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_progress": True},
    }
    chunks = [json.loads(line[6:]) for line in served.events("/v1/completions", body)[:-1]]
    progress = [chunk["prompt_progress"]["processed"] for chunk in chunks if "prompt_progress" in chunk]
    assert progress == sorted(progress)
    assert progress[-1] == 1100
    assert len(progress) > 1


def test_usage_counts_what_was_found_from_before(served: Served) -> None:
    client = served.client()
    settings = {"model": "tiny", "prompt": "a prompt that nobody else uses: 8161", "max_tokens": 1}
    client.completions.create(**settings)
    usage = client.completions.create(**settings).usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_tokenize(served: Served) -> None:
    status, answer = served.post("/tokenize", {"prompt": "abc"})
    assert (status, answer["count"]) == (200, 3)
    status, answer = served.post("/tokenize", {"messages": HELLO})
    assert answer["count"] == len("user\nhello\nassistant\n") + 3
