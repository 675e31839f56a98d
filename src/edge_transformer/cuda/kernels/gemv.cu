// y = x @ weight.T for decode rows, from the planes of the weights with fp32 activations.
//
// A warp makes ETE_ROWS_PER_WARP output rows for up to ETE_BATCH rows of x. Lane l takes the 16-byte units l, l + 32
// and so on of a row, in that order; per group it sums code * x, then adds scale * sum (and minimum * sum of x, and what
// unsigned codes are too large by); the lanes are added by a tree. So a result depends on its row of x and on the
// columns alone, whatever ETE_BATCH is.
//
// x goes through shared memory, kChunk columns at a time, with its sums per group, and the 16-byte pieces permuted so
// that the lanes of a quarter warp meet different banks. The units of the next ETE_AHEAD steps are under way while
// those of one are used. A block takes tile after tile of rows, and loads across their borders; x is staged once where
// a chunk holds all of it.
//
// Moves the planes of the weights once per 8 rows of x.
//
// Macros: ETE_FORMAT, ETE_BATCH (1, 2, 4, 8), ETE_ROWS_PER_WARP, ETE_AHEAD, ETE_CHUNK (columns), ETE_GATED (1: out =
// activation(gate) * up, of the first two matrices, which have as many rows), ETE_TAIL (1: the columns do not fill the
// last unit).
#define ETE_MIN_BLOCKS 1  // else some formats spill a few registers to fit one block more
#include "linear.cuh"
#include "prelude.cuh"
#include "rows.cuh"
#include "weights.cuh"

constexpr Format kFormat = Format::ETE_FORMAT;
constexpr int kBatch = ETE_BATCH;
constexpr int kRows = ETE_ROWS_PER_WARP;
constexpr int kAhead = ETE_AHEAD;
constexpr bool kGated = ETE_GATED != 0;
constexpr bool kTail = ETE_TAIL != 0;
constexpr int kWarps = ETE_THREADS / kWarp;
constexpr int kTileRows = kWarps * kRows;
constexpr int kStreams = kGated ? 2 * kRows : kRows;  // weight rows that a warp reads at a time
constexpr int kRowGroup = 8;  // rows of x of one block

constexpr int kUnit = unit_columns(kFormat);
constexpr int kPieces = kUnit / 4;  // float4 of x in a unit
constexpr int kStep = kWarp * kUnit;
constexpr int kChunk = ETE_CHUNK;
constexpr bool kPlaced = has_placed_codes<kFormat>();
constexpr int kHalf = kPieces / scales_per_group(kFormat);  // pieces that share a scale
// Sums of x are kept for as many columns as share a scale, where the format needs them.
constexpr bool kSums = has_minimum(kFormat) || (kPlaced && code_offset(kFormat) != 0);
constexpr int kSumColumns = kGroup / scales_per_group(kFormat);
// Many rows of x make much code of each piece, and little of their time goes into finding it.
constexpr int kUnrolledPieces = kBatch >= 4 && kPieces > 2 ? 2 : kPieces;
static_assert(kRows * kBatch <= kWarp, "a lane finishes one output");
static_assert(kChunk % kStep == 0, "a chunk holds whole steps");

struct Loaded {
  Unit unit;
  uint4 scales;
};

// Where a piece of x lies in shared memory. The pieces of a unit are place_of(its first) ^ 0, 1, ...
ETE_DEVICE int place_of(int piece) { return piece ^ ((piece >> 3) & (kPieces - 1)); }

ETE_DEVICE Loaded load_unit(const RowPlanes &row, int unit, int units) {
  Loaded loaded;
  loaded.unit.codes = make_uint4(0, 0, 0, 0);
  loaded.unit.high = make_uint2(0, 0);
  loaded.scales = make_uint4(0, 0, 0, 0);
  if (unit < units) {
    const int group = unit * kUnit / kGroup;
    loaded.unit.codes = load16_once(row.codes + 16 * static_cast<int64_t>(unit));
    loaded.unit.high = load_high<kFormat>(row, group);
    loaded.scales = load_scales<kFormat>(row, group);
  }
  return loaded;
}

// Loads a warp's units in the order in which they are multiplied: the steps of a tile (rounded up to kAhead; those too
// many load nothing), then those of the block's next tile.
struct Loader {
  Matrix first, second, third;
  RowPlanes planes[kStreams];
  int cols, tiles, tile, step, steps;
};

ETE_DEVICE void find_rows(Loader &loader) {
  if (loader.tile >= loader.tiles) return;
  int tile = loader.tile;
  const Matrix matrix = kGated ? loader.first : matrix_of(loader.first, loader.second, loader.third, kTileRows, tile);
  const int row_start = tile * kTileRows + warp_id() * kRows;
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    const int row = row_start + s % kRows;
    const int clamped = row < matrix.rows ? row : matrix.rows - 1;
    const Matrix &of = s < kRows ? matrix : loader.second;
    loader.planes[s] = row_planes<kFormat>(of.weight, of.second, of.third, of.fourth, clamped, loader.cols);
  }
}

ETE_DEVICE void load_next(Loader &loader, Loaded (&loaded)[kStreams]) {
  const int units = loader.tile < loader.tiles ? (loader.cols + kUnit - 1) / kUnit : 0;
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
    loaded[s] = load_unit(loader.planes[s], loader.step * kWarp + lane_id(), units);
  if (++loader.step < loader.steps) return;
  loader.step = 0;
  loader.tile += static_cast<int>(gridDim.x);
  find_rows(loader);
}

// Rows [first, first + rows) of x, columns from `from` on, into shared memory; zero past the last row and column. Then
// the sums: [kBatch][chunk / kSumColumns] floats.
ETE_DEVICE void stage_x(float *shared, int chunk, const float *x, int first, int rows, int cols, int from) {
#pragma unroll
  for (int b = 0; b < kBatch; ++b) {
    const float *source = x + static_cast<int64_t>(first + b) * cols;
    for (int piece = static_cast<int>(threadIdx.x); piece < chunk / 4; piece += ETE_THREADS) {
      const int col = from + 4 * piece;
      float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
      if (b < rows && col < cols) {
        if (cols % 4 == 0) {
          value = load16_float(source + col);
        } else {
          value.x = source[col];
          if (col + 1 < cols) value.y = source[col + 1];
          if (col + 2 < cols) value.z = source[col + 2];
          if (col + 3 < cols) value.w = source[col + 3];
        }
      }
      if constexpr (kSums) {  // a chunk is whole steps: all lanes take part
        float sum = (value.x + value.y) + (value.z + value.w);
#pragma unroll
        for (int step = 1; step < kSumColumns / 4; step *= 2) sum = sum + warp_shuffle_xor(sum, step);
        if (piece % (kSumColumns / 4) == 0) {
          shared[kBatch * chunk + b * (chunk / kSumColumns) + piece / (kSumColumns / 4)] = sum;
        }
      }
      if constexpr (kPlaced) value = scale_for_places(value);
      store16(shared + b * chunk + 4 * place_of(piece), value);
    }
  }
}
static_assert(!kSums || kStep % (4 * kWarp) == 0, "whole warps stage x");

// Adds one unit of each stream to its sums; it is unit `in_chunk` of what is in shared memory.
ETE_DEVICE void multiply(const Loaded (&loaded)[kStreams], const float *shared, int chunk, int in_chunk, int unit,
                         int cols, float (&sums)[kStreams][kBatch]) {
  constexpr bool floats = is_float(kFormat);
  const int first_place = place_of(in_chunk * kPieces);
  float partial[kStreams][kBatch];
  Scales scales[kStreams];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    scales[s] = scales_of<kFormat>(loaded[s].scales, unit * kUnit / kGroup);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) partial[s][b] = floats ? sums[s][b] : 0.0f;
  }
#pragma unroll kUnrolledPieces
  for (int piece = 0; piece < kPieces; ++piece) {
    float4 x[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) x[b] = load16_float(shared + b * chunk + 4 * (first_place ^ piece));
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      float numbers[4];
      if constexpr (kPlaced) {
        placed_codes<kFormat>(loaded[s].unit, piece, numbers);
      } else {
        unit_numbers<kFormat>(loaded[s].unit, piece, numbers);
      }
      if constexpr (kTail) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (unit * kUnit + 4 * piece + i >= cols) numbers[i] = 0.0f;
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        float sum = partial[s][b];
        sum = fmaf(numbers[0], x[b].x, sum);
        sum = fmaf(numbers[1], x[b].y, sum);
        sum = fmaf(numbers[2], x[b].z, sum);
        partial[s][b] = fmaf(numbers[3], x[b].w, sum);
      }
    }
    if constexpr (!floats) {
      if ((piece + 1) % kHalf != 0) continue;
      const int half = piece / kHalf;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        float x_sum = 0.0f;
        if constexpr (kSums) {
          x_sum = shared[kBatch * chunk + b * (chunk / kSumColumns) + in_chunk * kUnit / kSumColumns + half];
        }
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
          const float scale = scales[s].scale[half];
          sums[s][b] = fmaf(kPlaced ? scale * kPlaceUnscale : scale, partial[s][b], sums[s][b]);
          if constexpr (kSums) {
            const float constant = has_minimum(kFormat) ? scales[s].minimum : scale * -code_offset(kFormat);
            sums[s][b] = fmaf(constant, x_sum, sums[s][b]);
          }
          partial[s][b] = 0.0f;
        }
      }
    }
  }
  if constexpr (floats) {
#pragma unroll
    for (int s = 0; s < kStreams; ++s)
#pragma unroll
      for (int b = 0; b < kBatch; ++b) sums[s][b] = partial[s][b];
  }
}

// Output rows of one tile from the sums of all lanes. `live`: rows of x that there are, from the block's first on.
ETE_DEVICE void write_tile(const Loader &loader, int tile, float (&sums)[kStreams][kBatch], int x_first, int live,
                           int epilogue, int activation, float softcap, int out_pitch) {
  const Matrix matrix = kGated ? loader.first : matrix_of(loader.first, loader.second, loader.third, kTileRows, tile);
  const int lane = lane_id();
  // Lane r * kBatch + b finishes output row r of x row b.
  float y = 0.0f, up = 0.0f;
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const float sum = warp_sum(sums[s][b]);
      if (lane != s % kRows * kBatch + b) continue;
      if (s < kRows) y = sum;
      if (s >= kRows) up = sum;
    }
  }
  const int row = tile * kTileRows + warp_id() * kRows + lane / kBatch, b = lane % kBatch;
  if (lane >= kRows * kBatch || row >= matrix.rows || b >= live) return;
  if (matrix.bias != nullptr) y = y + matrix.bias[row];
  const int pitch = out_pitch == 0 ? matrix.rows : out_pitch;
  float *out = matrix.out + static_cast<int64_t>(x_first + b) * pitch + row;
  if constexpr (kGated) {
    if (loader.second.bias != nullptr) up = up + loader.second.bias[row];
    *out = activate(y, activation) * up;
  } else {
    finish(out, y, epilogue, activation, softcap);
  }
}

// grid: x up to as many blocks as there are tiles of kTileRows weight rows (a block takes every gridDim.x-th), y groups
// of 8 rows of x of kind `row_kind`. x_bound: the most rows of the kind that there can be; x may be read up to there.
// out_pitch: floats from one row of an output to the next; 0: as many as its matrix has rows.
// shared: for each of kBatch rows min(kChunk, columns rounded up to kStep) floats, and one for kSumColumns of them.
extern "C" __global__ void ETE_LAUNCH_BOUNDS
gemv(const float *__restrict__ x, const int *__restrict__ counts, int row_kind, int x_bound, int cols, int epilogue,
     int activation, float softcap, int out_pitch, const uint8_t *__restrict__ weight0, int64_t second0, int64_t third0,
     int64_t fourth0, const float *__restrict__ bias0, float *__restrict__ out0, int rows0,
     const uint8_t *__restrict__ weight1, int64_t second1, int64_t third1, int64_t fourth1,
     const float *__restrict__ bias1, float *__restrict__ out1, int rows1, const uint8_t *__restrict__ weight2,
     int64_t second2, int64_t third2, int64_t fourth2, const float *__restrict__ bias2, float *__restrict__ out2,
     int rows2) {
  ETE_DYNAMIC_SHARED(float, shared);
  let_next_kernel_start();
  const int group_start = static_cast<int>(blockIdx.y) * kRowGroup;
  if (group_start > 0) {
    wait_for_kernels_ahead();
    if (group_start >= live_rows(counts, row_kind).count) return;
  }

  // The first weights are asked for before anything that has to be read first, or that kernels ahead are writing.
  const int steps = (cols + kStep - 1) / kStep;
  Loader loader;
  loader.first = {weight0, second0, third0, fourth0, bias0, out0, rows0};
  loader.second = {weight1, second1, third1, fourth1, bias1, out1, rows1};
  loader.third = {weight2, second2, third2, fourth2, bias2, out2, rows2};
  loader.cols = cols;
  loader.tiles = (rows0 + kTileRows - 1) / kTileRows;
  if constexpr (!kGated) loader.tiles += (rows1 + kTileRows - 1) / kTileRows + (rows2 + kTileRows - 1) / kTileRows;
  loader.tile = static_cast<int>(blockIdx.x);
  loader.step = 0;
  loader.steps = (steps + kAhead - 1) / kAhead * kAhead;
  find_rows(loader);
  Loaded ahead[kAhead][kStreams];
#pragma unroll
  for (int a = 0; a < kAhead; ++a) load_next(loader, ahead[a]);
  wait_for_kernels_ahead();

  // Only decode rows beside prompt rows begin where `counts` tells. The other kinds read x within its bound, and learn
  // how many rows there are in time for their outputs.
  const int count_index = row_kind == kLogitRows ? 3 : 1;
  int live = static_cast<int>(load4_once(counts + count_index)) - group_start;
  int x_first = group_start, x_rows = x_bound - group_start;
  if (row_kind == kDecodeRows) {
    const int prompt_rows = counts[0];
    live -= prompt_rows;
    x_first += prompt_rows;
    x_rows = live;
  }

  const int lane = lane_id();
  const int chunk = steps * kStep < kChunk ? steps * kStep : kChunk;
  for (int tile = static_cast<int>(blockIdx.x); tile < loader.tiles; tile += static_cast<int>(gridDim.x)) {
    float sums[kStreams][kBatch];
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
#pragma unroll
      for (int b = 0; b < kBatch; ++b) sums[s][b] = 0.0f;
    }
    for (int start = 0; start < steps; start += kAhead) {
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        Loaded now[kStreams];
#pragma unroll
        for (int s = 0; s < kStreams; ++s) now[s] = ahead[a][s];
        load_next(loader, ahead[a]);
        const int step = start + a;
        if (step >= steps) continue;
        const int in_chunk = step % (kChunk / kStep);
        if (in_chunk == 0 && (steps * kStep > kChunk || tile == static_cast<int>(blockIdx.x))) {
          __syncthreads();
          stage_x(shared, chunk, x, x_first, x_rows, cols, step * kStep);
          __syncthreads();
        }
        multiply(now, shared, chunk, in_chunk * kWarp + lane, step * kWarp + lane, cols, sums);
      }
    }
    write_tile(loader, tile, sums, x_first, live, epilogue, activation, softcap, out_pitch);
  }
}
