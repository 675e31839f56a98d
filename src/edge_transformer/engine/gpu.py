"""An engine on a GPU: demand, plan, arena, backend and weights put together in that order."""

from __future__ import annotations

from dataclasses import dataclass

from edge_transformer.cpu.backend import CpuBackend
from edge_transformer.cuda.arena import Arena
from edge_transformer.cuda.backend import CudaBackend
from edge_transformer.cuda.device_batch import BatchCapacity, tiles_of_context
from edge_transformer.cuda.runtime import Gpu
from edge_transformer.cuda.tile_memory import HOST_RUN_BYTES, ArenaTileMemory, LockedTileMemory
from edge_transformer.cuda.weights import GpuWeights, segment_bytes, vector_bytes
from edge_transformer.engine.core import MAX_ROWS, Engine
from edge_transformer.engine.kv import TileGeometry, TileMemory
from edge_transformer.engine.weights import HostWeights
from edge_transformer.formats.checkpoint import Checkpoint
from edge_transformer.formats.weight import round_up
from edge_transformer.models import forward
from edge_transformer.models.config import ModelSpec
from edge_transformer.ops.batch import KV_TILE_POSITIONS
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import Demand, KvPlace, Plan, Wishes, make_plan


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What the user asked for. `context_length`: what a resident KV cache has room for."""

    wishes: Wishes
    context_length: int
    sequences: int = 1
    fast_prefill: bool = False


def open_gpu_engine(
    gpu: Gpu,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    host_weights: HostWeights,
    host: CpuBackend,
    kv_dtype: DType,
    options: GpuOptions,
    max_rows: int = MAX_ROWS,
) -> tuple[Engine, Plan]:
    """The engine and the plan it keeps to. Raises CapacityError when no plan fits, or the GPU refuses the arena."""
    config = spec.config
    shapes = forward.attention_shapes(config, kv_dtype)
    geometries = [TileGeometry(s.kv_heads, s.head_dim, kv_dtype, s.window) for s in shapes]
    capacity = BatchCapacity(
        rows=max_rows,
        sequences=options.sequences,
        tiles=tiles_of_context(config.context_length),
        layers=config.num_layers,
        rotary_dims=tuple(rope.rotary_dim for rope in config.ropes),
    )
    tile_bytes = max(geometry.tile_bytes for geometry in geometries)
    buffer_bytes = max(HOST_RUN_BYTES // tile_bytes, 1) * tile_bytes
    demand = Demand(
        segment_bytes=tuple(
            tuple(segment_bytes(segment) for segment in host_weights.layer(index).values())
            for index in range(config.num_layers)
        ),
        vector_bytes=vector_bytes(host_weights),
        head_bytes=round_up(host_weights.head.layout.nbytes, 256),
        workspace_bytes=round_up(Engine.workspace_bytes_of(config, max_rows), 256)
        + CudaBackend.workspace_bytes(capacity, shapes),
        kv_context_bytes=options.sequences
        * sum(_resident_tiles(g, options.context_length, max_rows) * g.tile_bytes for g in geometries),
        kv_buffer_bytes=buffer_bytes,
    )
    plan = make_plan(demand, options.wishes)
    arena = Arena(gpu, plan.arena_bytes)
    compute, copies = gpu.stream("compute"), gpu.stream("weight copies")
    tile_memory: TileMemory
    if plan.kv is KvPlace.GPU:
        address = arena.take(demand.kv_context_bytes, "KV cache")
        kv_memory = (address, demand.kv_context_bytes)
        tile_memory = ArenaTileMemory(gpu, compute, address, demand.kv_context_bytes, tile_bytes)
    else:
        kv_memory = None
        tile_memory = LockedTileMemory(gpu, compute)
    backend = CudaBackend(gpu, arena, compute, capacity, host, kv_memory, buffer_bytes, options.fast_prefill)
    weights = GpuWeights(gpu, arena, plan, host_weights, compute, copies)
    return Engine(checkpoint, spec, backend, weights, kv_dtype, max_rows, tile_memory), plan


def _resident_tiles(geometry: TileGeometry, context_length: int, max_rows: int) -> int:
    """Tiles of a layer that a sequence of the whole context holds at once."""
    whole = tiles_of_context(context_length)
    if geometry.window is None:
        return whole
    # A pass needs what its first row sees and what its last row writes; both ends may lie inside a tile.
    return min(whole, (geometry.window + max_rows - 2) // KV_TILE_POSITIONS + 2)
