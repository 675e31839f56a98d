"""A model of words instead of tokens, fast and predictable: what the command line is tested with.

A token is a word. The answer says what the last message was, word by word, then ends. As a program it is `ete` on such
models: `python fake_llm.py run MODEL PROMPT`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import edge_transformer
from edge_transformer import Generation, GenerationConfig, Timings
from edge_transformer.errors import ContextLengthError, NumericError, TextError


class FakeLLM:
    """The model's name says how it is: "plain" has no chat template, "broken" fails after two words, "slow" is slow."""

    made: ClassVar[list["FakeLLM"]] = []

    def __init__(self, model: str | Path, *, context_length: int | None = None, **settings: Any) -> None:
        self.name = Path(model).name
        self.context_length = context_length or 100
        self.chat_template = None if self.name == "plain" else "a template"
        self.settings = settings
        self.closed = False
        self.plan = None
        self.memory = {"weights_mapped": 1 << 20, "weights_rearranged": 0}
        self.prompts: list[Any] = []
        self.configs: list[GenerationConfig] = []
        FakeLLM.made.append(self)

    def __enter__(self) -> "FakeLLM":
        return self

    def __exit__(self, *error: object) -> None:
        self.closed = True

    def encode(self, prompt: str | Sequence[dict[str, str]], *, raw: bool = False) -> list[int]:
        if raw:
            assert isinstance(prompt, str)
            return list(range(len(prompt.split())))
        if self.chat_template is None:
            raise TextError("no chat template; --raw")
        assert not isinstance(prompt, str)
        return list(range(sum(1 + len(message["content"].split()) for message in prompt)))

    def stream(
        self,
        prompt: str | Sequence[dict[str, str]],
        config: GenerationConfig,
        *,
        raw: bool = False,
        prefill_progress: Callable[[int, int], None] | None = None,
    ) -> "FakeStream":
        ids = self.encode(prompt, raw=raw)
        if len(ids) > self.context_length:
            raise ContextLengthError(f"the prompt has {len(ids)} tokens; the context holds {self.context_length}")
        self.prompts.append(prompt)
        self.configs.append(config)
        last = prompt if isinstance(prompt, str) else prompt[-1]["content"]
        return FakeStream(self, ids, f"You said: {last}", config)


class FakeStream:
    def __init__(self, llm: FakeLLM, prompt_ids: list[int], answer: str, config: GenerationConfig) -> None:
        self._llm = llm
        self._prompt_ids = prompt_ids
        self._answer = answer
        self._config = config
        self._cancelled = False
        self._pieces: list[str] = []
        self._reason = "interrupted"
        self._iterator = self._run()

    def __iter__(self) -> "FakeStream":
        return self

    def __next__(self) -> str:
        return next(self._iterator)

    def __enter__(self) -> "FakeStream":
        return self

    def __exit__(self, *error: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        self._cancelled = True

    @property
    def result(self) -> Generation:
        timings = Timings(
            load_s=0.5,
            prefill_s=0.25,
            decode_s=2.0,
            prompt_tokens=len(self._prompt_ids),
            processed_tokens=len(self._prompt_ids),
            generated_tokens=len(self._pieces),
        )
        return Generation(
            prompt_ids=tuple(self._prompt_ids),
            ids=tuple(range(len(self._pieces))),
            text="".join(self._pieces),
            finish_reason=self._reason,
            logprobs=None,
            seed=self._config.seed or 0,
            timings=timings,
        )

    def _run(self) -> Iterator[str]:
        words = self._answer.split(" ")
        if self._llm.name == "slow":
            words *= 1000
        for number, word in enumerate(words):
            if self._cancelled:
                return
            if self._llm.name == "broken" and number == 2:
                raise NumericError("NaN in layer 3")
            if len(self._prompt_ids) + number >= self._llm.context_length:
                self._reason = "context"
                return
            if number == self._config.max_tokens:
                self._reason = "length"
                return
            if self._llm.name == "slow":
                time.sleep(0.02)
            piece = word if number == 0 else f" {word}"
            self._pieces.append(piece)
            yield piece
        self._reason = "stop"


if __name__ == "__main__":
    edge_transformer.LLM = FakeLLM  # type: ignore[misc, assignment]
    from edge_transformer.cli.main import main

    main()
