// A head of q or k: rmsnorm, then half-split pairs (a, b) become (a cos - b sin, b cos + a sin).
#include "kernels/elementwise_parts.hpp"
#include "kernels/norm.hpp"

namespace ete::ETE_ISA {

void turn_head(const HeadTurn& turn, const float* head, float* out) {
  if (turn.norm) {
    const Vec factor = set1(norm_factor(head, turn.head_dim, turn.eps));
    for_vectors(turn.head_dim, [&](int64_t i, int64_t lanes) {
      store_lanes(out + i, load_lanes(head + i, lanes) * factor * load_lanes(turn.norm + i, lanes), lanes);
    });
  } else if (out != head) {
    std::memcpy(out, head, size_t(turn.head_dim) * sizeof(float));
  }
  for_vectors(turn.half, [&](int64_t i, int64_t lanes) {
    const Vec a = load_lanes(out + i, lanes);
    const Vec b = load_lanes(out + turn.half + i, lanes);
    const Vec cos = load_lanes(turn.cos + i, lanes);
    const Vec sin = load_lanes(turn.sin + i, lanes);
    store_lanes(out + i, fma(a, cos, zero() - b * sin), lanes);
    store_lanes(out + turn.half + i, fma(b, cos, a * sin), lanes);
  });
}

}  // namespace ete::ETE_ISA
