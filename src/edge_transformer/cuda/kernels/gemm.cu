// y = x @ weight.T for prompt rows without tensor cores (sm_75), from the planes of the weights.
//
// A block makes 64 weight rows x 64 rows of x, 32 columns at a time: values in fp32 (scale * code + minimum) and x go
// to shared memory, and each thread makes 4 x 4 outputs. Every 32 columns start a fresh sum, which is added to a total.
// Every output takes the same steps wherever it lies in its tile, and rows past the last are zero, so it does not
// depend on how many rows there are.
//
// Moves the planes of the weights and x once per 64 rows of the other (mostly from the L2 cache).
//
// Macros: ETE_FORMAT. ETE_THREADS is 256.
#include "gemm_tiles.cuh"
#include "linear.cuh"
#include "prelude.cuh"
#include "rows.cuh"
#include "weights.cuh"

constexpr Format kFormat = Format::ETE_FORMAT;
constexpr int kTile = 64;
constexpr int kPitch = kTile + 4;  // floats from one column to the next
static_assert(ETE_THREADS == 256, "16 x 16 threads, each 4 x 4 outputs");

using WeightSlice = Slice<kFormat, 4>;

extern "C" __global__ void ETE_LAUNCH_BOUNDS
gemm(const float* __restrict__ x, const int* __restrict__ counts, int cols, int epilogue, int activation,
     const uint8_t* __restrict__ weight0, int64_t second0, int64_t third0, int64_t fourth0,
     const float* __restrict__ bias0, float* __restrict__ out0, int rows0, const uint8_t* __restrict__ weight1,
     int64_t second1, int64_t third1, int64_t fourth1, const float* __restrict__ bias1, float* __restrict__ out1,
     int rows1, const uint8_t* __restrict__ weight2, int64_t second2, int64_t third2, int64_t fourth2,
     const float* __restrict__ bias2, float* __restrict__ out2, int rows2) {
  ETE_SHARED(float, tiles, 2 * kGroup * kPitch);  // then the results: kTile = 2 * kGroup
  float *weight_tile = tiles, *x_tile = tiles + kGroup * kPitch;

  const LiveRows live = live_rows(counts, kPromptRows);
  const int x_start = static_cast<int>(blockIdx.x) * kTile;
  if (x_start >= live.count) return;
  const Matrix first = {weight0, second0, third0, fourth0, bias0, out0, rows0};
  const Matrix second = {weight1, second1, third1, fourth1, bias1, out1, rows1};
  const Matrix third = {weight2, second2, third2, fourth2, bias2, out2, rows2};
  int tile = static_cast<int>(blockIdx.y);
  const Matrix matrix = matrix_of(first, second, third, kTile, tile);
  const int row_start = tile * kTile;

  // What this thread brings in: a quarter of 32 columns of one weight row and of one row of x.
  const int thread = static_cast<int>(threadIdx.x);
  const int my_row = thread / 4, my_part = thread % 4;
  const bool row_lives = row_start + my_row < matrix.rows;
  const RowPlanes planes = row_planes<kFormat>(matrix.weight, matrix.second, matrix.third, matrix.fourth,
                                               row_lives ? row_start + my_row : row_start, cols);
  const bool x_lives = x_start + my_row < live.count;
  const float* x_row = x + static_cast<int64_t>(x_start + my_row) * cols;

  // Outputs of this thread: weight rows 4 * (thread % 16) on, rows of x 4 * (thread / 16) on.
  const int of_weight = 4 * (thread % 16), of_x = 4 * (thread / 16);
  float totals[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j) totals[i][j] = 0.0f;

  const int groups = (cols + kGroup - 1) / kGroup;
  WeightSlice slice = empty_slice<kFormat, 4>();
  if (row_lives) slice = load_slice<kFormat, 4>(planes, 0, my_part, cols);
  float x_values[8];
  load_x<8>(x_row, 8 * my_part, cols, x_lives, x_values);

  for (int group = 0; group < groups; ++group) {
    Scales scales;
    if constexpr (!is_float(kFormat)) {
      uint4 stored;
      stored.x = warp_shuffle(slice.scales.x, lane_id() / 4 * 4);
      stored.y = warp_shuffle(slice.scales.y, lane_id() / 4 * 4);
      stored.z = is_k(kFormat) ? warp_shuffle(slice.scales.z, lane_id() / 4 * 4) : 0;
      stored.w = is_k(kFormat) ? warp_shuffle(slice.scales.w, lane_id() / 4 * 4) : 0;
      scales = scales_of<kFormat>(stored, group);
    }
    __syncthreads();
#pragma unroll
    for (int piece = 0; piece < 2; ++piece) {
      float n[4];
      slice_numbers<kFormat, 4>(slice, my_part, piece, cols - group * kGroup, n);
      const int column = piece_column<kFormat, 4>(my_part, piece);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if constexpr (!is_float(kFormat)) {
          n[i] = scales.scale[scales_per_group(kFormat) == 2 ? column / 16 : 0] * n[i];
          if constexpr (has_minimum(kFormat)) n[i] = n[i] + scales.minimum;
        }
        weight_tile[(column + i) * kPitch + my_row] = n[i];
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x_tile[(8 * my_part + i) * kPitch + my_row] = x_values[i];
    __syncthreads();
    if (group + 1 < groups) {
      if (row_lives) slice = load_slice<kFormat, 4>(planes, group + 1, my_part, cols);
      load_x<8>(x_row, (group + 1) * kGroup + 8 * my_part, cols, x_lives, x_values);
    }
    float sums[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[i][j] = 0.0f;
#pragma unroll
    for (int k = 0; k < kGroup; ++k) {
      const float4 w = load16_float(weight_tile + k * kPitch + of_weight);
      const float4 v = load16_float(x_tile + k * kPitch + of_x);
      const float weights[4] = {w.x, w.y, w.z, w.w}, values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j) sums[i][j] = fmaf(weights[j], values[i], sums[i][j]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j) totals[i][j] = totals[i][j] + sums[i][j];
  }

  // Through shared memory, so that neighbouring threads write neighbouring outputs.
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    store16(tiles + (of_x + i) * kPitch + of_weight,
            make_float4(totals[i][0], totals[i][1], totals[i][2], totals[i][3]));
  }
  __syncthreads();
  const int row = row_start + thread % kTile;
  if (row >= matrix.rows) return;
  const float bias = matrix.bias == nullptr ? 0.0f : matrix.bias[row];
#pragma unroll 1
  for (int i = thread / kTile; i < kTile; i += ETE_THREADS / kTile) {
    if (x_start + i >= live.count) break;
    const float y = tiles[i * kPitch + thread % kTile];
    finish(matrix.out + static_cast<int64_t>(x_start + i) * matrix.rows + row, matrix.bias == nullptr ? y : y + bias,
           epilogue, activation, 0.0f);
  }
}
