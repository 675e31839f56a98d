// y = x @ weight.T for prompt rows on tensor cores (sm_80 and later), from the planes of the weights.
//
// Each activation is split into three bf16 terms (ETE_TERMS 1: rounded to one). Codes are exact in bf16; F16 weights
// are two terms, F32 weights three, and products below 2^-24 of the largest are left out. The unit truncates its sums,
// so every 32 columns (Q6_K: 16) start a fresh accumulator, which is added, times the group's scale, to an fp32 total;
// minimums enter as minimum * fp32 sum of the group's activations.
//
// A block makes 128 weight rows x 64 rows of x, 32 columns at a time: the next 32 columns are loaded to registers (BF16
// weights: copied to a second buffer) while these are multiplied from shared memory. Every output takes the same steps wherever it lies in its tile, and rows
// past the last are zero, so it does not depend on how many rows there are.
//
// Moves the planes of the weights once per 64 rows of x, x once per 128 weight rows (both mostly from the L2 cache).
//
// Macros: ETE_FORMAT, ETE_TERMS (3, 1). ETE_THREADS is 256.
#include "gemm_tiles.cuh"
#include "linear.cuh"
#include "prelude.cuh"
#include "rows.cuh"
#include "weights.cuh"

constexpr Format kFormat = Format::ETE_FORMAT;
constexpr int kTerms = ETE_TERMS;
constexpr int kWeightTerms = kTerms == 1 ? 1 : kFormat == Format::F32 ? 3 : kFormat == Format::F16 ? 2 : 1;

constexpr int kTileWeights = 128;
constexpr int kTileX = 64;
constexpr int kPitch = 20;     // words from one row to the next: 16 of columns, 4 to spread rows over the banks
constexpr int kWarpsWeights = 4;  // warps along the weight rows; two along x
constexpr bool kCopied = kFormat == Format::BF16;  // operands as they are, copied beside the threads
constexpr int kWeightTiles = kCopied ? 2 : kWeightTerms;
constexpr int kResultPitch = kTileWeights + 4;
constexpr int kTermWords = (kWeightTiles * kTileWeights + kTerms * kTileX) * kPitch;
constexpr int kTileWords = kTermWords > 32 * kResultPitch ? kTermWords : 32 * kResultPitch;
constexpr int kScales = scales_per_group(kFormat);
static_assert(ETE_THREADS == 256, "eight warps, each 32 x 32 outputs");

using WeightSlice = Slice<kFormat, 2>;

// Half of 32 columns of a BF16 row on their way to shared memory; zero past the last column, or where no row is.
ETE_DEVICE void copy_slice(uint32_t *to, const RowPlanes &row, int group, int part, int cols, bool lives) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int col = group * kGroup + 16 * part + 8 * i;
    const int left = lives ? 2 * (cols - col) : 0;
    const int bytes = left < 0 ? 0 : left > 16 ? 16 : left;
    cp_async16(to + 4 * i, row.codes + (bytes == 0 ? 0 : 2 * static_cast<int64_t>(col)), bytes);
  }
  cp_async_commit();
}

extern "C" __global__ void ETE_LAUNCH_BOUNDS
gemm_mma(const float *__restrict__ x, const int *__restrict__ counts, int cols, int epilogue, int activation,
         const uint8_t *__restrict__ weight0, int64_t second0, int64_t third0, int64_t fourth0,
         const float *__restrict__ bias0, float *__restrict__ out0, int rows0, const uint8_t *__restrict__ weight1,
         int64_t second1, int64_t third1, int64_t fourth1, const float *__restrict__ bias1, float *__restrict__ out1,
         int rows1, const uint8_t *__restrict__ weight2, int64_t second2, int64_t third2, int64_t fourth2,
         const float *__restrict__ bias2, float *__restrict__ out2, int rows2) {
  ETE_SHARED(uint32_t, tiles, kTileWords);
  uint32_t *weight_tile = tiles, *x_tile = tiles + kWeightTiles * kTileWeights * kPitch;
  ETE_SHARED(float, scale_tile, kScales * kTileWeights);
  ETE_SHARED(float, minimum_tile, kTileWeights);
  ETE_SHARED(float, x_sums, kTileX);

  const LiveRows live = live_rows(counts, kPromptRows);
  const int x_start = static_cast<int>(blockIdx.x) * kTileX;
  if (x_start >= live.count) return;
  const Matrix first = {weight0, second0, third0, fourth0, bias0, out0, rows0};
  const Matrix second = {weight1, second1, third1, fourth1, bias1, out1, rows1};
  const Matrix third = {weight2, second2, third2, fourth2, bias2, out2, rows2};
  int tile = static_cast<int>(blockIdx.y);
  const Matrix matrix = matrix_of(first, second, third, kTileWeights, tile);
  const int row_start = tile * kTileWeights;

  // What this thread brings in: half of 32 columns of one weight row, a quarter of 32 columns of one row of x.
  const int thread = static_cast<int>(threadIdx.x);
  const int my_row = thread / 2, my_part = thread % 2;
  const bool row_lives = row_start + my_row < matrix.rows;
  const RowPlanes planes = row_planes<kFormat>(matrix.weight, matrix.second, matrix.third, matrix.fourth,
                                               row_lives ? row_start + my_row : row_start, cols);
  const int my_x = thread / 4, my_quarter = thread % 4;
  const bool x_lives = x_start + my_x < live.count;
  const float *x_row = x + static_cast<int64_t>(x_start + my_x) * cols;

  const int lane = lane_id();
  const int warp_weights = warp_id() % kWarpsWeights * 32, warp_x = warp_id() / kWarpsWeights * 32;
  const int g = lane / 4, t = lane % 4;
  float totals[2][4][4];
#pragma unroll
  for (int i = 0; i < 2; ++i)
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) totals[i][j][c] = 0.0f;

  const int groups = (cols + kGroup - 1) / kGroup;
  WeightSlice slice = empty_slice<kFormat, 2>();
  uint32_t *my_words = tiles + my_row * kPitch + 8 * my_part;
  if constexpr (kCopied) {
    copy_slice(my_words, planes, 0, my_part, cols, row_lives);
  } else if (row_lives) {
    slice = load_slice<kFormat, 2>(planes, 0, my_part, cols);
  }
  float x_values[8];
  load_x<8>(x_row, 8 * my_quarter, cols, x_lives, x_values);

  for (int group = 0; group < groups; ++group) {
    __syncthreads();
    if constexpr (kCopied) {
      weight_tile = tiles + group % 2 * kTileWeights * kPitch;
      cp_async_wait<0>();
    } else {
#pragma unroll
      for (int piece = 0; piece < 4; ++piece) {
        float n[4];
        slice_numbers<kFormat, 2>(slice, my_part, piece, cols - group * kGroup, n);
        const int word = my_row * kPitch + piece_column<kFormat, 2>(my_part, piece) / 2;
        if constexpr (kWeightTerms == 1) {
          store8(weight_tile + word, make_uint2(pack_bf16(n[0], n[1]), pack_bf16(n[2], n[3])));
        } else {
          uint2 high, middle, low;
          split_bf16_pair(n[0], n[1], high.x, middle.x, low.x);
          split_bf16_pair(n[2], n[3], high.y, middle.y, low.y);
          store8(weight_tile + word, high);
          store8(weight_tile + kTileWeights * kPitch + word, middle);
          if constexpr (kWeightTerms == 3) store8(weight_tile + 2 * kTileWeights * kPitch + word, low);
        }
      }
    }
    if constexpr (!is_float(kFormat)) {
      if (my_part == 0) {
        const Scales scales = scales_of<kFormat>(slice.scales, group);
        scale_tile[my_row] = scales.scale[0];
        if constexpr (kScales == 2) scale_tile[kTileWeights + my_row] = scales.scale[1];
        if constexpr (has_minimum(kFormat)) minimum_tile[my_row] = scales.minimum;
      }
    }
    uint32_t terms[3][4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
      split_bf16_pair(x_values[2 * i], x_values[2 * i + 1], terms[0][i], terms[1][i], terms[2][i]);
#pragma unroll
    for (int term = 0; term < kTerms; ++term)
      store16(x_tile + (term * kTileX + my_x) * kPitch + 4 * my_quarter,
              make_uint4(terms[term][0], terms[term][1], terms[term][2], terms[term][3]));
    if constexpr (has_minimum(kFormat)) {
      float sum = ((x_values[0] + x_values[1]) + (x_values[2] + x_values[3])) +
                  ((x_values[4] + x_values[5]) + (x_values[6] + x_values[7]));
      sum = sum + warp_shuffle_xor(sum, 1);
      sum = sum + warp_shuffle_xor(sum, 2);
      if (my_quarter == 0) x_sums[my_x] = sum;
    }
    __syncthreads();
    if (group + 1 < groups) {
      if constexpr (kCopied) {
        copy_slice(my_words + (group + 1) % 2 * kTileWeights * kPitch, planes, group + 1, my_part, cols, row_lives);
      } else if (row_lives) {
        slice = load_slice<kFormat, 2>(planes, group + 1, my_part, cols);
      }
      load_x<8>(x_row, (group + 1) * kGroup + 8 * my_quarter, cols, x_lives, x_values);
    }

    float sums[2][4][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half % (3 - kScales) == 0) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
          for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 0; c < 4; ++c) sums[i][j][c] = 0.0f;
      }
      uint32_t a[kWeightTerms][2][4];
#pragma unroll
      for (int term = 0; term < kWeightTerms; ++term)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int row = warp_weights + 16 * i + lane % 16;
          ldmatrix4(a[term][i], weight_tile + (term * kTileWeights + row) * kPitch + 8 * half + 4 * (lane / 16));
        }
      // The smallest products first.
#pragma unroll
      for (int term = kTerms - 1; term >= 0; --term) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          uint32_t b[4];
          const int row = warp_x + 16 * pair + lane % 8 + 8 * (lane / 16);
          ldmatrix4(b, x_tile + (term * kTileX + row) * kPitch + 8 * half + 4 * (lane / 8 % 2));
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
      if (half % (3 - kScales) != 2 - kScales) continue;
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          const int row = warp_weights + 16 * i + 8 * upper + g;
          float scale = 1.0f;
          if constexpr (!is_float(kFormat)) scale = scale_tile[(kScales == 2 ? half * kTileWeights : 0) + row];
#pragma unroll
          for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int c = 2 * upper; c < 2 * upper + 2; ++c)
              totals[i][j][c] = is_float(kFormat) ? totals[i][j][c] + sums[i][j][c]
                                                  : fmaf(scale, sums[i][j][c], totals[i][j][c]);
        }
    }
    if constexpr (has_minimum(kFormat)) {
#pragma unroll
      for (int i = 0; i < 2; ++i)
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
          for (int c = 0; c < 4; ++c)
            totals[i][j][c] = fmaf(minimum_tile[warp_weights + 16 * i + 8 * (c / 2) + g],
                                   x_sums[warp_x + 8 * j + 2 * t + c % 2], totals[i][j][c]);
    }
  }

  // Through shared memory, 32 rows of x at a time, so that neighbouring threads write neighbouring outputs.
  float *results = reinterpret_cast<float *>(tiles);
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
    const int row = row_start + thread % kTileWeights;
    if (row >= matrix.rows) continue;
    const float bias = matrix.bias == nullptr ? 0.0f : matrix.bias[row];
#pragma unroll 1
    for (int i = thread / kTileWeights; i < 32; i += ETE_THREADS / kTileWeights) {
      const int of_x = x_start + part + i;
      if (of_x >= live.count) break;
      const float y = results[i * kResultPitch + thread % kTileWeights];
      finish(matrix.out + static_cast<int64_t>(of_x) * matrix.rows + row, matrix.bias == nullptr ? y : y + bias,
             epilogue, activation, 0.0f);
    }
  }
}
