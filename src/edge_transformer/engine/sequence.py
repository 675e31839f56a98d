"""A sequence: the tokens processed so far and the state they left behind (KV tiles of every layer with attention,
recurrent state of the others).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as AbstractSequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from edge_transformer.engine.kv import HostTileMemory, LayerTiles, TileGeometry, TileMemory
from edge_transformer.engine.recurrent import CHECKPOINT_BORDER, RecurrentShape, RecurrentState
from edge_transformer.errors import FormatError
from edge_transformer.ops.batch import KV_TILE_POSITIONS

_SAVE_VERSION = 2


class StateShape:
    """What a model's per-sequence state looks like. `layers`: those with attention, in order. `identity` describes the
    model and the cache dtype: states saved with another description are refused. `memory`: where KV tiles lie (None:
    ordinary host memory). `recurrent`: the gated-delta layers, where there are any.
    """

    def __init__(
        self,
        layers: tuple[TileGeometry, ...],
        identity: Callable[[], str],
        memory: TileMemory | None = None,
        recurrent: RecurrentShape | None = None,
    ) -> None:
        self.layers = layers
        self.memory: TileMemory = HostTileMemory() if memory is None else memory
        self.recurrent = recurrent
        self._identity = identity

    def kv_bytes(self, tokens: int, max_rows: int) -> int:
        """Bytes of KV tiles that a sequence of `tokens` tokens holds at most, where passes have up to `max_rows`
        rows.
        """
        total = 0
        for layer in self.layers:
            tiles = layer.held_tiles(tokens, max_rows)
            run = layer.run_tiles(self.memory.run_bytes) if self.memory.run_bytes > 1 else 1
            total += -(-tiles // run) * run * layer.tile_bytes
        return total

    @cached_property
    def fingerprint(self) -> str:
        """sha256 of the identity, in hexadecimal."""
        import hashlib

        return hashlib.sha256(self._identity().encode()).hexdigest()


class Sequence:
    """Tokens processed so far and their state. Made by Engine.new_sequence; close it to give its memory back.

    Not safe for use by two threads at once.
    """

    def __init__(self, shape: StateShape) -> None:
        self.shape = shape
        self.tokens: list[int] = []
        self.prompt_length = 0
        """How many tokens, from the first on, a fresh sequence given them as a prompt would process to the same
        bits.
        """
        self.layers = [LayerTiles(geometry, shape.memory) for geometry in shape.layers]
        self.recurrent = None if shape.recurrent is None else RecurrentState(shape.recurrent)
        self._tables: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = [layer.addresses() for layer in self.layers]
        self._moved: list[tuple[int, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]]] = []

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def held_bytes(self) -> int:
        """Bytes of KV tiles held, and of recurrent state with its checkpoints."""
        recurrent = 0 if self.recurrent is None else self.recurrent.held_bytes
        return sum(layer.held_bytes for layer in self.layers) + recurrent

    def prepare(self, count: int) -> None:
        """Make room for `count` more positions. Raises CapacityError when the host refuses the memory."""
        start = len(self.tokens)
        if self.recurrent is not None:
            self.recurrent.prepare()
        for index, layer in enumerate(self.layers):
            if layer.prepare(start, start + count):
                self._tables[index] = layer.addresses()

    def tile_table(self, layer: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """int64 [tiles]: addresses of the KV tiles of a layer, counted among those with attention."""
        return self._tables[layer]

    def commit(self, tokens: AbstractSequence[int], prompt: bool = True) -> None:
        """Record that the state now covers these tokens too (the engine calls this when a pass has ended); `prompt`:
        they were prompt rows. The checkpoints that the pass has made count from now on; where one is due after decode
        rows, it is made.
        """
        start = len(self.tokens)
        self.tokens.extend(tokens)
        # Recurrent state depends on where pieces begin: a prompt's begin on borders.
        as_prompt = prompt and (self.recurrent is None or start % CHECKPOINT_BORDER == 0)
        if as_prompt and self.prompt_length == start:
            self.prompt_length = len(self.tokens)
        if self.recurrent is not None:
            self.recurrent.commit()
            if self.recurrent.due(len(self.tokens)):
                self.checkpoint()

    def checkpoint(self) -> None:
        """Keep the recurrent state, where there is one, so that `truncate` can come back to this length."""
        if self.recurrent is not None:
            self.recurrent.keep(len(self.tokens))

    def undo(self) -> None:
        """A pass has failed or was given up: what it has done to the state must not be seen. Recurrent state goes back
        to its newest checkpoint; KV tiles of the tokens processed before are as they were.
        """
        if self.recurrent is not None:
            self._cut(self.recurrent.nearest(len(self.tokens)))

    def forget(self) -> None:
        """Drop all tokens and all that was made of them: a pass has put numbers into the state that are not finite."""
        self._cut([0])

    def fork(self) -> Sequence:
        """A second sequence with the same past. Full tiles are shared until one of the two writes into them."""
        other = Sequence(self.shape)
        other.tokens = list(self.tokens)
        other.prompt_length = self.prompt_length
        other.recurrent = None if self.recurrent is None else self.recurrent.fork()
        other.layers = [layer.fork() for layer in self.layers]
        other._tables = list(self._tables)
        return other

    def truncate(self, length: int) -> int:
        """Forget all but the first `length` tokens; returns the length that is left.

        That is `length`, or less when not all of the state can go back to it: that of the nearest checkpoint of the
        recurrent state, and 0 when a sliding window has already freed tiles that the next query would need. The caller
        then processes the tokens again. Raises ValueError when `length` is negative or above the present length.
        """
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot truncate a sequence of {len(self.tokens)} tokens to {length}")
        if length == len(self.tokens):
            return length
        return self._cut([length, 0] if self.recurrent is None else self.recurrent.nearest(length))

    def reuse(self, length: int) -> int:
        """As truncate, for a prompt that goes on from there: where all tokens left were a prompt's, what follows has
        the bits it would have in a fresh sequence. Recurrent state restarts on a border for that.
        """
        if self.recurrent is not None and length <= self.prompt_length:
            length -= length % CHECKPOINT_BORDER
        return self.truncate(length)

    def _cut(self, lengths: AbstractSequence[int]) -> int:
        """Go back to the first of `lengths` (the last is 0) for which every layer holds what it needs."""
        kept = next(length for length in lengths if all(layer.can_truncate(length) for layer in self.layers))
        for index, layer in enumerate(self.layers):
            layer.truncate(kept)
            self._tables[index] = layer.addresses()
        if self.recurrent is not None:
            self.recurrent.restore(kept)
        del self.tokens[kept:]
        self.prompt_length = min(self.prompt_length, kept)
        return kept

    def move_to_host(self) -> int:
        """Take all state to ordinary host memory and give its own memory back, until `move_back`; the bytes moved.
        Nothing else may be asked of the sequence meanwhile but its tokens, `close` and `move_back`.
        """
        if self.recurrent is not None:
            self.recurrent.release()
        for layer in self.layers:
            first = min(layer.first_tile, self._tile_count)
            tiles = [layer.read(tile) for tile in range(first, self._tile_count)]
            empty = np.empty((0, layer.geometry.tile_bytes), np.uint8)
            self._moved.append((first, np.stack(tiles) if tiles else empty))
        self._give_tiles_back()
        return sum(tiles.nbytes for _, tiles in self._moved)

    def move_back(self) -> None:
        """Undo `move_to_host`. Raises CapacityError when the memory is refused; the state is then still on the host."""
        try:
            for index, (first, tiles) in enumerate(self._moved):
                self._load_layer(index, first, tiles, Path("host memory"))
        except BaseException:
            self._give_tiles_back()
            raise
        self._moved = []

    def _give_tiles_back(self) -> None:
        for layer in self.layers:
            layer.close()
        self._tables = [layer.addresses() for layer in self.layers]

    def save(self, path: Path) -> None:
        """Write tokens and state to `path` (numpy's npz, no pickles). The file is replaced atomically."""
        header = {"version": _SAVE_VERSION, "fingerprint": self.shape.fingerprint}
        arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "tokens": np.array(self.tokens, np.int64),
            "prompt_length": np.array([self.prompt_length], np.int64),
        }
        if self.recurrent is not None:
            checkpoints = self.recurrent.checkpoints
            arrays["recurrent"] = self.recurrent.read()
            arrays["checkpoints"] = np.array(list(checkpoints), np.int64)
            arrays.update({f"checkpoint.{position}": state for position, state in checkpoints.items()})
        for index, layer in enumerate(self.layers):
            first = min(layer.first_tile, self._tile_count)
            arrays[f"first.{index}"] = np.array([first], np.int64)
            tiles = [layer.read(tile) for tile in range(first, self._tile_count)]
            arrays[f"tiles.{index}"] = np.stack(tiles) if tiles else np.empty((0, layer.geometry.tile_bytes), np.uint8)
        partial = path.with_name(path.name + ".partial")
        try:
            with partial.open("wb") as file:
                np.savez(file, allow_pickle=False, **arrays)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path, shape: StateShape) -> Sequence:
        """Read what `save` wrote. Raises FormatError when the file is damaged or was made with another model or KV
        dtype.
        """
        sequence = cls(shape)
        try:
            with np.load(path, allow_pickle=False) as archive:
                header = json.loads(bytes(archive["header"]))
                if header["version"] != _SAVE_VERSION:
                    raise FormatError(path, f"state version {header['version']}, this program reads {_SAVE_VERSION}")
                if header["fingerprint"] != shape.fingerprint:
                    raise FormatError(path, "this state was saved with another model or another --kv-dtype")
                tokens = archive["tokens"]
                if tokens.ndim != 1 or tokens.dtype != np.int64 or (tokens < 0).any():
                    raise FormatError(path, "its list of tokens is damaged")
                sequence.tokens = tokens.tolist()
                sequence.prompt_length = min(max(int(archive["prompt_length"][0]), 0), len(sequence))
                if sequence.recurrent is not None:
                    _load_recurrent(sequence.recurrent, archive, len(sequence))
                for index in range(len(shape.layers)):
                    sequence._load_layer(index, int(archive[f"first.{index}"][0]), archive[f"tiles.{index}"], path)
        except _faults_of_damage() as error:
            sequence.close()
            raise FormatError(path, f"not a readable saved state: {error}") from error
        except BaseException:
            sequence.close()
            raise
        return sequence

    def close(self) -> None:
        """Give all state back. The sequence is empty afterwards and may be used again."""
        self._give_tiles_back()
        self._moved = []
        if self.recurrent is not None:
            self.recurrent.close()
        self.tokens = []
        self.prompt_length = 0

    @property
    def _tile_count(self) -> int:
        return -(-len(self.tokens) // KV_TILE_POSITIONS)

    def _load_layer(
        self, index: int, first: int, tiles: np.ndarray[tuple[int, ...], np.dtype[np.uint8]], path: Path
    ) -> None:
        layer = self.layers[index]
        length = len(self.tokens)
        if tiles.ndim != 2 or tiles.dtype != np.uint8 or tiles.shape[1] != layer.geometry.tile_bytes:
            raise FormatError(path, f"layer {index}: tiles have shape {tiles.shape} and type {tiles.dtype}")
        if first < 0 or first + len(tiles) != self._tile_count:
            raise FormatError(path, f"layer {index}: tiles {first}..{first + len(tiles)} do not cover {length} tokens")
        layer.skip(first)
        if length:
            layer.prepare(first * KV_TILE_POSITIONS, length)
        if not layer.can_truncate(length):
            raise FormatError(path, f"layer {index}: tiles that the next token would see are missing")
        for tile, data in enumerate(tiles, start=first):
            layer.write(tile, data)
        self._tables[index] = layer.addresses()


def _load_recurrent(state: RecurrentState, archive: Mapping[str, np.ndarray[Any, Any]], length: int) -> None:
    """Raises ValueError or LookupError where the arrays are not what `save` writes."""
    state.write(_bytes(archive["recurrent"]))
    for position in archive["checkpoints"].tolist():
        if not isinstance(position, int) or not 0 < position <= length:
            raise ValueError(f"a checkpoint at {position} of {length} tokens")
        checkpoint = _bytes(archive[f"checkpoint.{position}"])
        if checkpoint.shape != (state.shape.nbytes,):
            raise ValueError(f"the checkpoint at {position} has shape {checkpoint.shape}")
        state.checkpoints[position] = checkpoint


def _bytes(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if array.dtype != np.uint8:
        raise ValueError(f"bytes were expected, got {array.dtype}")
    return array


def _faults_of_damage() -> tuple[type[Exception], ...]:
    """What reading a damaged npz file raises: from the archive, the compression, and the headers of the arrays."""
    import tokenize
    import zipfile
    import zlib

    return (
        EOFError,
        LookupError,
        MemoryError,  # a shape beyond reason
        OSError,
        RuntimeError,  # an encrypted member; NotImplementedError: an unknown way of compressing
        TypeError,
        ValueError,
        tokenize.TokenError,
        zipfile.BadZipFile,
        zlib.error,
    )
