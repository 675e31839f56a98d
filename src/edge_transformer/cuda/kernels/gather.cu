// gather_rows: out[r] = scale * table[token_ids[r]] for all rows of the pass, values as their format defines them (each
// product and sum rounds once, as in formats/dequantize.py). An id outside of the table gives a row of NaN.
//
// One block per row; a thread takes 16 bytes of codes at a time. Moves the planes of the rows, and out.
// Macros: ETE_FORMAT.
#include "prelude.cuh"
#include "rows.cuh"
#include "weights.cuh"

constexpr Format kFormat = Format::ETE_FORMAT;
constexpr int kUnit = unit_columns(kFormat);

extern "C" __global__ void ETE_LAUNCH_BOUNDS gather_rows(const uint8_t *__restrict__ table, int64_t second,
                                                         int64_t third, int64_t fourth, int table_rows, int cols,
                                                         const int *__restrict__ token_ids, float scale,
                                                         float *__restrict__ out, const int *__restrict__ counts) {
  let_next_kernel_start();
  wait_for_kernels_ahead();
  const int row = static_cast<int>(blockIdx.x);
  if (row >= live_rows(counts, kAllRows).count) return;
  const int id = token_ids[row];
  const bool known = id >= 0 && id < table_rows;
  const RowPlanes planes = row_planes<kFormat>(table, second, third, fourth, known ? id : 0, cols);
  float *out_row = out + static_cast<int64_t>(row) * cols;
  for (int unit = static_cast<int>(threadIdx.x); unit * kUnit < cols; unit += ETE_THREADS) {
    const int group = unit * kUnit / kGroup;
    Unit codes;
    codes.codes = load16(planes.codes + 16 * static_cast<int64_t>(unit));
    codes.high = load_high<kFormat>(planes, group);
    const Scales scales = scales_of<kFormat>(load_scales<kFormat>(planes, group), group);
#pragma unroll
    for (int piece = 0; piece < kUnit / 4; ++piece) {
      float numbers[4];
      unit_numbers<kFormat>(codes, piece, numbers);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int col = unit * kUnit + 4 * piece + i;
        if (col >= cols) continue;
        float value = numbers[i];
        if constexpr (!is_float(kFormat)) {
          value = scales.scale[scales_per_group(kFormat) == 2 ? piece / 4 : 0] * value;
          if constexpr (has_minimum(kFormat)) value = value + scales.minimum;
        }
        out_row[col] = known ? scale * value : __uint_as_float(0x7fc00000u);
      }
    }
  }
}
