// The GEMV of formats with one scale per 32, 64 or 128 columns or per row.
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
    case Format::I4_G64:
      return gemv_format<Format::I4_G64>(weight, row, rows, input, tokens, out);
    case Format::I4_G128:
      return gemv_format<Format::I4_G128>(weight, row, rows, input, tokens, out);
    case Format::I8_ROW:
      return gemv_format<Format::I8_ROW>(weight, row, rows, input, tokens, out);
    default:
      return gemv_format<Format::Q8_0>(weight, row, rows, input, tokens, out);
  }
}

}  // namespace ete::ETE_ISA
