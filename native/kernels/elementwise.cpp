// The table of elementwise kernels, and its smallest members.
#include "kernels/elementwise_parts.hpp"
#include "kernels/math.hpp"
#include "kernels/norm.hpp"

namespace ete::ETE_ISA {

namespace {

void to_bf16(const float* values, int64_t count, uint16_t* out) {
  int64_t i = 0;
  for (; i + W <= count; i += W) store_bf16(out + i, load(values + i));
  if (i < count) {
    uint16_t padded[W];
    store_bf16(padded, load_first(values + i, count - i));
    std::memcpy(out + i, padded, size_t(count - i) * sizeof(uint16_t));
  }
}

void gate(float* x, const float* gate, int64_t count) {
  for_vectors(count, [&](int64_t i, int64_t lanes) {
    const Vec sigmoid = set1(1.0f) / (set1(1.0f) + exp(zero() - load_lanes(gate + i, lanes)));
    store_lanes(x + i, load_lanes(x + i, lanes) * sigmoid, lanes);
  });
}

void apply(int function, const float* x, int64_t count, float* out) {
  for_vectors(count, [&](int64_t i, int64_t lanes) {
    const Vec a = load_lanes(x + i, lanes);
    const Vec result = function == 0 ? exp(a) : function == 1 ? tanh(a) : function == 2 ? silu(a) : gelu_tanh(a);
    store_lanes(out + i, result, lanes);
  });
}

}  // namespace

const ElementwiseKernels elementwise_kernels{add_norm_row, turn_head, to_bf16, gate, apply};

}  // namespace ete::ETE_ISA
