// What surrounds lm_head: the rows whose logits are asked, before it, and the largest logit of each, after it.
#include "prelude.cuh"

ETE_DEVICE float load_one(const float* at) { return __uint_as_float(load4_ordered(at)); }
ETE_DEVICE bool beyond_logit_rows(const int* counts) {
  return static_cast<int>(blockIdx.x) >= static_cast<int>(load4_ordered(counts + 3));
}

// out[i] = x[rows[i]] for the logit rows of the pass; x, out [., cols]. One block per row.
extern "C" __global__ void ETE_LAUNCH_BOUNDS select_rows(const float* __restrict__ x, const int* __restrict__ rows,
                                                         float* __restrict__ out, const int* __restrict__ counts,
                                                         int cols) {
  let_next_kernel_start();
  const int index = static_cast<int>(blockIdx.x);
  const bool beyond = beyond_logit_rows(counts);
  const int64_t row = beyond ? 0 : static_cast<int>(load4_ordered(rows + index));
  wait_for_kernels_ahead();
  if (beyond) return;
  const float* from = x + row * cols;
  float* to = out + static_cast<int64_t>(index) * cols;
  if (cols % 4 == 0) {
#pragma unroll 2
    for (int col = 4 * static_cast<int>(threadIdx.x); col < cols; col += 4 * ETE_THREADS)
      store16(to + col, load16_ordered(from + col));
  } else {
    for (int col = static_cast<int>(threadIdx.x); col < cols; col += ETE_THREADS) to[col] = load_one(from + col);
  }
}

// Of two candidates the larger, of equal ones the first.
ETE_DEVICE void keep_larger(float& best, int& at, float value, int index) {
  if (value > best || (value == best && index < at)) {
    best = value;
    at = index;
  }
}

// A thread's largest logit so far: the first of the largest, with a sum that is NaN once one was NaN or infinite.
struct Largest {
  float value;
  int at;
  float noughts;
};

// Takes in kWidth consecutive logits at a time, aligned as such.
template <int kWidth>
ETE_DEVICE void find_largest(const float* logits, int vocabulary, Largest& largest) {
  constexpr int kAhead = 8;  // loads under way at once: one block has to keep up with the memory
  constexpr int step = kWidth * ETE_THREADS;
  for (int start = kWidth * static_cast<int>(threadIdx.x); start < vocabulary; start += kAhead * step) {
    float values[kAhead][kWidth];
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      const int index = min(start + a * step, vocabulary - kWidth);  // past the end the last again: changes nothing
      if constexpr (kWidth == 4) {
        const uint4 bits = load16_ordered(logits + index);
        values[a][0] = __uint_as_float(bits.x), values[a][1] = __uint_as_float(bits.y);
        values[a][2] = __uint_as_float(bits.z), values[a][3] = __uint_as_float(bits.w);
      } else {
        values[a][0] = load_one(logits + index);
      }
    }
#pragma unroll
    for (int a = 0; a < kAhead; ++a) {
      float most = values[a][0];
#pragma unroll
      for (int i = 1; i < kWidth; ++i) most = fmaxf(most, values[a][i]);
#pragma unroll
      for (int i = 0; i < kWidth; ++i) largest.noughts = fmaf(values[a][i], 0.0f, largest.noughts);
      if (most > largest.value) {
        largest.value = most;
        largest.at = min(start + a * step, vocabulary - kWidth);
#pragma unroll
        for (int i = kWidth - 1; i > 0; --i) {
          bool first = true;
#pragma unroll
          for (int before = 0; before < i; ++before) first = first && values[a][before] != most;
          if (first && values[a][i] == most) largest.at += i;
        }
      }
    }
  }
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
  const bool beyond = beyond_logit_rows(counts);
  wait_for_kernels_ahead();
  if (beyond) return;
  const int row = static_cast<int>(blockIdx.x);
  const float* of_row = logits + static_cast<int64_t>(row) * vocabulary;
  Largest largest = {-ETE_INFINITY, 0x7fffffff, 0.0f};
  if (vocabulary % 4 == 0) {
    find_largest<4>(of_row, vocabulary, largest);
  } else {
    find_largest<1>(of_row, vocabulary, largest);
  }
  float best = largest.value;
  int at = largest.at;
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const float value = warp_shuffle_xor(best, step);
    const int index = warp_shuffle_xor(at, step);
    keep_larger(best, at, value, index);
  }
  const bool warp_finite = warp_all(largest.noughts == 0.0f);
  if (lane_id() == 0) {
    bests[warp_id()] = best;
    places[warp_id()] = at;
    finite[warp_id()] = warp_finite;
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  bool all_finite = true;
  for (int warp = 0; warp < warps; ++warp) {
    keep_larger(best, at, bests[warp], places[warp]);
    all_finite = all_finite && finite[warp] != 0;
  }
  ids[row] = all_finite ? at : -1;
}
