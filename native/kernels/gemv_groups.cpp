// The GEMV of formats with one scale per 32 columns.
#include "kernels/gemv.hpp"
#include "kernels/linear_parts.hpp"

namespace ete::ETE_ISA {

void gemv_groups(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out) {
  switch (weight.format) {
    case Format::Q4_0:
      return gemv_format<Format::Q4_0>(weight, row, rows, input, tokens, out);
    case Format::Q4_1:
      return gemv_format<Format::Q4_1>(weight, row, rows, input, tokens, out);
    case Format::Q5_0:
      return gemv_format<Format::Q5_0>(weight, row, rows, input, tokens, out);
    case Format::Q5_1:
      return gemv_format<Format::Q5_1>(weight, row, rows, input, tokens, out);
    default:
      return gemv_format<Format::Q8_0>(weight, row, rows, input, tokens, out);
  }
}

}  // namespace ete::ETE_ISA
