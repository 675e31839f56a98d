"""The engine: one pass over the weights for all rows of a batch, whatever mix of prompt chunks and decode tokens it
holds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from collections.abc import Sequence as AbstractSequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NoReturn, TypeVar

import numpy as np
import numpy.typing as npt

from edge_transformer.engine.batch_making import make_batch
from edge_transformer.engine.chunk import CHUNK_BORDER, Chunk, last_border
from edge_transformer.engine.kv import RecurrentMemory, TileGeometry, TileMemory
from edge_transformer.engine.recurrent import recurrent_shape
from edge_transformer.engine.sequence import Sequence, StateShape
from edge_transformer.engine.weights import WeightSource
from edge_transformer.errors import CapacityError, ContextLengthError, NumericError, UsageError
from edge_transformer.formats.checkpoint import Checkpoint
from edge_transformer.formats.weight import round_up
from edge_transformer.models import forward
from edge_transformer.models.config import ModelConfig, ModelSpec
from edge_transformer.models.rope import inverse_frequencies
from edge_transformer.ops.backend import AttentionShape, Backend, DeltaShape
from edge_transformer.ops.batch import Batch
from edge_transformer.ops.tensor import DType, Tensor, tensor_of

Result = TypeVar("Result")

LOGIT_BLOCK_ROWS = 8
"""Rows whose logits are made at once, where nobody asks for more: the group size of the decode kernels."""

MAX_ROWS = 512
"""Rows of a pass at most."""


class PassResult:
    """What a pass leaves: hidden states, from which logits are made on demand, until the next pass (or after `keep`).

    `rows` are (index of the chunk, index of the token in the chunk) of every row whose logits were asked, in the order
    in which `logits` gives them.
    """

    def __init__(self, engine: Engine, batch: Batch, rows: list[tuple[int, int]], number: int) -> None:
        """`number`: which pass of the engine this was."""
        self.rows = rows
        self._engine = engine
        self._batch = batch
        self._number = number
        self._kept: npt.NDArray[np.float32] | None = None

    def keep(self) -> None:
        """Copy the hidden states, so that logits can be read after other passes too. Raises as `blocks` does."""
        with self._engine.lock:
            self._kept = self._engine._hidden_states(self._number, len(self.rows))

    def blocks(self) -> Iterator[tuple[AbstractSequence[tuple[int, int]], npt.NDArray[np.float32]]]:
        """Yield (rows, logits f32 [len(rows), V]) block by block.

        Raises NumericError when a logit is NaN or infinite; UsageError when another pass was made, or the engine is
        closed.
        """
        step = self._engine.logit_rows
        for start in range(0, len(self.rows), step):
            rows = self.rows[start : start + step]
            with self._engine.lock:
                hidden = self._engine._hidden_rows(self._number, self._kept, start, len(rows))
                logits = self._engine._logits(self._batch, hidden).copy()
            yield rows, logits

    def logits(self) -> npt.NDArray[np.float32]:
        """f32 [len(rows), V]."""
        return np.concatenate([block for _, block in self.blocks()])

    def likeliest(self) -> list[int]:
        """The token of the largest logit of each row, of equals the lowest: what `logits` says, with none of them
        brought to the host. Raises as `blocks` does.
        """
        tokens: list[int] = []
        step = self._engine.logit_rows
        for start in range(0, len(self.rows), step):
            count = min(step, len(self.rows) - start)
            with self._engine.lock:
                hidden = self._engine._hidden_rows(self._number, self._kept, start, count)
                tokens += self._engine._likeliest(self._batch, hidden)
        return tokens


class Engine:
    """A model on a backend. Owns weights, workspace and nothing else; sequences are made by it and owned by the caller.

    One pass at a time: whoever shares an engine between threads holds `lock` over a pass and the reading of its logits.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        spec: ModelSpec,
        backend: Backend,
        weights: WeightSource,
        kv_dtype: DType,
        max_rows: int = MAX_ROWS,
        tile_memory: TileMemory | None = None,
        state_memory: RecurrentMemory | None = None,
        logit_rows: int = LOGIT_BLOCK_ROWS,
    ) -> None:
        """logit_rows: rows whose logits are made at once; the output projection is read once for all of them.

        `tile_memory`, `state_memory`: where sequences keep their KV tiles and their recurrent state (None: ordinary
        host memory). Raises UsageError when a model with recurrent state gets fewer than CHUNK_BORDER rows.
        """
        self.spec = spec
        self.config = spec.config
        self.lock = threading.RLock()
        self.max_rows = max_rows
        self.logit_rows = logit_rows
        self._checkpoint = checkpoint
        self._backend = backend
        self._weights = weights
        shapes = forward.layer_shapes(self.config, kv_dtype)
        self._attentions = [shape for shape in shapes if isinstance(shape, AttentionShape)]
        self._deltas = [shape for shape in shapes if isinstance(shape, DeltaShape)]
        if self._deltas and max_rows < CHUNK_BORDER:
            raise UsageError(f"max_rows is {max_rows}; a model with recurrent state needs {CHUNK_BORDER} or more")
        self.state_shape = StateShape(
            layers=tuple(TileGeometry(s.kv_heads, s.head_dim, kv_dtype, s.window) for s in self._attentions),
            identity=lambda: _identity(checkpoint, spec, kv_dtype),
            memory=tile_memory,
            recurrent=recurrent_shape(self._deltas, state_memory),
        )
        self._ropes = [(rope, inverse_frequencies(rope)) for rope in self.config.ropes]
        following = [vectors["attn_norm"] for vectors in weights.vectors[1:]] + [weights.final_norm]
        self._layers = [
            forward.ResidentLayer(shape, vectors, norm)
            for shape, vectors, norm in zip(shapes, weights.vectors, following, strict=True)
        ]
        self._segments = [tuple(segment.name for segment in layer.segments) for layer in spec.layers]
        self.spare_memory: Callable[[], bool] | None = None
        """Asked where memory for a sequence is refused: gives back what nobody needs; False when nothing was."""
        self._passes = 0
        self._newest: list[Sequence] = []
        self._closed = False
        self._allocate_workspace()

    def new_sequence(self) -> Sequence:
        """An empty sequence of this model."""
        return Sequence(self.state_shape)

    def step(self, chunks: AbstractSequence[Chunk], cancelled: Callable[[], bool] | None = None) -> PassResult | None:
        """One pass over the weights for the rows of all chunks; each sequence then holds its chunk's tokens too.

        Every sequence may occur once. `cancelled` is asked between layers; when it says yes the pass is given up, None
        is returned and no sequence has changed, but that recurrent state is back at its newest checkpoint, as it is
        after an error in the middle of a pass. The result's logits can be read until the next pass.
        Raises UsageError (no rows, a sequence twice, a token that does not exist, an engine that is closed),
        CapacityError (more than max_rows rows, or memory refused), ContextLengthError, FileChangedError (a model file
        changed under the mapping).
        """
        self._require_open()
        self._check(chunks)
        self._passes += 1
        batch, rows = self._with_spare_memory(lambda: self._prepare(chunks))
        self._newest = [chunk.sequence for chunk in chunks]
        with ExitStack() as unfinished:
            unfinished.callback(self._backend.give_up)
            for chunk in chunks:
                unfinished.callback(chunk.sequence.undo)
            if not self._run_layers(batch, lambda: self._closed or (cancelled is not None and cancelled())):
                self._require_open()
                return None
            self._checkpoint.check_unchanged()
            if rows:
                indices = tensor_of(batch.logit_rows)
                self._backend.select_rows(self._activations.normed, indices, len(rows), self._selected)
            for chunk in chunks:
                chunk.sequence.commit(chunk.tokens, chunk.kind == "prompt")
            unfinished.pop_all()
        return PassResult(self, batch, rows, self._passes)

    def prefill(
        self,
        sequence: Sequence,
        tokens: AbstractSequence[int],
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] | None = None,
    ) -> npt.NDArray[np.float32] | None:
        """Process a prompt in chunks; the logits f32 [V] of its last token (a copy), or None when cancelled.

        What had been processed when `cancelled` said yes stays in the sequence, as far as its state can be kept. The
        last border inside the prompt becomes a checkpoint of the recurrent state, and so does the end of an answer that
        the prompt goes on from.
        """
        done, logits = 0, None
        if len(sequence) > sequence.prompt_length:
            with self.lock:
                self._with_spare_memory(sequence.checkpoint)
        border = last_border(len(sequence) + len(tokens))
        while done < len(tokens):
            count = self.chunk_length(len(sequence), len(tokens) - done)
            last = done + count == len(tokens)
            chunk = Chunk(sequence, tokens[done : done + count], "prompt", "last" if last else "none", border)
            with self.lock:
                result = self.step([chunk], cancelled)
                if result is None:
                    return None
                if last:
                    logits = result.logits()[0]
            done += count
            if progress is not None:
                progress(done, len(tokens))
        return logits

    def chunk_length(self, position: int, remaining: int) -> int:
        """How many of `remaining` prompt tokens the next chunk takes when it starts at `position`."""
        if remaining <= self.max_rows:
            return remaining
        border = (position + self.max_rows) // CHUNK_BORDER * CHUNK_BORDER
        return border - position if border > position else self.max_rows

    def close(self) -> None:
        """Release weights, workspace and the backend's threads. A pass that runs in another thread is given up before,
        and raises UsageError there. Closing twice is harmless.
        """
        if self._closed:
            return
        self._closed = True
        with self.lock, ExitStack() as last:
            last.callback(self._backend.close)
            self._weights.close()

    @staticmethod
    def workspace_bytes_of(config: ModelConfig, rows: int, logit_rows: int = LOGIT_BLOCK_ROWS) -> int:
        """Bytes of activations, hidden states and the block of logits for passes of up to `rows` rows."""
        return sum(_workspace_parts(config, rows, logit_rows))

    @property
    def workspace_bytes(self) -> int:
        """Bytes of activations and of the block of logits."""
        return self._workspace_bytes

    def _allocate_workspace(self) -> None:
        config, rows = self.config, self.max_rows
        activation_bytes, selected_bytes, kept_bytes, _ = _workspace_parts(config, rows, self.logit_rows)
        self._workspace_bytes = self.workspace_bytes_of(config, rows, self.logit_rows)
        address, owner = self._backend.allocate(self._workspace_bytes)
        widest = max(config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
        widest = max([widest, *(shape.value_heads * shape.value_dim for shape in self._deltas)])
        self._backend.reserve(rows, widest, self._attentions, self._deltas)
        self._activations = forward.make_activations(config, rows, address, owner)
        self._selected = Tensor(address + activation_bytes, (rows, config.hidden_size), DType.F32, owner)
        hidden_end = address + activation_bytes + selected_bytes
        self._kept_block = Tensor(hidden_end, (self.logit_rows, config.hidden_size), DType.F32, owner)
        self._logits_block = Tensor(hidden_end + kept_bytes, (self.logit_rows, config.vocab_size), DType.F32, owner)

    def _require_open(self) -> None:
        """What lies in the weights' memory must not be read once it is given back."""
        if self._closed:
            raise UsageError("this model has been closed")

    def _check(self, chunks: AbstractSequence[Chunk]) -> None:
        rows = sum(len(chunk.tokens) for chunk in chunks)
        if rows == 0 or any(not chunk.tokens for chunk in chunks):
            raise UsageError("a pass needs at least one token from each of its chunks")
        if rows > self.max_rows:
            raise CapacityError(f"a pass of {rows} rows was asked; this engine's workspace holds {self.max_rows}")
        if len({id(chunk.sequence) for chunk in chunks}) != len(chunks):
            raise UsageError("a sequence occurs in two chunks of the same pass")
        for chunk in chunks:
            length = len(chunk.sequence) + len(chunk.tokens)
            if length > self.config.context_length:
                raise ContextLengthError(
                    f"{length} tokens exceed the context of {self.config.context_length} tokens; shorten the prompt"
                )
            for token in chunk.tokens:
                if not 0 <= token < self.config.vocab_size:
                    raise UsageError(
                        f"token {token} does not exist; this model's tokens: 0..{self.config.vocab_size - 1}"
                    )

    def _prepare(self, chunks: AbstractSequence[Chunk]) -> tuple[Batch, list[tuple[int, int]]]:
        """Room for the tokens of all chunks, and what `make_batch` gives. May be called again when it was refused."""
        for chunk in chunks:
            chunk.sequence.prepare(len(chunk.tokens))
        return make_batch(chunks, self._ropes, self._attentions, self._deltas)

    def _with_spare_memory(self, call: Callable[[], Result]) -> Result:
        """`call()`; once more where memory was refused and some was to spare."""
        try:
            return call()
        except CapacityError:
            if self.spare_memory is None or not self.spare_memory():
                raise
        return call()

    def _run_layers(
        self,
        batch: Batch,
        cancelled: Callable[[], bool] | None = None,
        after: Callable[[str], None] | None = None,
    ) -> bool:
        """Embedding and all layers; False when cancelled. `after` is called with each part's name when it is done."""
        backend, config, weights, activations = self._backend, self.config, self._weights, self._activations
        forward.embed(backend, config, weights.embedding, weights.vectors[0]["attn_norm"], activations, batch)
        if after is not None:
            after("the token embeddings")
        for index, layer in enumerate(self._layers):
            if cancelled is not None and cancelled():
                return False
            for segment in self._segments[index]:
                matrices = weights.acquire(index, segment)
                try:
                    forward.run_segment(segment, backend, config, layer, matrices, activations, batch)
                finally:
                    weights.release(index, segment)
                if after is not None:
                    after(f"layer {index} ({segment})")
        return True

    def _hidden_states(self, number: int, rows: int) -> npt.NDArray[np.float32]:
        """A copy, f32 [rows, H], of the hidden states whose logits were asked in the pass of this number."""
        self._require_open()
        self._require_newest(number)
        return self._backend.read(self._selected, rows).copy()

    def _hidden_rows(self, number: int, kept: npt.NDArray[np.float32] | None, start: int, count: int) -> Tensor:
        """`count` rows of hidden states from `start` on, where the executor can use them: a pass's own, or `kept`."""
        self._require_open()
        if kept is None:
            self._require_newest(number)
            return self._selected.rows(start, start + count)
        self._backend.write(self._kept_block, kept[start : start + count])
        return self._kept_block.rows(0, count)

    def _require_newest(self, number: int) -> None:
        if number != self._passes:
            raise UsageError("the logits of a pass can be read until the next pass only")

    def _logits(self, batch: Batch, selected: Tensor) -> npt.NDArray[np.float32]:
        logits = self._backend.read(self._project(selected), selected.shape[0])
        if not np.isfinite(logits).all():
            self._refuse_nonfinite(batch)
        return logits

    def _likeliest(self, batch: Batch, selected: Tensor) -> list[int]:
        tokens: list[int] = self._backend.argmax(self._project(selected), selected.shape[0]).tolist()
        if min(tokens) < 0:
            self._refuse_nonfinite(batch)
        return tokens

    def _project(self, selected: Tensor) -> Tensor:
        """The block of logits, f32 [logit_rows, V], made of as many hidden states as are given."""
        self._require_open()
        count, softcap = selected.shape[0], self.config.final_softcap
        self._backend.lm_head(self._weights.head, selected, count, softcap, self._logits_block)
        return self._logits_block

    def _refuse_nonfinite(self, batch: Batch) -> NoReturn:
        """Raise the NumericError of logits that are not finite."""
        self._checkpoint.check_unchanged()
        where = self._locate_nonfinite(batch)
        for sequence in self._newest:
            if sequence.recurrent is not None:  # no later pass can make it finite again
                sequence.forget()
        raise NumericError(where)

    def _locate_nonfinite(self, batch: Batch) -> str:
        """Repeat the pass (it writes the same keys and values again; recurrent state is lost already) and name the
        first part after which a value is not finite.
        """
        residual, normed = self._activations.residual, self._activations.normed
        first: list[str] = []

        def look(part: str) -> None:
            if not first and not all(np.isfinite(self._backend.read(t, batch.rows)).all() for t in (residual, normed)):
                first.append(part)

        # Nobody may hold the memory any more that checkpoints went to.
        self._run_layers(replace(batch, state_checkpoints=()), after=look)
        where = first[0] if first else "the output projection (lm_head)"
        return (
            f"NaN or infinity in the logits; it first appears after {where}. "
            "The weights hold such values, or overflow: check the model file"
        )


def _workspace_parts(config: ModelConfig, rows: int, logit_rows: int) -> tuple[int, int, int, int]:
    """Bytes of activations, of the hidden states of logit rows, of a block of kept ones, of a block of logits."""
    return (
        round_up(forward.activation_bytes(config, rows), 256),
        round_up(rows * config.hidden_size * 4, 256),
        round_up(logit_rows * config.hidden_size * 4, 256),
        logit_rows * config.vocab_size * 4,
    )


def _identity(checkpoint: Checkpoint, spec: ModelSpec, kv_dtype: DType) -> str:
    """Tells models and cache dtypes apart in saved states: configuration, tensor index and sizes, not the weights."""
    lines = [repr((spec.config, str(kv_dtype)))]
    lines += [f"{name} {t.shape} {t.format} {t.offset} {t.nbytes}" for name, t in checkpoint.tensors.items()]
    return "\n".join(lines)
