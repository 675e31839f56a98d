"""The CPU against the numpy oracle, and against itself: ways of feeding that change no bit, or agree to rounding."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from edge_transformer.engine.chunk import Chunk
from edge_transformer.engine.core import Engine
from edge_transformer.engine.sequence import Sequence
from edge_transformer.errors import CapacityError
from edge_transformer.hub.progress import Progress
from edge_transformer.ops.tensor import DType
from edge_transformer.verify.feed import Prompt, Way, feed, step
from edge_transformer.verify.link import Link, Outcome, judged, not_run
from edge_transformer.verify.material import Material
from edge_transformer.verify.record import Record, mean_divergence, same_bits, same_to_rounding
from edge_transformer.verify.subject import Subject

DIVERGENCE_BOUND = 5e-5
"""Mean Kullback-Leibler divergence of a bf16 KV cache from f32, in nats."""

DEEP_ROWS = 16
"""Rows that numpy computes after the long prompt."""

CONTINUED_ROWS = 41
"""Rows that are computed from a state that was forked, or saved and loaded."""


class CpuLinks:
    """Links whose executor is the CPU, with an f32 KV cache but for the last."""

    def __init__(self, subject: Subject, material: Material) -> None:
        self._subject = subject
        self._material = material
        self._records: list[Record] = []

    def links(self) -> Iterator[Link]:
        yield Link("CPU against numpy", self._against_oracle)
        yield Link("CPU against numpy, after the long prompt", self._deep_against_oracle)
        for size in self._material.chunks:
            yield Link(f"CPU, chunks of {size}", partial(self._same_bits, Way(size)))
        yield Link("CPU, several decode rows in a pass", partial(self._same_bits, Way(decode_rows=3)))
        yield Link("CPU, sequences together", partial(self._same_bits, Way(64, 3, 3)))
        yield Link("CPU, one thread", self._one_thread)
        yield Link("CPU, token by token", self._token_by_token)
        yield Link("CPU, state forked, saved and loaded", self._saved)
        yield Link("CPU, bf16 KV cache", self._bf16)

    def records(self, progress: Progress) -> list[Record]:
        """Of every prompt, alone and in chunks as large as can be: what other runs are compared with."""
        if not self._records:
            with self._subject.on_cpu() as engine:
                self._records = feed(engine, self._material.prompts, Way(), progress, "the prompts on the CPU")
        return self._records

    def _against_oracle(self, progress: Progress) -> Outcome:
        """Prompt rows and decode rows of the CPU; numpy computes both as rows of a prompt."""
        prompt, part = self._material.short, self._subject.first(self._material.oracle_layers)
        try:
            with part.on_oracle() as oracle:
                truth = feed(oracle, [Prompt(prompt.tokens, 0)], Way(), progress, "numpy")
        except CapacityError as error:
            return not_run(str(error))
        with part.on_cpu() as engine:
            return _of(part, same_to_rounding(truth, feed(engine, [prompt], Way(), progress, "the CPU")))

    def _deep_against_oracle(self, progress: Progress) -> Outcome:
        """The CPU's state after the long prompt is handed to numpy, whose rows then see all of it."""
        part, tokens = self._subject.first(self._material.oracle_layers), self._material.long.tokens
        count = min(DEEP_ROWS, len(tokens) // 2)
        new = tokens[-count:]
        ours, truth = (Record(tokens, part.spec.config.vocab_size) for _ in range(2))
        with part.on_cpu() as engine, closing(engine.new_sequence()) as before:
            engine.prefill(before, tokens[:-count], partial(progress, "the long prompt on the CPU"))
            try:
                with part.on_oracle() as oracle, closing(before.fork()) as sequence:
                    progress("numpy", 0, count)
                    step(oracle, [Chunk(sequence, new, "prompt", "all")], [truth])
            except CapacityError as error:
                return not_run(str(error))
            step(engine, [Chunk(before, new[: count // 2], "prompt", "all")], [ours])
            for token in new[count // 2 :]:
                step(engine, [Chunk(before, [token], "decode", "all")], [ours])
        return _of(part, same_to_rounding([truth], [ours]))

    def _same_bits(self, way: Way, progress: Progress) -> Outcome:
        expected = self.records(progress)
        with self._subject.on_cpu() as engine:
            return same_bits(expected, feed(engine, self._material.prompts, way, progress, "the CPU"))

    def _one_thread(self, progress: Progress) -> Outcome:
        if self._subject.threads == 1:
            return not_run("the CPU has one thread in every link")
        expected = self.records(progress)
        mate = self._material.mates[0]
        with self._subject.on_cpu(threads=1) as engine:
            outcome = same_bits(expected[1:2], feed(engine, [mate], Way(), progress, "the CPU, one thread"))
        return replace(outcome, text=f"{outcome.text}, 1 thread against {self._subject.threads}")

    def _token_by_token(self, progress: Progress) -> Outcome:
        """Every token as a decode row, against all of them as prompt rows."""
        tokens = self._material.mates[0].tokens
        with self._subject.on_cpu() as engine:
            whole = feed(engine, [Prompt(tokens, 0)], Way(), progress, "the CPU")
            single = feed(engine, [Prompt(tokens, len(tokens))], Way(), progress, "the CPU, token by token")
        return same_to_rounding(whole, single)

    def _saved(self, progress: Progress) -> Outcome:
        with self._subject.on_cpu() as engine:
            return forked_saved_loaded(engine, self._material.long.tokens, progress)

    def _bf16(self, progress: Progress) -> Outcome:
        expected = self.records(progress)[0]
        with self._subject.on_cpu(DType.BF16) as engine:
            got = feed(engine, [self._material.long], Way(), progress, "the CPU, bf16 KV cache")[0]
        return divergence(expected, got)


def forked_saved_loaded(engine: Engine, tokens: list[int], progress: Progress) -> Outcome:
    """After the first half of `tokens`: a fork, and what is loaded from a file of the state, go on as it does."""
    half = len(tokens) // 2
    rows = tokens[half : half + CONTINUED_ROWS]
    records = [Record(tokens, engine.config.vocab_size) for _ in range(3)]
    with TemporaryDirectory() as folder, closing(engine.new_sequence()) as first:
        engine.prefill(first, tokens[:half], partial(progress, "the first half"))
        path = Path(folder) / "state.npz"
        first.save(path)
        with closing(first.fork()) as fork, closing(Sequence.load(path, engine.state_shape)) as loaded:
            for sequence, record in zip((first, fork, loaded), records, strict=True):
                step(engine, [Chunk(sequence, rows[:-1], "prompt", "all")], [record])
                step(engine, [Chunk(sequence, rows[-1:], "decode", "all")], [record])
    return same_bits([records[0], records[0]], records[1:])


def divergence(exact: Record, rounded: Record) -> Outcome:
    """How far a bf16 KV cache moves the distributions."""
    mean = mean_divergence(exact, rounded)
    text = f"mean KL from f32 {mean:.1e} of {DIVERGENCE_BOUND:.0e} nats at {len(exact.logits)} positions"
    return judged(mean <= DIVERGENCE_BOUND, text, mean, DIVERGENCE_BOUND)


def _of(part: Subject, outcome: Outcome) -> Outcome:
    """Says it, where the part is not the whole model."""
    return outcome if part.whole else replace(outcome, text=f"{outcome.text}; {part.description}")
