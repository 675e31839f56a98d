"""A sequence: the tokens processed so far and the state they left behind (KV tiles of every layer)."""

from __future__ import annotations

import json
from collections.abc import Callable
from collections.abc import Sequence as AbstractSequence
from functools import cached_property
from pathlib import Path

import numpy as np

from edge_transformer.engine.kv import HostTileMemory, LayerTiles, TileGeometry, TileMemory
from edge_transformer.errors import FormatError
from edge_transformer.ops.batch import KV_TILE_POSITIONS

_SAVE_VERSION = 1


class StateShape:
    """What a model's per-sequence state looks like. `identity` describes the model and the cache dtype: states saved
    with another description are refused. `memory`: where KV tiles lie (None: ordinary host memory).
    """

    def __init__(
        self, layers: tuple[TileGeometry, ...], identity: Callable[[], str], memory: TileMemory | None = None
    ) -> None:
        self.layers = layers
        self.memory: TileMemory = HostTileMemory() if memory is None else memory
        self._identity = identity

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
        self.layers = [LayerTiles(geometry, shape.memory) for geometry in shape.layers]
        self._tables: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = [layer.addresses() for layer in self.layers]

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def held_bytes(self) -> int:
        """Bytes of KV tiles held."""
        return sum(layer.held_bytes for layer in self.layers)

    def prepare(self, count: int) -> None:
        """Make room for `count` more positions. Raises CapacityError when the host refuses the memory."""
        start = len(self.tokens)
        for index, layer in enumerate(self.layers):
            if layer.prepare(start, start + count):
                self._tables[index] = layer.addresses()

    def tile_table(self, layer: int) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        """int64 [tiles]: addresses of the layer's KV tiles."""
        return self._tables[layer]

    def commit(self, tokens: AbstractSequence[int]) -> None:
        """Record that the state now covers these tokens too (the engine calls this when a pass has ended)."""
        self.tokens.extend(tokens)

    def fork(self) -> Sequence:
        """A second sequence with the same past. Full tiles are shared until one of the two writes into them."""
        other = Sequence(self.shape)
        other.tokens = list(self.tokens)
        other.layers = [layer.fork() for layer in self.layers]
        other._tables = list(self._tables)
        return other

    def truncate(self, length: int) -> int:
        """Forget all but the first `length` tokens; returns the length that is left.

        That is `length`, or 0 when a sliding window has already freed tiles that the next query would need: the caller
        then processes the tokens again. Raises ValueError when `length` is negative or above the present length.
        """
        if not 0 <= length <= len(self.tokens):
            raise ValueError(f"cannot truncate a sequence of {len(self.tokens)} tokens to {length}")
        kept = length if all(layer.can_truncate(length) for layer in self.layers) else 0
        for index, layer in enumerate(self.layers):
            layer.truncate(kept)
            self._tables[index] = layer.addresses()
        del self.tokens[kept:]
        return kept

    def save(self, path: Path) -> None:
        """Write tokens and state to `path` (numpy's npz, no pickles). The file is replaced atomically."""
        header = {"version": _SAVE_VERSION, "fingerprint": self.shape.fingerprint}
        arrays: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = {
            "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
            "tokens": np.array(self.tokens, np.int64),
        }
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
        for layer in self.layers:
            layer.close()
        self._tables = [layer.addresses() for layer in self.layers]
        self.tokens = []

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
