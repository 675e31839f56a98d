// What surrounds lm_head: the rows whose logits are asked, before it, and the largest logit of each, after it.
#include "prelude.cuh"
#include "rows.cuh"

// out[i] = x[rows[i]] for the logit rows of the pass; x, out [., cols]. One block per row, four bytes at a time.
extern "C" __global__ void ETE_LAUNCH_BOUNDS select_rows(const float* __restrict__ x, const int* __restrict__ rows,
                                                         float* __restrict__ out, const int* __restrict__ counts,
                                                         int cols) {
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const int index = static_cast<int>(blockIdx.x);
  if (index >= live_rows(counts, kLogitRows).count) return;
  const float* from = x + static_cast<int64_t>(rows[index]) * cols;
  float* to = out + static_cast<int64_t>(index) * cols;
  for (int col = static_cast<int>(threadIdx.x); col < cols; col += ETE_THREADS) to[col] = from[col];
}

// Of two candidates the larger, of equal ones the first.
ETE_DEVICE void keep_larger(float& best, int& at, float value, int index) {
  if (value > best || (value == best && index < at)) {
    best = value;
    at = index;
  }
}

// The a-th logit of a thread from `start` on; past the end the last one again, which changes nothing.
ETE_DEVICE int logit_index(int start, int a, int vocabulary) {
  const int index = start + a * ETE_THREADS;
  return index < vocabulary ? index : vocabulary - 1;
}

// ids[i] = the first index of the largest of logits[i] [vocabulary]; -1 where a logit is NaN or infinite. One block per
// logit row.
extern "C" __global__ void ETE_LAUNCH_BOUNDS argmax(const float* __restrict__ logits, int* __restrict__ ids,
                                                    const int* __restrict__ counts, int vocabulary) {
  constexpr int warps = ETE_THREADS / kWarp;
  ETE_SHARED(float, bests, warps);
  ETE_SHARED(int, places, warps);
  ETE_SHARED(int, finite, warps);
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= live_rows(counts, kLogitRows).count) return;
  const float* of_row = logits + static_cast<int64_t>(row) * vocabulary;
  float best = -ETE_INFINITY;
  int at = 0x7fffffff;
  bool all_finite = true;
  constexpr int kAhead = 16;  // loads under way at once: one block has to keep up with the memory
  for (int start = static_cast<int>(threadIdx.x); start < vocabulary; start += kAhead * ETE_THREADS) {
    float values[kAhead];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) values[a] = of_row[logit_index(start, a, vocabulary)];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      all_finite = all_finite && fabsf(values[a]) < ETE_INFINITY;
      keep_larger(best, at, values[a], logit_index(start, a, vocabulary));
    }
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float value = warp_shuffle_xor(best, step);
    const int index = warp_shuffle_xor(at, step);
    keep_larger(best, at, value, index);
  }
  const bool warp_finite = warp_all(all_finite);
  if (lane_id() == 0) {
    bests[warp_id()] = best;
    places[warp_id()] = at;
    finite[warp_id()] = warp_finite;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  all_finite = true;
  for (int warp = 0; warp < warps; ++warp) {
    keep_larger(best, at, bests[warp], places[warp]);
    all_finite = all_finite && finite[warp] != 0;
  }
  ids[row] = all_finite ? at : -1;
}
