// Sum of squares and the norm's factor.
#pragma once
#include "kernels/lanes.hpp"

namespace ete::ETE_ISA {

// In four partial sums per lane: the order of additions depends on the count alone.
inline float sum_of_squares(const float* x, int64_t count) {
  Vec sum[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * W <= count; i += 4 * W) {
    ETE_UNROLL
    for (int j = 0; j < 4; ++j) {
      const Vec a = load(x + i + j * W);
      sum[j] = fma(a, a, sum[j]);
    }
  }
  for (; i + W <= count; i += W) {
    const Vec a = load(x + i);
    sum[0] = fma(a, a, sum[0]);
  }
  if (i < count) {
    const Vec a = load_first(x + i, count - i);
    sum[1] = fma(a, a, sum[1]);
  }
  return reduce_add((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

// 1 / sqrt(mean of squares + eps).
inline float norm_factor(const float* x, int64_t count, float eps) {
  return 1.0f / __builtin_sqrtf(sum_of_squares(x, count) / float(count) + eps);
}

// Calls function(offset, lanes) over [0, count) in vectors; lanes < W for the last one only.
template <typename Function>
inline void for_vectors(int64_t count, const Function& function) {
  int64_t i = 0;
  for (; i + W <= count; i += W) function(i, int64_t(W));
  if (i < count) function(i, count - i);
}
inline Vec load_lanes(const float* p, int64_t lanes) { return lanes == W ? load(p) : load_first(p, lanes); }
inline void store_lanes(float* p, Vec a, int64_t lanes) {
  if (lanes == W) {
    store(p, a);
  } else {
    store_first(p, a, lanes);
  }
}

}  // namespace ete::ETE_ISA
