"""A GPU, real or emulated: against the CPU, and each placement and way of feeding against the first placement."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

from edge_transformer.cuda.runtime import Gpu
from edge_transformer.engine.core import Engine
from edge_transformer.errors import CapacityError
from edge_transformer.hub.progress import Progress
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import HeadPlace, Wishes
from edge_transformer.verify.cpu import divergence, forked_saved_loaded
from edge_transformer.verify.feed import Prompt, Way, feed
from edge_transformer.verify.link import Link, Outcome, not_run
from edge_transformer.verify.record import Record, same_bits, same_to_rounding
from edge_transformer.verify.subject import Subject

PLACEMENTS = {
    "all resident": Wishes(0, -1, kv_offload=False, head=HeadPlace.GPU),
    "all streamed": Wishes(0, 0, slots=2, kv_offload=False, head=HeadPlace.GPU),
    "one layer resident, three slots": Wishes(0, 1, slots=3, kv_offload=False, head=HeadPlace.GPU),
    "KV cache on the host": Wishes(0, -1, kv_offload=True, head=HeadPlace.GPU),
    "lm_head streamed": Wishes(0, -1, kv_offload=False, head=HeadPlace.STREAMED),
    "all on the host": Wishes(0, 0, slots=2, kv_offload=True, head=HeadPlace.STREAMED),
    "lm_head split": Wishes(0, 0, slots=2, kv_offload=False, head=HeadPlace.SPLIT),
    "lm_head on the CPU": Wishes(0, -1, kv_offload=False, head=HeadPlace.CPU),
}
"""Without a budget, which is the GPU's free memory."""

FIRST_WAY = Way()
"""How placements are fed: in chunks of 512."""

LARGEST_CHUNK = 1 << 20
"""More than any engine takes in a pass."""

MARGIN_BYTES = 256 << 20
"""Free memory of the GPU that no arena takes."""


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU to open again and again. plain: the same without tensor cores; None where it has none. rows: of a pass at
    most; None leaves it to the engine.
    """

    name: str
    open: Callable[[], Gpu]
    plain: Callable[[], Gpu] | None = None
    rows: int | None = None


class GpuLinks:
    """Links of one GPU. `on_cpu` gives what the CPU computes of the same prompts."""

    def __init__(
        self, device: Device, subject: Subject, prompts: Sequence[Prompt], on_cpu: Callable[[Progress], list[Record]]
    ) -> None:
        self._device = device
        self._subject = subject
        self._prompts = prompts
        self._on_cpu = on_cpu
        self._first: tuple[str, list[Record]] | None = None

    def placements(self, labels: Iterable[str]) -> Iterator[Link]:
        """The first that fits is compared with the CPU, and the others with it."""
        for label in labels:
            yield Link(f"{self._device.name}, {label}", partial(self._placement, label))

    def ways(self, chunks: Iterable[int]) -> Iterator[Link]:
        """Ways of feeding, other kernels, another KV cache; all in the placement that was the first."""
        name = self._device.name
        if self._device.rows is None:
            yield Link(f"{name}, chunks as large as can be", partial(self._same_bits, Way(LARGEST_CHUNK)))
        for size in chunks:
            yield Link(f"{name}, chunks of {size}", partial(self._same_bits, Way(size)))
        yield Link(f"{name}, several decode rows in a pass", partial(self._same_bits, Way(decode_rows=3)))
        yield Link(f"{name}, sequences together", partial(self._same_bits, Way(64, 3, 3)))
        yield Link(f"{name}, token by token", self._token_by_token)
        if self._device.plain is not None:
            yield Link(f"{name}, without tensor cores", partial(self._plain, self._device.plain))
        yield Link(f"{name}, state forked, saved and loaded", self._saved)
        yield Link(f"{name}, bf16 KV cache", self._bf16)

    def _placement(self, label: str, progress: Progress) -> Outcome:
        try:
            records = self._records(label, self._prompts, FIRST_WAY, progress)
        except CapacityError as error:
            return not_run(str(error))
        if self._first is None:
            self._first = (label, records)
            return _against("the CPU", same_to_rounding(self._on_cpu(progress), records))
        first, expected = self._first
        if PLACEMENTS[label].head in (HeadPlace.SPLIT, HeadPlace.CPU):  # the CPU sums in another order
            return _against(first, same_to_rounding(expected, records))
        return _against(first, same_bits(expected, records))

    def _same_bits(self, way: Way, progress: Progress) -> Outcome:
        if self._first is None:
            return not_run("no placement fits")
        label, expected = self._first
        return same_bits(expected, self._records(label, self._prompts, way, progress))

    def _token_by_token(self, progress: Progress) -> Outcome:
        if self._first is None:
            return not_run("no placement fits")
        tokens = min((prompt.tokens for prompt in self._prompts), key=len)
        whole = self._records(self._first[0], [Prompt(tokens, 0)], Way(), progress)
        return same_to_rounding(whole, self._records(self._first[0], [Prompt(tokens, len(tokens))], Way(), progress))

    def _plain(self, open_plain: Callable[[], Gpu], progress: Progress) -> Outcome:
        if self._first is None:
            return not_run("no placement fits")
        records = self._records(self._first[0], self._prompts, Way(), progress, open_gpu=open_plain)
        return _against("the CPU", same_to_rounding(self._on_cpu(progress), records))

    def _bf16(self, progress: Progress) -> Outcome:
        if self._first is None:
            return not_run("no placement fits")
        label, expected = self._first
        return divergence(expected[0], self._records(label, self._prompts[:1], Way(), progress, DType.BF16)[0])

    def _saved(self, progress: Progress) -> Outcome:
        if self._first is None:
            return not_run("no placement fits")
        with self._open(self._first[0], 3, DType.F32, self._device.open) as engine:
            return forked_saved_loaded(engine, self._prompts[0].tokens, progress)

    def _records(
        self,
        label: str,
        prompts: Sequence[Prompt],
        way: Way,
        progress: Progress,
        kv_dtype: DType = DType.F32,
        open_gpu: Callable[[], Gpu] | None = None,
    ) -> list[Record]:
        with self._open(label, len(prompts), kv_dtype, open_gpu or self._device.open) as engine:
            return feed(engine, prompts, way, progress, f"{self._device.name}, {label}")

    def _open(
        self, label: str, sequences: int, kv_dtype: DType, open_gpu: Callable[[], Gpu]
    ) -> AbstractContextManager[Engine]:
        gpu = open_gpu()
        wishes = _within(gpu, PLACEMENTS[label], self._subject.layers)
        context = max(len(prompt.tokens) for prompt in self._prompts)
        return self._subject.on_gpu(gpu, wishes, context, sequences, kv_dtype, self._device.rows)


def _within(gpu: Gpu, wishes: Wishes, layers: int) -> Wishes:
    resident = wishes.resident_layers
    if resident is not None:
        resident = min(resident, layers)
    return replace(wishes, budget_bytes=max(1, gpu.memory_info()[0] - MARGIN_BYTES), resident_layers=resident)


def _against(what: str, outcome: Outcome) -> Outcome:
    return replace(outcome, text=f"{outcome.text}, against {what}")
