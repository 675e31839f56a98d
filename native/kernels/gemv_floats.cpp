// The GEMV of F32, F16 and BF16: apart from the others, so that they compile side by side.
#include "kernels/gemv.hpp"
#include "kernels/linear_parts.hpp"

namespace ete::ETE_ISA {

void gemv_floats(const WeightView& weight, int64_t row, int rows, const GemvInput& input, int tokens, float* out) {
  switch (weight.format) {
    case Format::F16:
      return gemv_format<Format::F16>(weight, row, rows, input, tokens, out);
    case Format::BF16:
      return gemv_format<Format::BF16>(weight, row, rows, input, tokens, out);
    default:
      return gemv_format<Format::F32>(weight, row, rows, input, tokens, out);
  }
}

}  // namespace ete::ETE_ISA
