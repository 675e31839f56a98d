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

void split_query_gate(ThreadPool& pool, const float* joined, int64_t rows, int64_t heads, int64_t head_dim, float* q,
                      float* gate) {
  const size_t bytes = size_t(head_dim) * sizeof(float);
  pool.run(rows, kRowGrain, [&](int, int64_t begin, int64_t end) {
    for (int64_t head = begin * heads; head < end * heads; ++head) {
      std::memcpy(q + head * head_dim, joined + 2 * head * head_dim, bytes);
      std::memcpy(gate + head * head_dim, joined + (2 * head + 1) * head_dim, bytes);
    }
  });
}

void apply_gate(ThreadPool& pool, const ElementwiseKernels& kernels, float* x, const float* gate, int64_t rows,
                int64_t cols) {
  pool.run(rows, kRowGrain, [&](int, int64_t begin, int64_t end) {
    kernels.gate(x + begin * cols, gate + begin * cols, (end - begin) * cols);
  });
}

}  // namespace ete
