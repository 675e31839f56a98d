// Rows of a weight in any format, as rows of a quantized format with scales of small squared error.
#pragma once
#include <cstdint>

#include "weight_view.hpp"

namespace ete {

// Where the rows go: the first byte of each plane of the first row, and bytes from one row to the next.
struct QuantizedRows {
  Format format;
  uint8_t* plane[kMaxPlanes];
  int64_t row_pitch[kMaxPlanes];
};

// What quantizing did to the values. `fits` is false when one is NaN or infinite, or a scale is beyond what the format
// can hold.
struct QuantizationError {
  double squared_error = 0;
  double squared_sum = 0;
  double largest_error = 0;
  bool fits = true;
};

// The kernels of one instruction set, in a constant `quantize_kernels` of its namespace.
struct QuantizeKernels {
  // Rows [row, row + rows) of the source; `format` one of I8_ROW, Q8_0, Q4_0, Q4_1, I4_G64, I4_G128, whose block
  // divides the columns. Each number of a row comes out the same whatever other rows are done beside it.
  QuantizationError (*quantize)(const WeightView& source, int64_t row, int64_t rows, const QuantizedRows& to);
};

}  // namespace ete
