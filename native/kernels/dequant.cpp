// Part of a weight row as floats, by format: what the GEMM and embedding rows read.
#include "kernels/dequant.hpp"

#include "kernels/linear_parts.hpp"

namespace ete::ETE_ISA {

namespace {

using Function = void (*)(const RowPlanes&, int64_t, int64_t, float*);

// In the order of Format.
constexpr Function kFunctions[kFormats] = {
    dequantize_row<Format::F32>,    dequantize_row<Format::F16>,     dequantize_row<Format::BF16>,
    dequantize_row<Format::Q8_0>,   dequantize_row<Format::Q4_0>,    dequantize_row<Format::Q4_1>,
    dequantize_row<Format::Q5_0>,   dequantize_row<Format::Q5_1>,    dequantize_row<Format::Q4_K>,
    dequantize_row<Format::Q5_K>,   dequantize_row<Format::Q6_K>,    dequantize_row<Format::I8_ROW>,
    dequantize_row<Format::I4_G64>, dequantize_row<Format::I4_G128>,
};

}  // namespace

void dequantize(const WeightView& weight, int64_t row, int64_t col, int64_t cols, float* out) {
  kFunctions[int(weight.format)](weight.row(row), col, cols, out);
}

}  // namespace ete::ETE_ISA
