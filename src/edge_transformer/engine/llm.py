"""The public object: a model that has been loaded and answers."""

from __future__ import annotations

import contextlib
import operator
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.kept import KeptSequence
from edge_transformer.engine.loading import load_weights_and_text
from edge_transformer.engine.messages import chat_messages
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import ContextLengthError, UsageError
from edge_transformer.formats.checkpoint import Checkpoint
from edge_transformer.formats.open import open_checkpoint
from edge_transformer.hub import resolve
from edge_transformer.models.config import ModelConfig, ModelSpec
from edge_transformer.models.read import read_model
from edge_transformer.ops.backend import Backend
from edge_transformer.ops.batch import KV_TILE_POSITIONS
from edge_transformer.ops.tensor import DType

# What is not needed to start loading is imported while the weights load (engine/loading.py): a model of this size
# answers in a quarter of a second, of which Python's imports are a large part.
if TYPE_CHECKING:
    from edge_transformer.engine.core import Engine
    from edge_transformer.engine.generation import Generation, Stream
    from edge_transformer.engine.gpu import GpuSettings
    from edge_transformer.engine.sampling import GenerationConfig
    from edge_transformer.engine.sequence import Sequence as EngineSequence
    from edge_transformer.hub.progress import Progress
    from edge_transformer.placement.plan import Plan
    from edge_transformer.text.chat_template import ChatTemplate
    from edge_transformer.text.tokenizer import Tokenizer


class ModelParts(NamedTuple):
    """What an LLM has read and laid out in host memory. It stays the LLM's, which closes it."""

    checkpoint: Checkpoint
    spec: ModelSpec
    weights: HostWeights


Message = Mapping[str, object]
"""One chat message: {"role": one of text.roles.ROLES, "content": "…"}."""

KV_DTYPES = {"f32": DType.F32, "bf16": DType.BF16}


class LLM:
    """A language model, loaded and ready.

    model: a folder, a .gguf file, a Hugging Face id ("org/name"), or "demo".
    context_length: at most this many tokens of prompt and answer (None: what the model was made for).
    threads: CPU threads (None: the cores this process may use). kv_dtype: "bf16" or "f32".
    backend: "cpu", "cuda" (a GPU, used as `gpu` says), or "reference" (numpy; slow, for checking).
    progress: called as progress(stage, done, total).
    offline: never ask the network.

    Close it, or use it as a context manager, to unmap files and end threads. Several streams may be open at once; calls
    from several threads take turns.
    Raises ModelNotFoundError, FormatError, UnsupportedModelError, TextError, CapacityError, UsageError.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        context_length: int | None = None,
        threads: int | None = None,
        kv_dtype: str = "bf16",
        backend: str = "cpu",
        gpu: GpuSettings | None = None,
        progress: Callable[[str, int, int], None] | None = None,
        offline: bool = False,
    ) -> None:
        started = time.perf_counter()
        if not isinstance(model, str | Path):
            raise UsageError(f"model is {model!r}; allowed: a name or path, as a text or pathlib.Path")
        if gpu is not None and backend != "cuda":
            raise UsageError(f"settings of a GPU were given, but the backend is {backend!r}; use backend='cuda'")
        if kv_dtype not in KV_DTYPES:
            raise UsageError(f"kv_dtype is {kv_dtype!r}; allowed: {', '.join(KV_DTYPES)}")
        self.path = resolve(model, offline=offline, progress=progress)
        with contextlib.ExitStack() as undo:  # what is open when something fails
            self._checkpoint = open_checkpoint(self.path)
            undo.callback(self._checkpoint.close)
            self._spec = read_model(self._checkpoint)
            self.context_length = _context_length(self._spec.config, context_length)
            self._backend, load_threads = _make_backend(backend, threads)
            undo.callback(self._backend.close)
            self._weights, self._text = load_weights_and_text(self._checkpoint, self._spec, load_threads, progress)
            undo.callback(self._weights.close)
            self.engine, self.plan = self._open_engine(backend, KV_DTYPES[kv_dtype], gpu, progress)
            undo.pop_all()
        self._kept = KeptSequence()
        # A GPU may have room for the state of one sequence, which is the kept one's until another needs it.
        self.engine.spare_memory = self._kept.give_up
        self._closed = False
        self.load_s = time.perf_counter() - started

    def _open_engine(
        self, backend: str, kv_dtype: DType, gpu: GpuSettings | None, progress: Progress | None
    ) -> tuple[Engine, Plan | None]:
        """The engine, and the plan of the GPU's memory where there is one."""
        if backend == "cuda":
            from edge_transformer.engine.gpu import GpuSettings, open_on_cuda

            if gpu is not None and not isinstance(gpu, GpuSettings):
                raise UsageError(f"gpu is {gpu!r}; allowed: a GpuSettings")
            settings = GpuSettings() if gpu is None else gpu
            return open_on_cuda(
                self._checkpoint,
                self._spec,
                self._weights,
                self._backend,
                kv_dtype,
                self.context_length,
                settings,
                progress,
            )
        from edge_transformer.engine.core import Engine

        return Engine(self._checkpoint, self._spec, self._backend, self._weights, kv_dtype), None

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The model's chat template; None for a model that has none (a base model)."""
        return self._text.chat_template

    @property
    def end_token_ids(self) -> tuple[int, ...]:
        """Tokens after which an answer is complete."""
        return self._text.end_token_ids

    @property
    def config(self) -> ModelConfig:
        """What the model is: sizes, windows, ropes, as read and checked by the gate."""
        return self._spec.config

    @property
    def parts(self) -> ModelParts:
        """For who runs the same weights on another executor too."""
        return ModelParts(self._checkpoint, self._spec, self._weights)

    @property
    def memory(self) -> dict[str, int]:
        """Bytes of host memory by purpose. `kv_per_token` is a rate: bytes for each token of context; recurrent_state
        is what a sequence takes whatever its length, and each of its checkpoints once more.
        """
        layers, recurrent = self.engine.state_shape.layers, self.engine.state_shape.recurrent
        return {
            "weights_rearranged": self._weights.slab_bytes,
            "weights_mapped": self._weights.mapped_bytes,
            "workspace": self.engine.workspace_bytes,
            "kv_per_token": sum(layer.tile_bytes // KV_TILE_POSITIONS for layer in layers),
            "recurrent_state": 0 if recurrent is None else recurrent.nbytes,
        }

    def encode(self, prompt: str | Sequence[Message], *, raw: bool = False) -> list[int]:
        """Token ids of a prompt: chat messages, or a text (one user message; with raw=True the text itself).

        Raises UsageError for an empty text, and for what is no text and no messages; TextError when there is no chat
        template, or it refuses the messages.
        """
        messages = chat_messages(prompt)
        if isinstance(prompt, str) and not prompt:
            raise UsageError("the prompt is empty")
        if raw:
            if not isinstance(prompt, str):
                raise UsageError("raw=True takes a text, not messages")
            return self.tokenizer.encode(prompt)
        if self.chat_template is None:
            from edge_transformer.text.chat_template import missing_chat_template

            raise missing_chat_template(self.path)
        # The template writes the begin-of-sequence token itself where the model wants one.
        return self.tokenizer.encode(self.chat_template.render(messages), add_bos=False)

    def stream(
        self,
        prompt: str | Sequence[Message],
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        prefill_progress: Callable[[int, int], None] | None = None,
        **overrides: Any,
    ) -> Stream:
        """Start an answer; iterate over the returned stream for its pieces. `overrides` are fields of GenerationConfig.

        Raises TextError, UsageError, ContextLengthError at once; NumericError and FileChangedError while iterating.
        """
        self._require_open()
        from edge_transformer.engine.generation import Stream

        config = make_config(config, overrides)
        prompt_ids = self.encode(prompt, raw=raw)
        self._check_prompt(prompt_ids, room=1)
        self._checkpoint.check_unchanged()
        return Stream(
            self.engine,
            self.tokenizer,
            partial(self._sequence_for, prompt_ids),
            prompt_ids,
            self.end_token_ids,
            config,
            self.context_length,
            load_s=self.load_s,
            finished=self._kept.keep,
            progress=prefill_progress,
        )

    def generate(
        self,
        prompt: str | Sequence[Message],
        config: GenerationConfig | None = None,
        *,
        raw: bool = False,
        **overrides: Any,
    ) -> Generation:
        """The whole answer. Arguments and errors as in `stream`."""
        with self.stream(prompt, config, raw=raw, **overrides) as stream:
            for _ in stream:
                pass
            return stream.result

    def score_blocks(self, ids: Sequence[int]) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield (start, logits f32 [n, V]) for consecutive positions: row i holds the logits of token start + i + 1.

        ids: a list of tokens, or an array of one dimension. Other calls may be made between two blocks.
        Raises ContextLengthError, UsageError.
        """
        from edge_transformer.engine.chunk import Chunk

        self._require_open()
        try:
            ids = [operator.index(token) for token in ids]  # a fraction must not become the token below it
        except TypeError as error:
            raise UsageError(f"ids are tokens, which are whole numbers: {error}") from error
        self._check_prompt(ids)
        self._checkpoint.check_unchanged()
        sequence = self.engine.new_sequence()
        try:
            done = 0
            while done < len(ids):
                count = self.engine.chunk_length(done, len(ids) - done)
                with self.engine.lock:
                    result = self.engine.step([Chunk(sequence, ids[done : done + count], "prompt", "all")])
                    if result is not None:
                        result.keep()
                if result is not None:
                    for rows, logits in result.blocks():
                        yield done + rows[0][1], logits
                done += count
        finally:
            sequence.close()

    def close(self) -> None:
        """Release mappings, memory and threads. Closing twice is harmless; a stream that is still open then raises
        UsageError.
        """
        if self._closed:
            return
        self._closed = True
        self._kept.close()
        self.engine.close()
        self._checkpoint.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError("this LLM has been closed")

    def _check_prompt(self, ids: Sequence[int], room: int = 0) -> None:
        """Refuse what is empty, or leaves less than `room` tokens of the context."""
        if not ids:
            raise UsageError("the prompt is empty: it has no token to start from")
        if len(ids) + room > self.context_length:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens; the context holds {self.context_length}"
                f"{' for prompt and answer together' if room else ''}. Shorten the prompt{self._longer_context()}"
            )

    def _longer_context(self) -> str:
        """How to get one, where there is one to get."""
        most = self._spec.config.context_length
        if self.context_length == most:
            return "; this model was made for no more"
        return f" or raise the context length (context_length in Python, --ctx at the command line), here up to {most}"

    def _sequence_for(self, prompt_ids: Sequence[int]) -> EngineSequence:
        """The sequence kept from the last call, cut to what it has in common with the prompt, or an empty one.

        Tokens that call made are kept too, so that a conversation computes each token once. Their state was made one by
        one, which gives other roundings than a prompt in one piece; the tokens of a prompt give the same bits always.
        """
        sequence = self._kept.take()
        if sequence is None:
            return self.engine.new_sequence()
        limit = min(len(sequence), len(prompt_ids) - 1)
        common = next((i for i in range(limit) if sequence.tokens[i] != prompt_ids[i]), limit)
        sequence.reuse(common)
        return sequence


def make_config(config: GenerationConfig | None, overrides: Mapping[str, Any]) -> GenerationConfig:
    """`config` (or the defaults) with some fields replaced. Raises UsageError for what is no GenerationConfig, and for
    a field that does not exist.
    """
    from edge_transformer.engine.sampling import GenerationConfig

    if config is not None and not isinstance(config, GenerationConfig):
        raise UsageError(
            f"config is {config!r}; allowed: a GenerationConfig, or its fields by name, such as max_tokens=3"
        )
    config = GenerationConfig() if config is None else config
    unknown = sorted(set(overrides) - set(GenerationConfig.__dataclass_fields__))
    if unknown:
        known = ", ".join(GenerationConfig.__dataclass_fields__)
        raise UsageError(f"unknown generation setting {unknown[0]!r}; known: {known}")
    return replace(config, **overrides)


def _context_length(config: ModelConfig, asked: int | None) -> int:
    if asked is None:
        return config.context_length
    if not isinstance(asked, int) or not 1 <= asked <= config.context_length:
        raise UsageError(
            f"context length {asked!r} is out of range: this model was made for 1 to {config.context_length} tokens"
        )
    return asked


def _make_backend(name: str, threads: int | None) -> tuple[Backend, int]:
    """The executor (for a GPU: of what stays on the CPU), and how many threads re-arrange weights at load."""
    if name in ("cpu", "cuda"):
        from edge_transformer.cpu.backend import CpuBackend

        backend = CpuBackend(threads)
        return backend, backend.pool.threads
    if name == "reference":
        from edge_transformer.ops.reference.backend import ReferenceBackend

        return ReferenceBackend(), 1
    raise UsageError(f"backend is {name!r}; allowed: cpu, cuda, reference")
