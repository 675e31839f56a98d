// The GEMV of formats with superblocks of 256 columns.
#include "kernels/gemv.hpp"
#include "kernels/linear_parts.hpp"

namespace ete::ETE_ISA {

void gemv_superblocks(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out) {
  switch (weight.format) {
    case Format::Q4_K:
      return gemv_format<Format::Q4_K>(weight, row, rows, input, tokens, out);
    case Format::Q5_K:
      return gemv_format<Format::Q5_K>(weight, row, rows, input, tokens, out);
    default:
      return gemv_format<Format::Q6_K>(weight, row, rows, input, tokens, out);
  }
}

}  // namespace ete::ETE_ISA
