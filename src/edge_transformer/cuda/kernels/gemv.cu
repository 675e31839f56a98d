// y = x @ weight.T for decode rows, from the planes of the weights with fp32 activations.
//
// A warp makes ETE_ROWS_PER_WARP output rows for up to ETE_BATCH rows of x, of a slice of the columns: 2^slice_bits
// warps share the columns of a row, 32 units of 16 bytes (a step) by turns. Lane l takes unit l of each step of its
// warp, in that order; per group it sums code * x, then adds scale * sum (and minimum * sum of x, and what unsigned
// codes are too large by); the lanes are added by a tree, then the slices in order. slice_bits is a function of format
// and columns on a GPU, so a result depends on its row of x and on the columns alone, whatever ETE_BATCH and
// ETE_ROWS_PER_WARP are.
//
// x goes through shared memory, as many columns at a time as there is room for, with its sums per group, and the
// 16-byte pieces permuted so that the lanes of a quarter warp meet different banks. Every piece of x that is read there
// meets all rows of its warp, since for many rows of x the shared memory is what limits. The units of the next
// ETE_AHEAD steps are under way while those of one are used. A block takes tile after tile of rows, and loads across
// their borders; x is staged once where a chunk holds all of it.
//
// Moves the planes of the weights once per 8 rows of x.
//
// Macros: ETE_FORMAT, ETE_BATCH (1, 2, 4, 8), ETE_ROWS_PER_WARP, ETE_AHEAD, ETE_BLOCKS (that are to fit on a
// multiprocessor), ETE_GATED (1: out = activation(gate) * up, of the first two matrices, which have as many rows),
// ETE_TAIL (1: the columns do not fill the last unit).
#define ETE_MIN_BLOCKS ETE_BLOCKS
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
constexpr int kMatrices = kGated ? 2 : 1;    // that a warp reads
constexpr int kStreams = kMatrices * kRows;  // weight rows that a warp reads at a time
constexpr int kSums = kStreams * kBatch;     // number s * kBatch + b: weight row s, row b of x
constexpr int kRowGroup = 8;                 // rows of x of one block

constexpr int kUnit = unit_columns(kFormat);
constexpr int kPieces = kUnit / 4;  // float4 of x in a unit
constexpr int kStep = kWarp * kUnit;
constexpr bool kPlaced = has_placed_codes<kFormat>();
constexpr int kHalf = kPieces / scales_per_group(kFormat);  // pieces that share a scale
// Sums of x are kept for as many columns as share a scale, where the format needs them.
constexpr bool kColumnSums = has_minimum(kFormat) || (kPlaced && code_offset(kFormat) != 0);
constexpr int kSumColumns = kGroup / scales_per_group(kFormat);
// Pieces are decoded four at a time; many rows of x make much code of each.
constexpr int kInnerPieces = kPieces < 4 ? kPieces : 4;
constexpr int kUnrolled = kBatch >= 4 ? 1 : kPieces / kInnerPieces;
constexpr int kStaged = kBatch == 1 ? 4 : 8 / kBatch;  // pieces of each row of x that a thread asks for at a time
static_assert(kSums <= kWarp && (kSums & (kSums - 1)) == 0, "a lane holds one sum in the end");
static_assert((kWarps & (kWarps - 1)) == 0, "slices fill a block");

struct Loaded {
  Unit unit;
  uint4 scales;
};

// Where a piece of x lies in shared memory. The pieces of a unit are place_of(its first) ^ 0, 1, ...
ETE_DEVICE int place_of(int piece) { return piece ^ ((piece >> 3) & (kPieces - 1)); }

ETE_DEVICE Loaded load_unit(const RowPlanes& row, int unit, int units) {
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

ETE_DEVICE constexpr int log2_of(int number) { return number == 1 ? 0 : 1 + log2_of(number / 2); }

// How the warps of a block are spread: slice_bits of the number of a warp are its slice, the others its rows.
struct Cut {
  int slice_bits, tile_bits;      // 2^tile_bits rows are a tile
  int first_tiles, second_tiles;  // of the first matrix, and of the first two
};

ETE_DEVICE int slice_of_warp(const Cut& cut) { return warp_id() & ((1 << cut.slice_bits) - 1); }

// Loads a warp's units in the order in which they are multiplied: the rounds of a tile, then those of the block's next.
struct Loader {
  Matrix first, second, third;
  RowPlanes planes[kMatrices];  // of the first row of each matrix that a warp reads
  Cut cut;
  int cols, tiles, tile, round, rounds, last_row;
};

// The matrix of tile `tile`, which becomes its own.
ETE_DEVICE Matrix matrix_of(const Loader& loader, int& tile) {
  if (kGated || tile < loader.cut.first_tiles) return loader.first;
  const bool second = tile < loader.cut.second_tiles;
  tile -= second ? loader.cut.first_tiles : loader.cut.second_tiles;
  return second ? loader.second : loader.third;
}

ETE_DEVICE void find_rows(Loader& loader) {
  if (loader.tile >= loader.tiles) return;
  int tile = loader.tile;
  const Matrix matrix = matrix_of(loader, tile);
  const int row_start = (tile << loader.cut.tile_bits) + (warp_id() >> loader.cut.slice_bits) * kRows;
  const int first = row_start < matrix.rows ? row_start : matrix.rows - 1;
  loader.last_row = matrix.rows - 1 - first;
#pragma unroll
  for (int m = 0; m < kMatrices; ++m) {
    const Matrix& of = m == 0 ? matrix : loader.second;
    loader.planes[m] = row_planes<kFormat>(of.weight, of.second, of.third, of.fourth, first, loader.cols);
  }
}

ETE_DEVICE void load_next(Loader& loader, Loaded (&loaded)[kStreams]) {
  const int units = loader.tile < loader.tiles ? (loader.cols + kUnit - 1) / kUnit : 0;
  const int step = (loader.round << loader.cut.slice_bits) + slice_of_warp(loader.cut);
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    const int row = s % kRows < loader.last_row ? s % kRows : loader.last_row;
    loaded[s] =
        load_unit(rows_on<kFormat>(loader.planes[s / kRows], row, loader.cols), step * kWarp + lane_id(), units);
  }
  if (++loader.round < loader.rounds) return;
  loader.round = 0;
  loader.tile += static_cast<int>(gridDim.x);
  find_rows(loader);
}

// Columns col .. col + 3 of a row of x; zero past the last.
ETE_DEVICE float4 load_x(const float* source, int col, int cols) {
  float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if (col >= cols) return value;
  if (!kTail || cols % 4 == 0) return load16_float(source + col);
  value.x = source[col];
  if (col + 1 < cols) value.y = source[col + 1];
  if (col + 2 < cols) value.z = source[col + 2];
  if (col + 3 < cols) value.w = source[col + 3];
  return value;
}

// Rows [first, first + rows) of x, columns from `from` on, into shared memory; zero past the last row and column. Then
// the sums: [kBatch][chunk / kSumColumns] floats.
ETE_DEVICE void stage_x(float* shared, int chunk, const float* x, int first, int rows, int cols, int from) {
  for (int start = static_cast<int>(threadIdx.x); start < chunk / 4; start += kStaged * ETE_THREADS) {
    float4 values[kStaged][kBatch];
#pragma unroll
    for (int i = 0; i < kStaged; ++i) {
      const int piece = start + i * ETE_THREADS;
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int end = b < rows && piece < chunk / 4 ? cols : 0;
        values[i][b] = load_x(x + static_cast<int64_t>(first + b) * cols, from + 4 * piece, end);
      }
    }
#pragma unroll
    for (int i = 0; i < kStaged; ++i) {
      const int piece = start + i * ETE_THREADS;
      if (piece >= chunk / 4) break;  // a chunk is whole steps: of a warp all lanes, or none
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        float4 value = values[i][b];
        if constexpr (kColumnSums) {
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
}
static_assert(kStep % (4 * kWarp) == 0, "whole warps stage x");

// Adds one unit of each stream to its sums; it is unit `in_chunk` of what is in shared memory.
ETE_DEVICE void multiply(const Loaded (&loaded)[kStreams], const float* shared, int chunk, int in_chunk, int unit,
                         int cols, float (&sums)[kSums]) {
  constexpr bool floats = is_float(kFormat);
  const int first_place = place_of(in_chunk * kPieces);
  float partial[kSums];
  Scales scales[kStreams];
#pragma unroll
  for (int s = 0; s < kStreams; ++s) {
    scales[s] = scales_of<kFormat>(loaded[s].scales, unit * kUnit / kGroup);
#pragma unroll
    for (int b = 0; b < kBatch; ++b) partial[s * kBatch + b] = floats ? sums[s * kBatch + b] : 0.0f;
  }
#pragma unroll kUnrolled
  for (int outer = 0; outer < kPieces / kInnerPieces; ++outer) {
#pragma unroll
    for (int inner = 0; inner < kInnerPieces; ++inner) {
      const int piece = outer * kInnerPieces + inner;
      float numbers[kStreams][4];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) {
        if constexpr (kPlaced) {
          placed_codes<kFormat>(loaded[s].unit, piece, numbers[s]);
        } else {
          unit_numbers<kFormat>(loaded[s].unit, piece, numbers[s]);
        }
        if constexpr (kTail) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (unit * kUnit + 4 * piece + i >= cols) numbers[s][i] = 0.0f;
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const float4 x = load16_float(shared + b * chunk + 4 * (first_place ^ piece));
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
          float sum = partial[s * kBatch + b];
          sum = fmaf(numbers[s][0], x.x, sum);
          sum = fmaf(numbers[s][1], x.y, sum);
          sum = fmaf(numbers[s][2], x.z, sum);
          partial[s * kBatch + b] = fmaf(numbers[s][3], x.w, sum);
        }
      }
    }
    if constexpr (!floats) {
      if ((outer + 1) * kInnerPieces % kHalf != 0) continue;
      const int half = (outer + 1) * kInnerPieces / kHalf - 1;
      float scale[kStreams];
#pragma unroll
      for (int s = 0; s < kStreams; ++s) scale[s] = half == 0 ? scales[s].scale[0] : scales[s].scale[1];
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        float x_sum = 0.0f;
        if constexpr (kColumnSums) {
          x_sum = shared[kBatch * chunk + b * (chunk / kSumColumns) + in_chunk * kUnit / kSumColumns + half];
        }
#pragma unroll
        for (int s = 0; s < kStreams; ++s) {
          float& sum = sums[s * kBatch + b];
          sum = fmaf(kPlaced ? scale[s] * kPlaceUnscale : scale[s], partial[s * kBatch + b], sum);
          if constexpr (kColumnSums) {
            const float constant = has_minimum(kFormat) ? scales[s].minimum : scale[s] * -code_offset(kFormat);
            sum = fmaf(constant, x_sum, sum);
          }
          partial[s * kBatch + b] = 0.0f;
        }
      }
    }
  }
  if constexpr (floats) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) sums[i] = partial[i];
  }
}
static_assert(is_float(kFormat) || kHalf % kInnerPieces == 0, "scales change between the pieces decoded at a time");

// Adds the lanes of each of `count` sums, `apart` from one another, then half as far. Lane l gets sum
// l / (kWarp / kSums).
template <int apart, int count>
ETE_DEVICE float add_lanes(const float (&sums)[count]) {
  if constexpr (apart == 0) {
    return sums[0];
  } else if constexpr (count == 1) {
    const float added[1] = {sums[0] + warp_shuffle_xor(sums[0], apart)};
    return add_lanes<apart / 2, 1>(added);
  } else {  // each of the two lanes goes on with half of the sums
    const bool upper = (lane_id() & apart) != 0;
    float added[count / 2];
#pragma unroll
    for (int i = 0; i < count / 2; ++i) {
      const float given = upper ? sums[i] : sums[i + count / 2];
      const float mine = upper ? sums[i + count / 2] : sums[i];
      added[i] = mine + warp_shuffle_xor(given, apart);
    }
    return add_lanes<apart / 2, count / 2>(added);
  }
}

// The slices of sum s * kBatch + b of the warps that have rows `warps` of a tile, in order.
ETE_DEVICE float add_slices(const float* slices, int slice_bits, int warps, int sum) {
  const float* first = slices + (warps << slice_bits) * kSums + sum;
  float total = first[0];
  for (int slice = 1; slice < 1 << slice_bits; ++slice) total = total + first[slice * kSums];
  return total;
}

// Output rows of one tile from the sums of all threads. `live`: rows of x that there are, from the block's first on.
// `slices`: [kWarps][kSums] floats in shared memory, not those of the tile before.
ETE_DEVICE void write_tile(const Loader& loader, int tile, float (&sums)[kSums], float* slices, int x_first, int live,
                           int epilogue, int activation, float softcap, int out_pitch) {
  const int lane = lane_id(), slice_bits = loader.cut.slice_bits, tile_bits = loader.cut.tile_bits;
  const float of_lane = add_lanes<kWarp / 2, kSums>(sums);
  if (lane % (kWarp / kSums) == 0) slices[warp_id() * kSums + lane / (kWarp / kSums)] = of_lane;
  __syncthreads();
  const Matrix matrix = matrix_of(loader, tile);
  const int in_tile = static_cast<int>(threadIdx.x) & ((1 << tile_bits) - 1);
  const int b = static_cast<int>(threadIdx.x) >> tile_bits;
  const int row = (tile << tile_bits) + in_tile;
  if (row >= matrix.rows || b >= kBatch || b >= live) return;
  const int sum = in_tile % kRows * kBatch + b;
  float y = add_slices(slices, slice_bits, in_tile / kRows, sum);
  if (matrix.bias != nullptr) y = y + matrix.bias[row];
  const int pitch = out_pitch == 0 ? matrix.rows : out_pitch;
  float* out = matrix.out + static_cast<int64_t>(x_first + b) * pitch + row;
  if constexpr (kGated) {
    float up = add_slices(slices, slice_bits, in_tile / kRows, kRows * kBatch + sum);
    if (loader.second.bias != nullptr) up = up + loader.second.bias[row];
    *out = activate(y, activation) * up;
  } else {
    finish(out, y, epilogue, activation, softcap);
  }
}

// grid: x up to as many blocks as there are tiles of kWarps * kRows >> slice_bits weight rows (a block takes every
// gridDim.x-th), y groups of 8 rows of x of kind `row_kind`. x_bound: the most rows of the kind that there can be; x
// may be read up to there. chunk_rounds: that fit in shared memory, each kStep << slice_bits columns. out_pitch: floats
// from one row of an output to the next; 0: as many as its matrix has rows. shared: for each of kBatch rows a chunk of
// floats, or all steps of a row, and one for kSumColumns of them.
extern "C" __global__ void ETE_LAUNCH_BOUNDS
gemv(const float* __restrict__ x, const int* __restrict__ counts, int row_kind, int x_bound, int cols, int slice_bits,
     int chunk_rounds, int epilogue, int activation, float softcap, int out_pitch, const uint8_t* __restrict__ weight0,
     int64_t second0, int64_t third0, int64_t fourth0, const float* __restrict__ bias0, float* __restrict__ out0,
     int rows0, const uint8_t* __restrict__ weight1, int64_t second1, int64_t third1, int64_t fourth1,
     const float* __restrict__ bias1, float* __restrict__ out1, int rows1, const uint8_t* __restrict__ weight2,
     int64_t second2, int64_t third2, int64_t fourth2, const float* __restrict__ bias2, float* __restrict__ out2,
     int rows2) {
  ETE_DYNAMIC_SHARED(float, shared);
  ETE_SHARED(float, slices, 2 * kWarps * kSums);
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
  loader.cut.slice_bits = slice_bits;
  const int tile_bits = log2_of(kWarps * kRows) - slice_bits, short_of_tile = (1 << tile_bits) - 1;
  loader.cut.tile_bits = tile_bits;
  loader.cut.first_tiles = (rows0 + short_of_tile) >> tile_bits;
  loader.cut.second_tiles = loader.cut.first_tiles + ((rows1 + short_of_tile) >> tile_bits);
  loader.tiles = kGated ? loader.cut.first_tiles : loader.cut.second_tiles + ((rows2 + short_of_tile) >> tile_bits);
  loader.tile = static_cast<int>(blockIdx.x);
  loader.round = 0;
  loader.rounds = (steps + (1 << slice_bits) - 1) >> slice_bits;
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

  const int chunk_steps = chunk_rounds << slice_bits;
  const int chunk = (steps < chunk_steps ? steps : chunk_steps) * kStep;
  const bool once = loader.rounds <= chunk_rounds;
  float sums[kSums];
#pragma unroll
  for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
  int tile = static_cast<int>(blockIdx.x), round = 0, in_chunk = 0;
  int written = 0;  // where in `slices`
  while (tile < loader.tiles) {
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      if (tile >= loader.tiles) break;
      if (in_chunk == 0 && (!once || tile == static_cast<int>(blockIdx.x))) {
        __syncthreads();
        stage_x(shared, chunk, x, x_first, x_rows, cols, (round << slice_bits) * kStep);
        __syncthreads();
      }
      const int of_round = slice_of_warp(loader.cut), step = (round << slice_bits) + of_round;
      if (step < steps) {
        const int in_shared = (in_chunk << slice_bits) + of_round;
        multiply(ahead[a], shared, chunk, in_shared * kWarp + lane_id(), step * kWarp + lane_id(), cols, sums);
      }
      load_next(loader, ahead[a]);
      if (++in_chunk == chunk_rounds) in_chunk = 0;
      if (++round < loader.rounds) continue;
      write_tile(loader, tile, sums, slices + written, x_first, live, epilogue, activation, softcap, out_pitch);
      written ^= kWarps * kSums;
#pragma unroll
      for (int i = 0; i < kSums; ++i) sums[i] = 0.0f;
      tile += static_cast<int>(gridDim.x);
      round = in_chunk = 0;
    }
  }
}
