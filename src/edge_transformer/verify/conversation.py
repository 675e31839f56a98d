"""A second and a third call of the same object, against the same prompts computed from nothing.

The second call's prompt goes on where the first one's answer ended. The third one's leaves it in the middle.
"""

from __future__ import annotations

from collections.abc import Iterator

from edge_transformer.engine.generation import Generation, Stream
from edge_transformer.engine.llm import LLM
from edge_transformer.engine.sampling import GenerationConfig
from edge_transformer.hub.progress import Progress
from edge_transformer.verify.link import Link, Outcome, judged
from edge_transformer.verify.material import TEXT
from edge_transformer.verify.record import TOP10_BOUND

CONFIG = GenerationConfig(max_tokens=6, ignore_eos=True, logprobs=10)


class ConversationLinks:
    """Links whose object is an LLM that has been called before."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def links(self) -> Iterator[Link]:
        yield Link("CPU, second call that goes on", self._goes_on)
        yield Link("CPU, second call that differs", self._differs)

    def _goes_on(self, progress: Progress) -> Outcome:
        progress("the first call", 0, 3)
        prompt = TEXT[: len(TEXT) // 2]
        first = self._llm.generate(prompt, CONFIG, raw=True)
        return self._compare(f"{prompt}{first.text} And then? {TEXT[-200:]}", progress)

    def _differs(self, progress: Progress) -> Outcome:
        progress("the first call", 0, 3)
        self._llm.generate(TEXT, CONFIG, raw=True)
        return self._compare(f"{TEXT[: len(TEXT) * 5 // 6]} But no: {TEXT[-100:]}", progress)

    def _compare(self, prompt: str, progress: Progress) -> Outcome:
        progress("the second call", 1, 3)
        ours = self._llm.generate(prompt, CONFIG, raw=True)
        progress("the same from nothing", 2, 3)
        fresh = self._from_nothing(prompt)
        error = largest_difference(fresh, ours)
        kept = ours.timings.prompt_tokens - ours.timings.processed_tokens
        text = (
            f"top 10 {error:.1e} of {TOP10_BOUND:.0e} in {len(ours.ids)} tokens; "
            f"{kept} of {ours.timings.prompt_tokens} prompt tokens were kept"
        )
        return judged(error < TOP10_BOUND, text, error, TOP10_BOUND)

    def _from_nothing(self, prompt: str) -> Generation:
        llm = self._llm
        ids = llm.encode(prompt, raw=True)
        sequence = llm.engine.new_sequence()
        stream = Stream(llm.engine, llm.tokenizer, sequence, ids, llm.end_token_ids, CONFIG, llm.context_length)
        with stream:
            for _ in stream:
                pass
        return stream.result


def largest_difference(expected: Generation, got: Generation) -> float:
    """Largest difference of the log-probability of the ten likeliest tokens, up to the first token that is another."""
    largest = 0.0
    for exact, ours in zip(expected.logprobs or (), got.logprobs or (), strict=True):
        of = dict(ours.top) | {ours.token: ours.logprob}
        differences = [abs(of[token] - logprob) for token, logprob in exact.top if token in of]
        largest = max([largest, *differences])
        if len(differences) < len(exact.top) // 2:  # other tokens altogether
            return float("inf")
        if exact.token != ours.token:
            break
    return largest
