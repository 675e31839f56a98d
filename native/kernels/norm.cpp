// residual += rmsnorm(delta) * delta_norm; out = rmsnorm(residual) * weight. Bytes moved per row: 4 * cols * (2 without
// a delta, 4 with one).
#include "kernels/norm.hpp"

#include "kernels/elementwise_parts.hpp"

namespace ete::ETE_ISA {

void add_norm_row(const NormArgs& args, int64_t row) {
  float* residual = args.residual + row * args.cols;
  float* out = args.out + row * args.cols;
  if (args.delta) {
    const float* delta = args.delta + row * args.cols;
    if (args.delta_norm) {
      const Vec factor = set1(norm_factor(delta, args.cols, args.eps));
      for_vectors(args.cols, [&](int64_t i, int64_t lanes) {
        const Vec change = load_lanes(delta + i, lanes) * factor * load_lanes(args.delta_norm + i, lanes);
        store_lanes(residual + i, load_lanes(residual + i, lanes) + change, lanes);
      });
    } else {
      for_vectors(args.cols, [&](int64_t i, int64_t lanes) {
        store_lanes(residual + i, load_lanes(residual + i, lanes) + load_lanes(delta + i, lanes), lanes);
      });
    }
  }
  const Vec factor = set1(norm_factor(residual, args.cols, args.eps));
  for_vectors(args.cols, [&](int64_t i, int64_t lanes) {
    store_lanes(out + i, load_lanes(residual + i, lanes) * factor * load_lanes(args.weight + i, lanes), lanes);
  });
}

}  // namespace ete::ETE_ISA
