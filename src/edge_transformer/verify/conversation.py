"""A second and a third call of the same object, against the same prompts computed from nothing.

The second call's prompt goes on where the first one's answer ended. The third one's leaves it in the middle.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial

from edge_transformer.engine.generation import Generation, Stream
from edge_transformer.engine.llm import LLM
from edge_transformer.engine.sampling import GenerationConfig
from edge_transformer.errors import CapacityError, ContextLengthError
from edge_transformer.hub.progress import Progress
from edge_transformer.verify.link import Link, Outcome, judged, not_run
from edge_transformer.verify.material import TEXT
from edge_transformer.verify.record import TOP10_BOUND

CONFIG = GenerationConfig(max_tokens=6, ignore_eos=True, logprobs=10)


Calls = Callable[[LLM], tuple[str, Generation]]
"""Makes two calls; the second prompt and its answer."""


def conversation_links(
    name: str,
    opened: Callable[[Progress], AbstractContextManager[LLM]],
    from_nothing: Callable[[str, Progress], Generation],
) -> Iterator[Link]:
    """`name`: of the executor. `opened` gives the object that is called; `from_nothing` answers a prompt without any
    call before it.
    """

    def run(calls: Calls, bound: float, progress: Progress) -> Outcome:
        try:
            with opened(progress) as llm:
                progress("two calls", 0, 2)
                prompt, ours = calls(llm)
            progress("the second one from nothing", 1, 2)
            return _compared(from_nothing(prompt, progress), ours, bound)
        except (CapacityError, ContextLengthError) as error:
            return not_run(str(error))

    yield Link(f"{name}, second call that goes on", partial(run, _goes_on, TOP10_BOUND))
    yield Link(f"{name}, second call that differs", partial(run, _differs, 0.0))


def without_kept(llm: LLM, prompt: str) -> Generation:
    """The answer of a model's engine, without what its LLM has kept of earlier calls."""
    ids = llm.encode(prompt, raw=True)
    begin = llm.engine.new_sequence
    stream = Stream(llm.engine, llm.tokenizer, begin, ids, llm.end_token_ids, CONFIG, llm.context_length)
    with stream:
        for _ in stream:
            pass
    return stream.result


def _goes_on(llm: LLM) -> tuple[str, Generation]:
    """What was an answer is part of the second prompt: its state was made token by token."""
    beginning = TEXT[: TEXT.rindex(".", 0, len(TEXT) * 2 // 3) + 1]  # an answer's first token joins no word
    prompt = f"{beginning}{llm.generate(beginning, CONFIG, raw=True).text} And then? {TEXT[-200:]}"
    return prompt, llm.generate(prompt, CONFIG, raw=True)


def _differs(llm: LLM) -> tuple[str, Generation]:
    """Both prompts have a beginning in common, which no other has: what is kept of it has the bits of a prompt."""
    llm.generate(f"Again: {TEXT}", CONFIG, raw=True)
    prompt = f"Again: {TEXT[: len(TEXT) * 5 // 6]} But no: {TEXT[-100:]}"
    return prompt, llm.generate(prompt, CONFIG, raw=True)


def _compared(expected: Generation, got: Generation, bound: float) -> Outcome:
    error = largest_difference(expected, got)
    kept = got.timings.prompt_tokens - got.timings.processed_tokens
    allowed = f" of {bound:.0e}" if bound else ", bit for bit" if error == 0 else ", where no bit may differ"
    text = (
        f"top 10 {error:.1e}{allowed}, in {len(got.ids)} tokens; "
        f"{kept} of {got.timings.prompt_tokens} prompt tokens were kept"
    )
    return judged(error <= bound, text, error, bound)


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
