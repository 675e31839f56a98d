// add_norm: residual += delta_norm ? rmsnorm(delta) * delta_norm : delta (where given); out = rmsnorm(residual) *
// weight, with rmsnorm(x) = x / sqrt(mean(x^2) + eps). One block per row of the pass, all f32.
//
// Sums: thread t takes columns 4 t.. of every 4 * ETE_THREADS, then a tree over the warp, then one over the warps: the
// order depends on the columns alone. A decode row is one block's wait for memory, so that what a thread has is asked
// for at once, the weights before the kernels ahead have ended, and kept in registers: kHeldFours pieces of four
// columns. Pieces past those are read again by the thread that wrote them, which needs no barrier.
//
// Moves residual, delta and out once (residual twice past the first kHeldFours * 4 * ETE_THREADS columns).
#define ETE_MIN_BLOCKS 1
#include "prelude.cuh"

constexpr int kWarps = ETE_THREADS / kWarp;
constexpr int kHeldFours = 2;
static_assert(kWarps <= kWarp, "a lane has the sum of a warp");

// Sum over the block, in every thread; `scratch` holds kWarps floats, of this call alone.
ETE_DEVICE float block_sum(float value, float* scratch) {
  value = warp_sum(value);
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  return warp_sum(lane_id() < kWarps ? scratch[lane_id()] : 0.0f);
}

ETE_DEVICE float read_one(const float* at) { return __uint_as_float(load4_ordered(at)); }

// Four columns of a row from `col` on; columns that do not exist are zero and are not written. kFours: the columns are
// a multiple of four.
template <bool kFours>
ETE_DEVICE float4 read_four(const float* row, int col, int cols) {
  float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  if constexpr (kFours) {
    if (col >= cols) return four;
    const uint4 bits = load16_ordered(row + col);
    four =
        make_float4(__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z), __uint_as_float(bits.w));
  } else {
    if (col < cols) four.x = read_one(row + col);
    if (col + 1 < cols) four.y = read_one(row + col + 1);
    if (col + 2 < cols) four.z = read_one(row + col + 2);
    if (col + 3 < cols) four.w = read_one(row + col + 3);
  }
  return four;
}

template <bool kFours>
ETE_DEVICE void write_four(float* row, int col, int cols, float4 four) {
  if constexpr (kFours) {
    if (col < cols) store16(row + col, four);
  } else {
    if (col < cols) row[col] = four.x;
    if (col + 1 < cols) row[col + 1] = four.y;
    if (col + 2 < cols) row[col + 2] = four.z;
    if (col + 3 < cols) row[col + 3] = four.w;
  }
}

ETE_DEVICE float add_squares(float sum, float4 four) {
  return fmaf(four.w, four.w, fmaf(four.z, four.z, fmaf(four.y, four.y, fmaf(four.x, four.x, sum))));
}

// x / rms * weight: a division, not a product with 1 / rms, which would round once more.
ETE_DEVICE float4 normed(float4 x, float rms, float4 weight) {
  return make_float4(x.x / rms * weight.x, x.y / rms * weight.y, x.z / rms * weight.z, x.w / rms * weight.w);
}

ETE_DEVICE float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

template <bool kFours>
ETE_DEVICE void add_norm_row(float* residual, const float* delta, const float* delta_norm, const float* weight,
                             float eps, float* out, const int* counts, int cols, float* delta_scratch, float* scratch) {
  const int live = static_cast<int>(load4_ordered(counts + 1));
  const int first = 4 * static_cast<int>(threadIdx.x);
  constexpr int step = 4 * ETE_THREADS, kHeld = kFours ? kHeldFours : 1;
  const int past_held = first + kHeld * step;
  float4 weights[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) weights[i] = read_four<kFours>(weight, first + i * step, cols);
  wait_for_kernels_ahead();
  if (static_cast<int>(blockIdx.x) >= live) return;

  const int64_t start = static_cast<int64_t>(blockIdx.x) * cols;
  const bool has_delta = delta != nullptr;
  residual += start, out += start;
  if (has_delta) delta += start;
  float4 x[kHeld], change[kHeld];
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    x[i] = read_four<kFours>(residual, first + i * step, cols);
    change[i] = read_four<kFours>(delta, first + i * step, has_delta ? cols : 0);
  }
  float delta_rms = 1.0f;
  if (has_delta && delta_norm != nullptr) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) sum = add_squares(sum, change[i]);
#pragma unroll 1
    for (int col = past_held; col < cols; col += step) sum = add_squares(sum, read_four<kFours>(delta, col, cols));
    delta_rms = sqrtf(block_sum(sum, delta_scratch) / static_cast<float>(cols) + eps);
  }
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    const int col = first + i * step;
    if (has_delta) {
      if (delta_norm != nullptr) change[i] = normed(change[i], delta_rms, read_four<kFours>(delta_norm, col, cols));
      x[i] = plus(x[i], change[i]);
      write_four<kFours>(residual, col, cols, x[i]);
    }
    sum = add_squares(sum, x[i]);
  }
#pragma unroll 1
  for (int col = past_held; col < cols; col += step) {
    float4 four = read_four<kFours>(residual, col, cols);
    if (has_delta) {
      float4 added = read_four<kFours>(delta, col, cols);
      if (delta_norm != nullptr) added = normed(added, delta_rms, read_four<kFours>(delta_norm, col, cols));
      four = plus(four, added);
      write_four<kFours>(residual, col, cols, four);
    }
    sum = add_squares(sum, four);
  }
  const float rms = sqrtf(block_sum(sum, scratch) / static_cast<float>(cols) + eps);
#pragma unroll
  for (int i = 0; i < kHeld; ++i) write_four<kFours>(out, first + i * step, cols, normed(x[i], rms, weights[i]));
#pragma unroll 1
  for (int col = past_held; col < cols; col += step) {
    const float4 four = read_four<kFours>(residual, col, cols);
    write_four<kFours>(out, col, cols, normed(four, rms, read_four<kFours>(weight, col, cols)));
  }
}

// residual, delta, out [rows, cols]; delta null: nothing is added; delta_norm null: delta is added as it is.
extern "C" __global__ void ETE_LAUNCH_BOUNDS add_norm(float* __restrict__ residual, const float* __restrict__ delta,
                                                      const float* __restrict__ delta_norm,
                                                      const float* __restrict__ weight, float eps,
                                                      float* __restrict__ out, const int* __restrict__ counts,
                                                      int cols) {
  ETE_SHARED(float, delta_scratch, kWarps);
  ETE_SHARED(float, scratch, kWarps);
  let_next_kernel_start();
  if (cols % 4 == 0) {
    add_norm_row<true>(residual, delta, delta_norm, weight, eps, out, counts, cols, delta_scratch, scratch);
  } else {
    add_norm_row<false>(residual, delta, delta_norm, weight, eps, out, counts, cols, delta_scratch, scratch);
  }
}
