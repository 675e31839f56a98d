"""KV tiles: sharing by forks, copying before a write, freeing behind a window, truncation, saving."""

from __future__ import annotations

import contextlib
import functools
import io
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_transformer.engine.kv import RUN_BYTES, HostTileMemory, LayerTiles, TileGeometry
from edge_transformer.engine.sequence import Sequence, StateShape
from edge_transformer.errors import FormatError
from edge_transformer.ops.batch import KV_TILE_POSITIONS as TILE
from edge_transformer.ops.tensor import DType, array_at

HOST = HostTileMemory()
SMALL = TileGeometry(kv_heads=1, head_dim=8, dtype=DType.F32, window=None)
WINDOWED = TileGeometry(kv_heads=1, head_dim=8, dtype=DType.F32, window=100)


def fill(tiles: LayerTiles, index: int, value: object) -> None:
    tiles.write(index, np.broadcast_to(np.asarray(value, np.uint8), (tiles.geometry.tile_bytes,)))


def view(tiles: LayerTiles, index: int) -> np.ndarray:
    return array_at(int(tiles.addresses()[index]), (tiles.geometry.tile_bytes,), np.uint8)


def test_tile_bytes_by_hand() -> None:
    assert SMALL.tile_bytes == 2 * 1 * 512 * 8 * 4
    assert TileGeometry(3, 64, DType.BF16, None).tile_bytes == 2 * 3 * 512 * 64 * 2


def test_runs_hold_consecutive_tiles_of_at_least_four_mebibytes() -> None:
    geometry = TileGeometry(3, 64, DType.BF16, None)
    tiles = LayerTiles(geometry, HOST)
    tiles.prepare(0, 10 * TILE)  # one run
    addresses = tiles.addresses()
    assert geometry.run_tiles(RUN_BYTES) * geometry.tile_bytes >= RUN_BYTES
    assert geometry.run_tiles(RUN_BYTES) >= 10
    assert np.all(np.diff(addresses) == geometry.tile_bytes)
    tiles.close()


def test_runs_grow_with_the_sequence() -> None:
    geometry = TileGeometry(2, 128, DType.BF16, None)  # 512 KiB a tile
    held, runs = 0, []
    while held < 100:
        runs.append(geometry.run_tiles(RUN_BYTES, held))
        held += runs[-1]
    assert runs == [8, 8, 16, 32, 32, 32]  # 4, 4, 8, 16, 16, 16 MiB
    assert TileGeometry(2, 128, DType.BF16, 512).run_tiles(RUN_BYTES, 5) == 1


@pytest.mark.parametrize(
    ("window", "position", "first"),
    [
        (None, 5000, 0),
        (512, 511, 0),
        (512, 1022, 0),
        (512, 1023, 1),
        (1, 512, 1),
        (1, 511, 0),
        (100, 611, 1),
        (100, 610, 0),
    ],
)
def test_first_visible_tile(window: int | None, position: int, first: int) -> None:
    geometry = TileGeometry(1, 8, DType.F32, window)
    visible = [j for j in range(position + 1) if window is None or position - j < window]
    assert geometry.first_visible_tile(position) == first == visible[0] // TILE


def test_window_frees_tiles_and_recycles_their_memory() -> None:
    tiles = LayerTiles(WINDOWED, HOST)
    seen: set[int] = set()
    for start in range(0, 40 * TILE, TILE):
        tiles.prepare(start, start + TILE)
        addresses = tiles.addresses()
        held = np.flatnonzero(addresses)
        assert held.tolist() == list(range(WINDOWED.first_visible_tile(start), start // TILE + 1))
        seen |= set(addresses[held].tolist())
    assert len(seen) <= 3
    assert not tiles.can_truncate(TILE)
    assert tiles.can_truncate(39 * TILE + 99)
    tiles.close()


def test_fork_shares_full_tiles_and_copies_before_writing() -> None:
    one = LayerTiles(SMALL, HOST)
    one.prepare(0, TILE + 10)
    fill(one, 0, 1)
    fill(one, 1, 2)
    two = one.fork()
    assert two.addresses().tolist() == one.addresses().tolist()
    two.prepare(TILE + 10, TILE + 11)
    assert two.addresses()[0] == one.addresses()[0]
    assert two.addresses()[1] != one.addresses()[1]
    assert np.all(two.read(1) == 2)
    fill(two, 1, 3)
    assert np.all(one.read(1) == 2)
    one.prepare(TILE + 10, TILE + 11)
    fill(one, 1, 4)
    assert np.all(two.read(1) == 3)
    one.close()
    assert np.all(two.read(0) == 1)
    two.close()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 900)), max_size=30))
@settings(max_examples=60, deadline=None)
def test_random_forks_writes_and_truncations_keep_every_sequence_to_itself(actions: list[tuple[int, int, int]]) -> None:
    """Each list is compared with a plain Python list of what was written at each position."""
    lists = [LayerTiles(SMALL, HOST)]
    written: list[list[int]] = [[]]
    item = SMALL.tile_bytes // TILE
    counter = 0

    def cell(tiles: LayerTiles, position: int) -> np.ndarray:
        return view(tiles, position // TILE).reshape(TILE, item)[position % TILE]

    for kind, which, amount in actions:
        index = which % len(lists)
        tiles, values = lists[index], written[index]
        if kind <= 1:
            tiles.prepare(len(values), len(values) + amount)
            for _ in range(amount):
                counter = counter % 255 + 1
                cell(tiles, len(values))[:] = counter
                values.append(counter)
        elif kind == 2 and len(lists) < 5:
            lists.append(tiles.fork())
            written.append(list(values))
        elif kind == 3:
            length = max(0, len(values) - amount)
            tiles.truncate(length)
            del values[length:]
    for tiles, values in zip(lists, written, strict=True):
        for position, value in enumerate(values):
            assert np.all(cell(tiles, position) == value)
    for tiles in lists:
        tiles.close()


def _filled(shape: StateShape, length: int, seed: int = 0) -> Sequence:
    sequence = Sequence(shape)
    random = np.random.default_rng(seed)
    for start in range(0, length, TILE):
        count = min(TILE, length - start)
        sequence.prepare(count)
        sequence.commit(random.integers(0, 1000, count).tolist(), prompt=True)
        for layer in sequence.layers:
            fill(layer, start // TILE, random.integers(0, 256, layer.geometry.tile_bytes, np.uint8))
    return sequence


SHAPE = StateShape((SMALL, WINDOWED), lambda: "model-a")


@pytest.mark.parametrize("length", [0, 1, 511, 512, 513, 1300])
def test_saved_state_comes_back(tmp_path: Path, length: int) -> None:
    sequence = _filled(SHAPE, length)
    sequence.save(tmp_path / "state")
    loaded = Sequence.load(tmp_path / "state", SHAPE)
    assert loaded.tokens == sequence.tokens
    for layer, original in zip(loaded.layers, sequence.layers, strict=True):
        assert layer.tile_count == original.tile_count
        for tile in range(original.first_tile, original.tile_count):
            assert np.array_equal(layer.read(tile), original.read(tile))
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    loaded.close()
    sequence.close()


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    _filled(SHAPE, 700).save(tmp_path / "state")
    with pytest.raises(FormatError, match="another model"):
        Sequence.load(tmp_path / "state", StateShape((SMALL, WINDOWED), lambda: "model-b"))


@pytest.mark.parametrize("keep", [0, 1, 100, 5000, -1])
def test_damaged_state_is_a_format_error(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "state"
    _filled(SHAPE, 700).save(path)
    data = path.read_bytes()
    path.write_bytes(
        data[:keep] if keep >= 0 else data[: len(data) // 2] + bytes([255]) * 64 + data[len(data) // 2 + 64 :]
    )
    with pytest.raises(FormatError, match="state"):
        Sequence.load(path, SHAPE)


@pytest.mark.parametrize(
    "tokens",
    [np.full(700, -1), np.full(700, 1.5), np.full(700, "1"), np.zeros((700, 1), np.int64)],
    ids=["negative", "not whole", "text", "two axes"],
)
def test_tokens_that_are_none_are_refused(tmp_path: Path, tokens: np.ndarray) -> None:
    _filled(SHAPE, 700).save(tmp_path / "state")
    with np.load(tmp_path / "state") as archive:
        arrays = dict(archive)
    with (tmp_path / "other").open("wb") as file:
        np.savez(file, **{**arrays, "tokens": tokens})
    with pytest.raises(FormatError, match="list of tokens is damaged"):
        Sequence.load(tmp_path / "other", SHAPE)


@given(damage=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_any_damage_is_a_format_error_or_without_effect(damage: list[tuple[float, int]]) -> None:
    """Bytes of the archive's own structures and of the arrays' headers, the place where readers fail in many ways."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        data = bytearray(_compressed_state())
        for place, value in damage:
            data[int(place * len(data))] = value
        path.write_bytes(data)
        with contextlib.suppress(FormatError):
            Sequence.load(path, SHAPE).close()


@functools.cache
def _compressed_state() -> bytes:
    """A saved state, compressed: what `save` never writes, and others may."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "state"
        Sequence(SHAPE).save(path)
        archive = io.BytesIO()
        with zipfile.ZipFile(path) as source, zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as target:
            for name in source.namelist():
                target.writestr(name, source.read(name))
    return archive.getvalue()


def test_truncate_answers_with_what_is_left() -> None:
    sequence = _filled(SHAPE, 1300)
    assert sequence.truncate(1290) == 1290
    assert len(sequence) == 1290
    with pytest.raises(ValueError, match="1290"):
        sequence.truncate(1291)
    assert sequence.truncate(300) == 0  # the windowed layer has freed its first tile
    assert sequence.tokens == []
    sequence.close()


def test_truncate_without_windows_keeps_any_length() -> None:
    sequence = _filled(StateShape((SMALL,), lambda: "x"), 1300)
    assert sequence.truncate(300) == 300
    sequence.close()
