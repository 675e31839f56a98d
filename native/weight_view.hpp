// A weight matrix as the kernels see it: format, shape, and where the planes of formats/weight.py lie.
#pragma once
#include <cstdint>

namespace ete {

// In the order of formats.weight.WeightFormat.
enum class Format : int { F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q4_K, Q5_K, Q6_K, I8_ROW, I4_G64, I4_G128 };
constexpr int kFormats = 14;
constexpr int kMaxPlanes = 4;

// Where one row's part of each plane begins.
struct RowPlanes {
  const uint8_t* plane[kMaxPlanes];
};

struct WeightView {
  Format format;
  int64_t rows;
  int64_t cols;
  const uint8_t* plane[kMaxPlanes];  // null where the format has fewer planes
  int64_t row_pitch[kMaxPlanes];     // bytes from one row to the next

  RowPlanes row(int64_t index) const {
    RowPlanes planes;
    for (int i = 0; i < kMaxPlanes; ++i) planes.plane[i] = plane[i] + index * row_pitch[i];
    return planes;
  }
};

}  // namespace ete
