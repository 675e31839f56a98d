// y = x @ weight.T for prompt rows on tensor cores (sm_80 and later), from the planes of the weights.
//
// Each activation is split into three bf16 terms (ETE_TERMS 1: rounded to one). Codes are exact in bf16; F16 weights
// are two terms, F32 weights three, and products below 2^-24 of the largest are left out. The unit truncates its sums,
// so every 32 columns (Q6_K: 16) start a fresh accumulator, which is added, times the group's scale, to an fp32 total;
// minimums enter as minimum * fp32 sum of the group's activations.
//
// A block makes 128 weight rows x 64 rows of x, 32 columns at a time, in two stages of shared memory: while one is
// multiplied, the columns after it are put into the other, and those after them are on their way to registers (BF16
// weights are copied beside the threads). Every output takes the same steps wherever it lies in its tile, and rows past
// the last are zero, so it does not depend on how many rows there are.
//
// Moves the planes of the weights once per 64 rows of x, x once per 128 weight rows (both mostly from the L2 cache).
//
// Macros: ETE_FORMAT, ETE_TERMS (3, 1), ETE_GATED (1: out = activation(gate) * up, of the first two matrices, which
// have as many rows; a tile has 64 rows of each). ETE_THREADS is 256.
#include "gemm_tiles.cuh"
#include "linear.cuh"
#include "prelude.cuh"
#include "rows.cuh"
#include "weights.cuh"

constexpr Format kFormat = Format::ETE_FORMAT;
constexpr int kTerms = ETE_TERMS;
constexpr bool kGated = ETE_GATED != 0;
constexpr int kWeightTerms = kTerms == 1 ? 1 : kFormat == Format::F32 ? 3 : kFormat == Format::F16 ? 2 : 1;
constexpr bool kCopied = kFormat == Format::BF16;  // operands as they are
constexpr int kScales = scales_per_group(kFormat);

constexpr int kTileWeights = 128;
constexpr int kTileRows = kGated ? kTileWeights / 2 : kTileWeights;  // output columns of a tile
constexpr int kTileX = 64;
constexpr int kPitch = 20;        // words from one row to the next: 16 of columns, 4 to spread rows over the banks
constexpr int kWarpsWeights = 4;  // warps along the weight rows; two along x
static_assert(ETE_THREADS == 256, "eight warps, each 32 x 32 outputs");

// A stage in shared memory, in words: terms of the weights, terms of x, and per row scales, minimums, sums of x.
constexpr int kXAt = kWeightTerms * kTileWeights * kPitch;
constexpr int kScalesAt = kXAt + kTerms * kTileX * kPitch;
constexpr int kMinimumsAt = kScalesAt + (is_float(kFormat) ? 0 : kScales * kTileWeights);
constexpr int kSumsAt = kMinimumsAt + (has_minimum(kFormat) ? kTileWeights : 0);
constexpr int kStageWords = kSumsAt + (has_minimum(kFormat) ? kTileX : 0);
constexpr int kResultPitch = kTileWeights + 4;
static_assert(2 * kStageWords >= 32 * kResultPitch, "results of 32 rows of x fit where the stages were");

using WeightSlice = Slice<kFormat, 2>;
using Totals = float[2][4][4];  // of a warp: 16 weight rows, 8 rows of x, registers of mma

// What this thread brings in: half of 32 columns of one weight row, a quarter of 32 columns of one row of x.
struct Source {
  RowPlanes planes;
  const float *x_row;
  int cols;
  bool row_lives, x_lives;
};

ETE_DEVICE int my_row() { return static_cast<int>(threadIdx.x) / 2; }
ETE_DEVICE int my_part() { return static_cast<int>(threadIdx.x) % 2; }
ETE_DEVICE int my_x() { return static_cast<int>(threadIdx.x) / 4; }
ETE_DEVICE int my_quarter() { return static_cast<int>(threadIdx.x) % 4; }

ETE_DEVICE void load_group(const Source &source, int group, WeightSlice &slice, float (&x_values)[8]) {
  if constexpr (!kCopied) {
    if (source.row_lives) slice = load_slice<kFormat, 2>(source.planes, group, my_part(), source.cols);
  }
  load_x<8>(source.x_row, group * kGroup + 8 * my_quarter(), source.cols, source.x_lives, x_values);
}

// BF16 weights on their way to shared memory; zero past the last column, or where no row is.
ETE_DEVICE void copy_weights(uint32_t *stage, const Source &source, int group) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int col = group * kGroup + 16 * my_part() + 8 * i;
    const int left = source.row_lives ? 2 * (source.cols - col) : 0;
    const int bytes = left < 0 ? 0 : left > 16 ? 16 : left;
    cp_async16(stage + my_row() * kPitch + 8 * my_part() + 4 * i,
               source.planes.codes + (bytes == 0 ? 0 : 2 * static_cast<int64_t>(col)), bytes);
  }
  cp_async_commit();
}

ETE_DEVICE void store_weights(uint32_t *stage, const WeightSlice &slice, int group, int cols) {
#pragma unroll
  for (int piece = 0; piece < 4; ++piece) {
    float n[4];
    slice_numbers<kFormat, 2>(slice, my_part(), piece, cols - group * kGroup, n);
    uint32_t *to = stage + my_row() * kPitch + piece_column<kFormat, 2>(my_part(), piece) / 2;
    if constexpr (kWeightTerms == 1) {
      store8(to, make_uint2(pack_bf16(n[0], n[1]), pack_bf16(n[2], n[3])));
    } else {
      uint2 high, middle, low;
      split_bf16_pair(n[0], n[1], high.x, middle.x, low.x);
      split_bf16_pair(n[2], n[3], high.y, middle.y, low.y);
      store8(to, high);
      store8(to + kTileWeights * kPitch, middle);
      if constexpr (kWeightTerms == 3) store8(to + 2 * kTileWeights * kPitch, low);
    }
  }
  if constexpr (!is_float(kFormat)) {
    if (my_part() != 0) return;
    float *numbers = reinterpret_cast<float *>(stage);
    const Scales scales = scales_of<kFormat>(slice.scales, group);
#pragma unroll
    for (int i = 0; i < kScales; ++i) numbers[kScalesAt + i * kTileWeights + my_row()] = scales.scale[i];
    if constexpr (has_minimum(kFormat)) numbers[kMinimumsAt + my_row()] = scales.minimum;
  }
}

ETE_DEVICE void store_x(uint32_t *stage, const float (&x)[8]) {
  uint32_t terms[3][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) split_bf16_pair(x[2 * i], x[2 * i + 1], terms[0][i], terms[1][i], terms[2][i]);
#pragma unroll
  for (int term = 0; term < kTerms; ++term) {
    store16(stage + kXAt + (term * kTileX + my_x()) * kPitch + 4 * my_quarter(),
            make_uint4(terms[term][0], terms[term][1], terms[term][2], terms[term][3]));
  }
  if constexpr (has_minimum(kFormat)) {
    float sum = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    sum = sum + warp_shuffle_xor(sum, 1);
    sum = sum + warp_shuffle_xor(sum, 2);
    if (my_quarter() == 0) reinterpret_cast<float *>(stage)[kSumsAt + my_x()] = sum;
  }
}

// Adds the products of 16 columns (`half` of the 32) to a warp's sums, the smallest first.
ETE_DEVICE void multiply_half(const uint32_t *stage, int half, int warp_weights, int warp_x, Totals &sums) {
  const int lane = lane_id();
  uint32_t a[kWeightTerms][2][4];
#pragma unroll
  for (int term = 0; term < kWeightTerms; ++term)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = term * kTileWeights + warp_weights + 16 * i + lane % 16;
      ldmatrix4(a[term][i], stage + row * kPitch + 8 * half + 4 * (lane / 16));
    }
#pragma unroll
  for (int term = kTerms - 1; term >= 0; --term)
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      uint32_t b[4];
      const int row = term * kTileX + warp_x + 16 * pair + lane % 8 + 8 * (lane / 16);
      ldmatrix4(b, stage + kXAt + row * kPitch + 8 * half + 4 * (lane / 8 % 2));
      const uint32_t left[2] = {b[0], b[1]}, right[2] = {b[2], b[3]};
#pragma unroll
      for (int of_weight = kWeightTerms - 1; of_weight >= 0; --of_weight) {
        if (of_weight + term > 2) continue;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          mma_bf16(sums[i][2 * pair], a[of_weight][i], left);
          mma_bf16(sums[i][2 * pair + 1], a[of_weight][i], right);
        }
      }
    }
}

// Adds the products of a stage to a warp's totals.
ETE_DEVICE void multiply(const uint32_t *stage, int warp_weights, int warp_x, Totals &totals) {
  const float *numbers = reinterpret_cast<const float *>(stage);
  const int g = lane_id() / 4, t = lane_id() % 4;
#pragma unroll
  for (int part = 0; part < kScales; ++part) {  // columns that share a scale
    Totals sums;
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][j][c] = 0.0f;
#pragma unroll
    for (int half = part; half < part + 3 - kScales; ++half) multiply_half(stage, half, warp_weights, warp_x, sums);
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const int row = warp_weights + 16 * i + 8 * upper + g;
        float scale = 1.0f;
        if constexpr (!is_float(kFormat)) scale = numbers[kScalesAt + part * kTileWeights + row];
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int c = 2 * upper; c < 2 * upper + 2; ++c) {
            totals[i][j][c] =
                is_float(kFormat) ? totals[i][j][c] + sums[i][j][c] : fmaf(scale, sums[i][j][c], totals[i][j][c]);
          }
      }
  }
  if constexpr (has_minimum(kFormat)) {
#pragma unroll
    for (int i = 0; i < 2; ++i)
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          totals[i][j][c] = fmaf(numbers[kMinimumsAt + warp_weights + 16 * i + 8 * (c / 2) + g],
                                 numbers[kSumsAt + warp_x + 8 * j + 2 * t + c % 2], totals[i][j][c]);
        }
  }
}

// grid: x tiles of 64 prompt rows, y tiles of kTileRows weight rows over the matrices. shared: 2 * kStageWords words.
extern "C" __global__ void ETE_LAUNCH_BOUNDS
gemm_mma(const float *__restrict__ x, const int *__restrict__ counts, int cols, int epilogue, int activation,
         const uint8_t *__restrict__ weight0, int64_t second0, int64_t third0, int64_t fourth0,
         const float *__restrict__ bias0, float *__restrict__ out0, int rows0, const uint8_t *__restrict__ weight1,
         int64_t second1, int64_t third1, int64_t fourth1, const float *__restrict__ bias1, float *__restrict__ out1,
         int rows1, const uint8_t *__restrict__ weight2, int64_t second2, int64_t third2, int64_t fourth2,
         const float *__restrict__ bias2, float *__restrict__ out2, int rows2) {
  ETE_DYNAMIC_SHARED(uint32_t, shared);
  const LiveRows live = live_rows(counts, kPromptRows);
  const int x_start = static_cast<int>(blockIdx.x) * kTileX;
  if (x_start >= live.count) return;
  const Matrix first = {weight0, second0, third0, fourth0, bias0, out0, rows0};
  const Matrix second = {weight1, second1, third1, fourth1, bias1, out1, rows1};
  const Matrix third = {weight2, second2, third2, fourth2, bias2, out2, rows2};
  int tile = static_cast<int>(blockIdx.y);
  const Matrix matrix = kGated ? first : matrix_of(first, second, third, kTileRows, tile);
  const int row_start = tile * kTileRows;

  Source source;
  const Matrix &mine = kGated && my_row() >= kTileRows ? second : matrix;
  const int row = row_start + my_row() % kTileRows;
  source.row_lives = row < mine.rows;
  source.planes = row_planes<kFormat>(mine.weight, mine.second, mine.third, mine.fourth,
                                      source.row_lives ? row : row_start, cols);
  source.x_lives = x_start + my_x() < live.count;
  source.x_row = x + static_cast<int64_t>(x_start + my_x()) * cols;
  source.cols = cols;

  const int warp_weights = warp_id() % kWarpsWeights * 32, warp_x = warp_id() / kWarpsWeights * 32;
  Totals totals;
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) totals[i][j][c] = 0.0f;

  const int groups = (cols + kGroup - 1) / kGroup;
  WeightSlice slice = empty_slice<kFormat, 2>();
  float x_values[8];
  load_group(source, 0, slice, x_values);
  for (int group = -1; group < groups; ++group) {
    // This group's stage is complete, and the other one has been multiplied.
    if constexpr (kCopied) cp_async_wait<0>();
    __syncthreads();
    const int next = group + 1;
    if (next < groups) {
      uint32_t *stage = shared + next % 2 * kStageWords;
      if constexpr (kCopied) {
        copy_weights(stage, source, next);
      } else {
        store_weights(stage, slice, next, cols);
      }
      store_x(stage, x_values);
      if (next + 1 < groups) load_group(source, next + 1, slice, x_values);
    }
    if (group >= 0) multiply(shared + group % 2 * kStageWords, warp_weights, warp_x, totals);
  }

  // Through shared memory, 32 rows of x at a time, so that neighbouring threads write neighbouring outputs.
  float *results = reinterpret_cast<float *>(shared);
  const int g = lane_id() / 4, t = lane_id() % 4;
  const int column = static_cast<int>(threadIdx.x) % kTileRows;
  constexpr int x_step = ETE_THREADS / kTileRows;
#pragma unroll 1
  for (int part = 0; part < kTileX; part += 32) {
    __syncthreads();
    if (warp_x == part) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            results[(8 * j + 2 * t + c % 2) * kResultPitch + warp_weights + 16 * i + 8 * (c / 2) + g] = totals[i][j][c];
    }
    __syncthreads();
    const int of_row = row_start + column;
    if (of_row >= matrix.rows) continue;
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) / kTileRows; i < 32; i += x_step) {
      const int of_x = x_start + part + i;
      if (of_x >= live.count) break;
      float y = results[i * kResultPitch + column];
      if (matrix.bias != nullptr) y = y + matrix.bias[of_row];
      float *out = matrix.out + static_cast<int64_t>(of_x) * matrix.rows + of_row;
      if constexpr (kGated) {
        float up = results[i * kResultPitch + kTileRows + column];
        if (second.bias != nullptr) up = up + second.bias[of_row];
        *out = activate(y, activation) * up;
      } else {
        finish(out, y, epilogue, activation, 0.0f);
      }
    }
  }
}
