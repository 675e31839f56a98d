"""The native CPU library (native/*.cpp). Addresses are raw pointers; callers check sizes and keep the memory alive."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

class ThreadPool:
    def __init__(self, threads: int) -> None: ...
    @property
    def threads(self) -> int: ...
    def reserve(self, shared_bytes: int, thread_bytes: int) -> None: ...

def read_memory(pool: ThreadPool, address: int, nbytes: int) -> int: ...
def available_instruction_sets() -> list[str]: ...
def instruction_set_index(name: str) -> int: ...

# formats: guarded mappings, string arrays of GGUF, re-arranging of weights
def guard_range(address: int, nbytes: int) -> int: ...
def guard_faulted(handle: int) -> bool: ...
def unguard_range(handle: int) -> None: ...
def scan_strings(address: int, nbytes: int, count: int, starts: int) -> int: ...
def decode_strings(data: bytes, count: int, starts: int) -> list[str]: ...
def repack_weight(
    format: str,
    source: int,
    rows: int,
    blocks: int,
    row_order: int,
    destination: int,
    offsets: list[int],
    pitches: list[int],
) -> None: ...

# text: strings by content, merging of words
class StringIndex:
    """Positions of strings by content; string i is data[starts[i] : starts[i + 1] - 8]. ValueError for bad starts."""

    def __init__(self, data: bytes, starts: npt.NDArray[np.int64]) -> None: ...
    def find(self, text: str) -> int:
        """Position of `text`, -1 where there is none."""

    @property
    def duplicate(self) -> int:
        """Position of the first string that equals an earlier one, -1 without such."""

    @property
    def first_unspaced(self) -> int:
        """Position of the first string that has no space between two parts of it, -1 without such."""

class MergeError(ValueError):
    """A merge gave a symbol, the message, that is no token."""

def merge_by_rank(tokens: StringIndex, merges: StringIndex, ignore_merges: bool, words: list[str]) -> list[int]: ...
def merge_by_score(
    tokens: StringIndex,
    mergeable: npt.NDArray[np.bool_],
    scores: npt.NDArray[np.float32],
    byte_ids: npt.NDArray[np.int32],
    words: list[str],
) -> list[int]: ...

# linear: matrix products and embedding rows
class WeightView:
    def __init__(
        self, format: int, rows: int, cols: int, address: int, offsets: list[int], row_pitches: list[int]
    ) -> None: ...

class LinearOp:
    def __init__(self, pool: ThreadPool, isa: int, weights: list[WeightView]) -> None: ...
    def group(self, x: int, outs: list[int], biases: list[int], prompt_rows: int, rows: int) -> None: ...
    def add(self, x: int, residual: int, bias: int, prompt_rows: int, rows: int) -> None: ...
    def gated(
        self, x: int, out: int, gate_bias: int, up_bias: int, gelu: bool, prompt_rows: int, rows: int
    ) -> None: ...
    def softcapped(self, x: int, out: int, softcap: float, rows: int) -> None: ...
    def gather(self, ids: int, out: int, scale: float, count: int) -> None: ...

def linear_workspace(rows: int, cols: int) -> tuple[int, int]: ...

# quantizer
def quantize_rows(
    source: WeightView,
    isa: int,
    row: int,
    rows: int,
    format: int,
    destination: int,
    offsets: list[int],
    row_pitches: list[int],
) -> tuple[float, float, float, bool]:
    """(squared error, sum of squares, largest error, whether all values could be represented) of the rows."""

# attention, norms, rope
Spans = list[tuple[int, int, int, int]]

class BatchView:
    """The arrays of an ops.batch.Batch by address: keep it alive. Raises ValueError for arrays that do not fit."""

    def __init__(
        self,
        prompt_rows: int,
        positions: npt.NDArray[np.int32],
        row_sequence: npt.NDArray[np.int32],
        prompt_spans: Spans,
        rope_cos: Sequence[npt.NDArray[np.float32]],
        rope_sin: Sequence[npt.NDArray[np.float32]],
        tile_tables: Sequence[npt.NDArray[np.int64]],
        state_tables: Sequence[npt.NDArray[np.int64]] = (),
        state_checkpoints: Sequence[tuple[int, int, npt.NDArray[np.int64]]] = (),
    ) -> None: ...
    @property
    def rows(self) -> int: ...
    @property
    def prompt_rows(self) -> int: ...

class AttentionOp:
    def __init__(
        self,
        pool: ThreadPool,
        isa: int,
        layer: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        rope: int,
        scale: float,
        softcap: float,
        window: int,
        bf16: bool,
    ) -> None: ...
    def append(self, batch: BatchView, q: int, k: int, v: int, q_norm: int, k_norm: int, eps: float) -> None: ...
    def attend(self, batch: BatchView, q: int, out: int) -> None: ...

class ElementwiseOps:
    def __init__(self, pool: ThreadPool, isa: int) -> None: ...
    def add_norm(
        self, residual: int, delta: int, delta_norm: int, weight: int, eps: float, out: int, rows: int, cols: int
    ) -> None: ...
    def select_rows(self, x: int, x_rows: int, cols: int, rows: int, count: int, out: int) -> None: ...
    def split_query_gate(self, joined: int, rows: int, heads: int, head_dim: int, q: int, gate: int) -> None: ...
    def apply_gate(self, x: int, gate: int, rows: int, cols: int) -> None: ...
    def apply(self, function: int, x: int, count: int, out: int) -> None: ...

class DeltaOp:
    def __init__(
        self,
        pool: ThreadPool,
        isa: int,
        layer: int,
        key_heads: int,
        value_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        tiled: bool,
        norm_eps: float,
    ) -> None: ...
    def run(
        self,
        batch: BatchView,
        qkv: int,
        z: int,
        a: int,
        b: int,
        conv: int,
        decay: int,
        dt_bias: int,
        norm: int,
        out: int,
    ) -> None: ...

def delta_workspace(key_dim: int, value_dim: int) -> int: ...
def check_delta(key_heads: int, value_heads: int, key_dim: int, value_dim: int, conv_width: int) -> None: ...
def attention_workspace(heads: int, head_dim: int) -> tuple[int, int]: ...
def check_heads(heads: int, kv_heads: int, head_dim: int, rotary_dim: int) -> None: ...
