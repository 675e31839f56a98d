#include "elementwise.hpp"

#include <cstring>

namespace ete {

namespace {

// Rows of a thread's share: below this waking the others takes longer than the work.
constexpr int64_t kRowGrain = 8;

}  // namespace

void add_norm(ThreadPool& pool, const ElementwiseKernels& kernels, const NormArgs& args, int64_t rows) {
  pool.run(rows, kRowGrain, [&](int, int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) kernels.add_norm_row(args, row);
  });
}

void select_rows(ThreadPool& pool, const float* x, int64_t cols, const int32_t* rows, int64_t count, float* out) {
  pool.run(count, kRowGrain, [&](int, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) std::memcpy(out + i * cols, x + rows[i] * cols, size_t(cols) * sizeof(float));
  });
}

}  // namespace ete
