// add_norm: residual += delta_norm ? rmsnorm(delta) * delta_norm : delta (where given); out = rmsnorm(residual) *
// weight, with rmsnorm(x) = x / sqrt(mean(x^2) + eps). One block per row of the pass, all f32.
//
// A thread reads again what it wrote itself, so residual needs no barrier. Sums: thread t takes columns 4 t.. of every
// 4 * ETE_THREADS, then a tree over the warp, then the warps in order.
//
// Moves residual (twice where there is a delta), delta and out once; what is read again lies in a cache.
#include "prelude.cuh"
#include "rows.cuh"

constexpr int kWarps = ETE_THREADS / kWarp;

// Sum over the block; `scratch` holds kWarps floats and may be used again after the next barrier but one.
ETE_DEVICE float block_sum(float value, float *scratch) {
  value = warp_sum(value);
  if (lane_id() == 0) scratch[warp_id()] = value;
  __syncthreads();
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum = sum + scratch[warp];
  return sum;
}

// Four columns of a row from `col` on; columns that do not exist are zero and are not written.
ETE_DEVICE float4 read_four(const float *row, int col, int cols) {
  if (cols % 4 == 0) return load16_float(row + col);
  float4 four = make_float4(row[col], 0.0f, 0.0f, 0.0f);
  if (col + 1 < cols) four.y = row[col + 1];
  if (col + 2 < cols) four.z = row[col + 2];
  if (col + 3 < cols) four.w = row[col + 3];
  return four;
}

ETE_DEVICE void write_four(float *row, int col, int cols, float4 four) {
  if (cols % 4 == 0) {
    store16(row + col, four);
    return;
  }
  row[col] = four.x;
  if (col + 1 < cols) row[col + 1] = four.y;
  if (col + 2 < cols) row[col + 2] = four.z;
  if (col + 3 < cols) row[col + 3] = four.w;
}

ETE_DEVICE float add_squares(float sum, float4 four) {
  return fmaf(four.w, four.w, fmaf(four.z, four.z, fmaf(four.y, four.y, fmaf(four.x, four.x, sum))));
}

// x / rms * weight: a division, not a product with 1 / rms, which would round once more.
ETE_DEVICE float4 normed(float4 x, float rms, float4 weight) {
  return make_float4(x.x / rms * weight.x, x.y / rms * weight.y, x.z / rms * weight.z, x.w / rms * weight.w);
}

// residual, delta, out [rows, cols]; delta null: nothing is added; delta_norm null: delta is added as it is.
extern "C" __global__ void ETE_LAUNCH_BOUNDS add_norm(float *__restrict__ residual, const float *__restrict__ delta,
                                                      const float *__restrict__ delta_norm,
                                                      const float *__restrict__ weight, float eps,
                                                      float *__restrict__ out, const int *__restrict__ counts,
                                                      int cols) {
  ETE_SHARED(float, delta_scratch, kWarps);
  ETE_SHARED(float, scratch, kWarps);
  let_next_kernel_start();
  wait_for_kernels_ahead();
  if (static_cast<int>(blockIdx.x) >= live_rows(counts, kAllRows).count) return;
  const int64_t start = static_cast<int64_t>(blockIdx.x) * cols;
  float *residual_row = residual + start;
  const int first = 4 * static_cast<int>(threadIdx.x);
  constexpr int step = 4 * ETE_THREADS;

  float delta_rms = 1.0f;
  if (delta != nullptr && delta_norm != nullptr) {
    float sum = 0.0f;
    for (int col = first; col < cols; col += step) sum = add_squares(sum, read_four(delta + start, col, cols));
    delta_rms = sqrtf(block_sum(sum, delta_scratch) / static_cast<float>(cols) + eps);
  }
  float sum = 0.0f;
  for (int col = first; col < cols; col += step) {
    float4 x = read_four(residual_row, col, cols);
    if (delta != nullptr) {
      float4 change = read_four(delta + start, col, cols);
      if (delta_norm != nullptr) change = normed(change, delta_rms, read_four(delta_norm, col, cols));
      x = make_float4(x.x + change.x, x.y + change.y, x.z + change.z, x.w + change.w);
      write_four(residual_row, col, cols, x);
    }
    sum = add_squares(sum, x);
  }
  const float rms = sqrtf(block_sum(sum, scratch) / static_cast<float>(cols) + eps);
  for (int col = first; col < cols; col += step) {
    write_four(out + start, col, cols, normed(read_four(residual_row, col, cols), rms, read_four(weight, col, cols)));
  }
}
