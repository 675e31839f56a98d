// Takes the states of a wave of units into the running states of decode rows, in ascending order: block (64 columns,
// head, row). m of every prefix is known from maxima alone, so the factors of all merges are made side by side; what is
// left in sequence is one fused multiply-add a unit.
//
// Bytes read: 4 * (head_dim + 2) per unit and head. ETE_THREADS >= 64 and >= units of a wave.
#include "attention_units.cuh"

extern "C" __global__ void ETE_ATTENTION_BOUNDS
attention_merge(const float* __restrict__ unit_acc, const float* __restrict__ unit_state,
                const int* __restrict__ positions, const int* __restrict__ row_sequence, const int* __restrict__ counts,
                float* __restrict__ state, float* __restrict__ out, int heads, int first_tile, int tile_count,
                int run_sequence, int first_row, int first_unit, int wave_units, int window, int flags) {
  ETE_SHARED(float, columns, kMostUnits* kStateColumns);  // [unit][column]
  ETE_SHARED(float, unit_m, kMostUnits);
  ETE_SHARED(float, unit_l, kMostUnits);
  ETE_SHARED(float, kept, kMostUnits);   // factor of the running state
  ETE_SHARED(float, taken, kMostUnits);  // factor of the unit's
  ETE_SHARED(float, last_m, 1);
  let_next_kernel_start();
  const auto [row, units] = row_and_units(counts, row_sequence, positions, first_row, blockIdx.z, run_sequence, window,
                                          first_tile, tile_count);
  const int in_tiles = units.span.begin < units.span.end ? (units.span.end - 1) / units.size - units.first + 1 : 0;
  const int count = max(0, min(wave_units, in_tiles - first_unit));
  wait_for_kernels_ahead();
  if (row < 0 || (count == 0 && flags == 0)) return;

  const int thread = static_cast<int>(threadIdx.x), head = static_cast<int>(blockIdx.y);
  const int column = static_cast<int>(blockIdx.x) * kStateColumns;
  const int width = min(kStateColumns, kHeadDim - column);
  const int64_t place = (static_cast<int64_t>(blockIdx.z) * heads + head) * wave_units;
  uint2 state_of_unit = make_uint2(0, 0);  // asked for before what is waited for next
  if (thread < count) state_of_unit = load8_ordered(unit_state + 2 * (place + thread));
  for (int i = thread; i < count * (width / 4); i += ETE_THREADS) {
    const int unit = i / (width / 4), part = i % (width / 4) * 4;
    store16(columns + unit * kStateColumns + part,
            load16_ordered(unit_acc + (place + unit) * kHeadDim + column + part));
  }
  if (thread < count) {
    unit_m[thread] = __uint_as_float(state_of_unit.x);
    unit_l[thread] = __uint_as_float(state_of_unit.y);
  }
  const int64_t running = (static_cast<int64_t>(row) * heads + head) * kStateCopies + blockIdx.x;
  const bool begin = (flags & kBegin) != 0;
  const float m = begin ? -ETE_INFINITY : state[2 * running];
  float l = begin ? 0.0f : state[2 * running + 1];
  if (thread == 0) last_m[0] = m;
  __syncthreads();
  if (thread < count) {
    float before = m;
    for (int i = 0; i < thread; ++i) before = fmaxf(before, unit_m[i]);
    const float after = fmaxf(before, unit_m[thread]), reference = reference_of(after);
    kept[thread] = expf(before - reference);
    taken[thread] = expf(unit_m[thread] - reference);
    if (thread == count - 1) last_m[0] = after;
  }
  __syncthreads();
  if (thread >= width) return;
  float* to = out + (static_cast<int64_t>(row) * heads + head) * kHeadDim + column + thread;
  float acc = begin ? 0.0f : *to;
  for (int i = 0; i < count; ++i) {
    acc = fmaf(acc, kept[i], columns[i * kStateColumns + thread] * taken[i]);
    l = fmaf(l, kept[i], unit_l[i] * taken[i]);
  }
  const bool end = (flags & kEnd) != 0;
  *to = stored(acc, stored_factor(l, end));
  if (thread == 0 && !end) {
    state[2 * running] = last_m[0];
    state[2 * running + 1] = l;
  }
}
