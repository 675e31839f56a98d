"""An engine on a GPU: demand, plan, arena, backend and weights put together in that order."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from edge_transformer.cuda.arena import ALIGNMENT, Arena
from edge_transformer.cuda.backend import CudaBackend
from edge_transformer.cuda.compiler import OLDEST
from edge_transformer.cuda.device_batch import MAX_LOGIT_ROWS, BatchCapacity, tiles_of_context
from edge_transformer.cuda.gemm_shape import TENSOR_CORES
from edge_transformer.cuda.host_weights_feed import page_locking_is_refused
from edge_transformer.cuda.runtime import Gpu
from edge_transformer.cuda.state_memory import ArenaStateMemory
from edge_transformer.cuda.tile_memory import ArenaTileMemory, LockedTileMemory
from edge_transformer.cuda.timeline import Timeline
from edge_transformer.cuda.tracing_gpu import TracingGpu
from edge_transformer.cuda.weights import GpuWeights, segment_bytes, vector_bytes
from edge_transformer.engine.core import LOGIT_BLOCK_ROWS, MAX_ROWS, Engine
from edge_transformer.engine.kv import LARGEST_RUN_BYTES, RecurrentMemory, TileGeometry, TileMemory
from edge_transformer.engine.rates import measured_rates
from edge_transformer.engine.traced import TracedEngine, traced_host
from edge_transformer.engine.weights import HostWeights
from edge_transformer.errors import CapacityError, UsageError
from edge_transformer.formats.checkpoint import Checkpoint
from edge_transformer.formats.weight import round_up
from edge_transformer.hub.progress import Progress, silent
from edge_transformer.models import forward
from edge_transformer.models.config import ModelSpec
from edge_transformer.ops.backend import Backend
from edge_transformer.ops.tensor import DType
from edge_transformer.placement.plan import UNMEASURED, Demand, HeadPlace, KvPlace, Plan, Wishes, make_plan

MARGIN_BYTES = 256 << 20
"""Free memory that a budget nobody gave leaves alone: kernels, local memory, what else the user does."""

OTHER_CONTEXT = 8192
"""Tokens that sequences after the first have room for on average in a resident KV cache, where contexts are longer."""

ROWS_PER_MULTIPROCESSOR = 32
"""Rows of a pass that keep a multiprocessor busy where a model is resident. Streamed, a pass waits for the bus."""

MOST_ROWS = 4096
"""Rows of a pass at most that are chosen for a GPU: more are no faster, and a pass ends later when it is cancelled."""

ROWS_SHARE = 16
"""Part of the budget, 1 / ROWS_SHARE, that more rows than MAX_ROWS may take."""


OLDEST_CAPABILITY = divmod(OLDEST, 10)
"""Of the GPUs that there are kernels for: major and minor number."""


@dataclass(frozen=True, slots=True)
class GpuSettings:
    """How to use a GPU; None leaves a choice to the planner.

    device: number of the GPU. vram_bytes: limit of the arena (None: what is free, less a margin). resident_layers:
    -1 all, 0 none, n spread evenly. slots: for streamed layers, at least 2. kv_offload: KV cache in host memory.
    lm_head: "gpu", "streamed", "split" or "cpu". fast_prefill: one bf16 term for the activations of prompts.
    force_capability: the kernels' path for an older card, such as (7, 5). timeline: records what the GPU does and when,
    without graphs. sequences: that share a pass at most; recurrent state has room for so many, a resident KV cache for
    one of the whole context and others of OTHER_CONTEXT tokens, or kv_bytes.
    """

    device: int = 0
    vram_bytes: int | None = None
    resident_layers: int | None = None
    slots: int | None = None
    kv_offload: bool | None = None
    lm_head: str | None = None
    fast_prefill: bool = False
    force_capability: tuple[int, int] | None = None
    timeline: Timeline | None = None
    sequences: int = 1
    kv_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.sequences < 1:
            raise UsageError(f"sequences is {self.sequences}; allowed: 1 or more")
        if self.lm_head is not None and self.lm_head not in tuple(HeadPlace):
            raise UsageError(f"lm_head is {self.lm_head!r}; allowed: {', '.join(HeadPlace)}")
        for option, field in (("--vram", "vram_bytes"), ("--kv-budget", "kv_bytes")):
            nbytes = getattr(self, field)
            if nbytes is not None and nbytes < 1:
                raise UsageError(f"{option} ({field} in Python) is {nbytes}; allowed: 1 byte or more")
        if self.force_capability is not None and self.force_capability < OLDEST_CAPABILITY:
            raise UsageError(
                f"--gpu-arch (force_capability in Python) is {_version(self.force_capability)}; allowed: "
                f"{_version(OLDEST_CAPABILITY)}, the oldest path there is, up to the GPU's own capability"
            )


@dataclass(frozen=True, slots=True)
class GpuOptions:
    """What the user asked for. `context_length`: what a resident KV cache has room for. measure: let measured rates of
    the bus and the CPU choose the output projection's place, or where it is split, where that is open and something is
    streamed. kv_bytes: of a
    resident KV cache (None: what `sequences` and `context_length` need).
    """

    wishes: Wishes
    context_length: int
    sequences: int = 1
    fast_prefill: bool = False
    timeline: Timeline | None = None
    measure: bool = False
    kv_bytes: int | None = None


def open_gpu_engine(
    gpu: Gpu,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    host_weights: HostWeights,
    host: Backend,
    kv_dtype: DType,
    options: GpuOptions,
    max_rows: int | None = None,
) -> tuple[Engine, Plan]:
    """The engine and the plan it keeps to. max_rows: of a pass; None: MAX_ROWS, or as many as occupy the GPU where all
    is resident and memory is ample. Raises CapacityError when no plan fits, or the GPU refuses the arena.
    """
    config = spec.config
    shapes = forward.attention_shapes(config, kv_dtype)
    deltas = forward.delta_shapes(config)
    geometries = [TileGeometry(s.kv_heads, s.head_dim, kv_dtype, s.window) for s in shapes]
    # Where no layer has attention, the KV cache is one block that nobody uses.
    tile_bytes = max((geometry.tile_bytes for geometry in geometries), default=ALIGNMENT)
    buffer_bytes = max(LARGEST_RUN_BYTES // tile_bytes, 1) * tile_bytes
    state_bytes = sum(shape.block_bytes for shape in deltas)  # of a sequence

    layers = [host_weights.layer(index) for index in range(config.num_layers)]
    matrices = [weight for layer in layers for segment in layer.values() for weight in segment.values()]
    widest = max(weight.layout.cols for weight in matrices)

    # The output projection is read once for all sequences of a pass.
    logit_rows = min(round_up(options.sequences, LOGIT_BLOCK_ROWS), MAX_LOGIT_ROWS)

    def sized(rows: int) -> tuple[BatchCapacity, Demand]:
        """What passes of up to `rows` rows need."""
        capacity = BatchCapacity(
            rows=rows,
            sequences=options.sequences,
            tiles=tiles_of_context(config.context_length),
            layers=config.num_layers,
            rotary_dims=tuple(rope.rotary_dim for rope in config.ropes),
            recurrent=bool(deltas),
        )
        demand = Demand(
            segment_bytes=tuple(
                tuple(segment_bytes(segment) for segment in host_weights.layer(index).values())
                for index in range(config.num_layers)
            ),
            vector_bytes=vector_bytes(host_weights),
            head_bytes=round_up(host_weights.head.layout.nbytes, 256),
            workspace_bytes=round_up(Engine.workspace_bytes_of(config, rows, logit_rows), 256)
            + CudaBackend.workspace_bytes(
                capacity, shapes, deltas, widest, gpu.properties.capability, options.fast_prefill
            ),
            kv_context_bytes=max(tile_bytes, options.kv_bytes or _kv_bytes(geometries, options, rows)),
            kv_buffer_bytes=buffer_bytes,
            head_rows=host_weights.head.layout.rows,
            head_pitches=tuple(plane.row_pitch for plane in host_weights.head.layout.planes),
            state_bytes=options.sequences * state_bytes,
        )
        return capacity, demand

    rows = MAX_ROWS if max_rows is None else max_rows
    capacity, demand = sized(rows)
    plan = make_plan(demand, options.wishes)
    if options.measure and options.wishes.head in (None, HeadPlace.SPLIT) and plan.slots:
        plan = _measured_plan(gpu, host, host_weights, demand, options, plan)
    if max_rows is None and plan.slots == 0 and plan.kv is KvPlace.GPU:
        more = _rows_to_occupy(gpu.properties.multiprocessors)
        while more > rows:
            ampler_capacity, ampler_demand = sized(more)
            extra = _rows_bytes(ampler_demand) - _rows_bytes(demand)
            if extra <= min(options.wishes.budget_bytes // ROWS_SHARE, options.wishes.budget_bytes - plan.arena_bytes):
                rows, capacity, demand = more, ampler_capacity, ampler_demand
                plan = replace(make_plan(demand, options.wishes, plan.rates or UNMEASURED), rates=plan.rates)
            more //= 2
    timeline = options.timeline
    if timeline is not None:
        gpu, host = TracingGpu(gpu, timeline), traced_host(host, timeline)
    with ExitStack() as on_failure:
        arena = Arena(gpu, plan.arena_bytes)
        on_failure.callback(arena.close)
        compute, copies = gpu.stream("compute"), gpu.stream("weight copies")
        tile_memory: TileMemory
        if plan.kv is KvPlace.GPU:
            address = arena.take(demand.kv_context_bytes, "KV cache")
            kv_memory = (address, demand.kv_context_bytes)
            tile_memory = ArenaTileMemory(gpu, compute, address, demand.kv_context_bytes, tile_bytes)
        else:
            kv_memory = None
            tile_memory = locked = LockedTileMemory(gpu, compute)
            locked.have_ready(g.run_tiles(locked.run_bytes) * g.tile_bytes for g in geometries)
        state_memory: RecurrentMemory | None = None
        states = None
        if deltas:
            states = arena.take(demand.state_bytes, "recurrent state"), demand.state_bytes
            state_memory = ArenaStateMemory(gpu, compute, *states, state_bytes)
        replayable = all(plan.resident) and plan.kv is KvPlace.GPU and timeline is None
        backend = CudaBackend(
            gpu,
            arena,
            compute,
            capacity,
            host,
            kv_memory,
            buffer_bytes,
            options.fast_prefill,
            replayable,
            states,
            widest,
        )
        backend.prepare([*matrices, host_weights.head], shapes, deltas, config.output_gate)
        weights = GpuWeights(gpu, arena, plan, host_weights, compute, copies)
        on_failure.callback(weights.close)
        if timeline is None:
            engine = Engine(checkpoint, spec, backend, weights, kv_dtype, rows, tile_memory, state_memory, logit_rows)
        else:
            engine = TracedEngine(
                timeline, checkpoint, spec, backend, weights, kv_dtype, rows, tile_memory, state_memory, logit_rows
            )
        on_failure.pop_all()
    return engine, replace(plan, ring=weights.ring_cost)


def open_on_cuda(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    host_weights: HostWeights,
    host: Backend,
    kv_dtype: DType,
    context_length: int,
    settings: GpuSettings,
    progress: Progress | None,
) -> tuple[Engine, Plan]:
    """The engine on a GPU of this machine. `progress` hears of kernels that are compiled at first use.

    Raises GpuError when there is no GPU, driver or package to use it, UsageError for fast_prefill on one without the
    tensor cores for it; else as open_gpu_engine.
    """
    from edge_transformer.cuda.driver import CudaGpu

    gpu = CudaGpu(settings.device, settings.force_capability, progress=progress or silent)
    try:
        if settings.fast_prefill and gpu.properties.capability < TENSOR_CORES:
            raise UsageError(
                f"--fast-prefill (fast_prefill in Python) needs tensor cores, compute capability "
                f"{_version(TENSOR_CORES)} or later; {gpu.properties.name} takes the path of "
                f"{_version(gpu.properties.capability)}, where it changes nothing: leave it out"
            )
        budget = settings.vram_bytes
        if budget is None:
            budget = max(0, gpu.memory_info()[0] - MARGIN_BYTES)
        head = None if settings.lm_head is None else HeadPlace(settings.lm_head)
        wishes = Wishes(budget, settings.resident_layers, settings.slots, settings.kv_offload, head)
        options = GpuOptions(
            wishes,
            context_length,
            sequences=settings.sequences,
            kv_bytes=settings.kv_bytes,
            fast_prefill=settings.fast_prefill,
            timeline=settings.timeline,
            measure=True,
        )
        return open_gpu_engine(gpu, checkpoint, spec, host_weights, host, kv_dtype, options)
    except BaseException:
        gpu.close()
        raise


def _measured_plan(
    gpu: Gpu, host: Backend, weights: HostWeights, demand: Demand, options: GpuOptions, unmeasured: Plan
) -> Plan:
    """The plan by measured rates; the one made without, and why, where they cannot be measured or would not hold."""
    if page_locking_is_refused(gpu, weights.locked_ranges()):
        # Through a ring weights come slower, and from the thread that would have the CPU compute meanwhile.
        return replace(unmeasured, unmeasured="the host refuses to page-lock weights")
    try:
        rates = measured_rates(gpu, host, weights.head, options.sequences)
    except CapacityError as refused:  # the plan that stands may need less than that
        return replace(unmeasured, unmeasured=str(refused))
    return replace(make_plan(demand, options.wishes, rates), rates=rates)


def _version(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def _rows_to_occupy(multiprocessors: int) -> int:
    """Rows of a prompt's pass with which products and attention have work for every multiprocessor."""
    wanted = min(MOST_ROWS, ROWS_PER_MULTIPROCESSOR * multiprocessors)
    return max(MAX_ROWS, 1 << wanted.bit_length() - 1)


def _rows_bytes(demand: Demand) -> int:
    """What grows with the rows of a pass."""
    return demand.workspace_bytes + demand.kv_context_bytes


def _kv_bytes(geometries: Sequence[TileGeometry], options: GpuOptions, rows: int) -> int:
    """Of a resident KV cache: for one sequence of the whole context, and others of OTHER_CONTEXT tokens at most."""

    def of_a_sequence(context: int) -> int:
        return sum(geometry.held_tiles(context, rows) * geometry.tile_bytes for geometry in geometries)

    others = of_a_sequence(min(options.context_length, OTHER_CONTEXT))
    return of_a_sequence(options.context_length) + (options.sequences - 1) * others
