// qk_norm_rope_append: per head of q and k an optional rmsnorm, then rope; q in place, k and v into their KV tiles.
// One warp per head of q, k or v of a row.
//
// Rope turns the pairs (i, i + rotary / 2) of the first `rotary` numbers of a head by the row's cos and sin
// [rows, rotary / 2]. A tile holds K [kv_heads][512][head_dim], then V the same, f32 or bf16 rounded to nearest even;
// tile_table [sequences, tiles] holds addresses.
//
// Moves q twice, k and v once, and what it appends. Macros: ETE_KV_BF16 (1: tiles are bf16, 0: f32).
#include "prelude.cuh"

constexpr int kTilePositions = 512;
constexpr int kMaxHeadDim = 256;
constexpr int kPerLane = kMaxHeadDim / kWarp;

ETE_DEVICE float load_float(const float* at) { return __uint_as_float(load4_ordered(at)); }

ETE_DEVICE void put(int64_t tile, int64_t index, float value) {
#if ETE_KV_BF16
  reinterpret_cast<uint16_t*>(tile)[index] = float_to_bf16(value);
#else
  reinterpret_cast<float*>(tile)[index] = value;
#endif
}

// q_norm, k_norm null: no norm. rotary 0: no rope. tiles: columns of tile_table.
extern "C" __global__ void ETE_LAUNCH_BOUNDS rope_append(
    float* __restrict__ q, const float* __restrict__ k, const float* __restrict__ v, const float* __restrict__ q_norm,
    const float* __restrict__ k_norm, float eps, const float* __restrict__ cosines, const float* __restrict__ sines,
    const int* __restrict__ positions, const int* __restrict__ row_sequence, const int64_t* __restrict__ tile_table,
    int tiles, const int* __restrict__ counts, int heads, int kv_heads, int head_dim, int rotary) {
  let_next_kernel_start();
  const int row = static_cast<int>(blockIdx.x);
  const int head = static_cast<int>(blockIdx.y) * (ETE_THREADS / kWarp) + warp_id();
  if (row >= static_cast<int>(load4_ordered(counts + 1)) || head >= heads + 2 * kv_heads) {
    wait_for_kernels_ahead();
    return;
  }
  const int lane = lane_id();
  const bool of_q = head < heads, of_k = !of_q && head < heads + kv_heads;
  const int kv_head = of_k ? head - heads : head - heads - kv_heads;
  const int64_t kv_start = (static_cast<int64_t>(row) * kv_heads + kv_head) * head_dim;
  const float* source = of_q   ? q + (static_cast<int64_t>(row) * heads + head) * head_dim
                        : of_k ? k + kv_start
                               : v + kv_start;
  const float* norm = of_q ? q_norm : of_k ? k_norm : nullptr;
  const int half = of_q || of_k ? rotary / 2 : 0;

  // What no kernel of the pass writes is read while those ahead still run.
  const int position = static_cast<int>(load4_ordered(positions + row));
  const int64_t sequence = static_cast<int>(load4_ordered(row_sequence + row));
  const uint2 tile_bits = load8_ordered(tile_table + sequence * tiles + position / kTilePositions);
  const int64_t tile = static_cast<int64_t>(static_cast<uint64_t>(tile_bits.y) << 32 | tile_bits.x);
  float cosine[kPerLane], sine[kPerLane];
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int d = lane + kWarp * i;
    const int64_t at = static_cast<int64_t>(row) * half + (d < half ? d : d - half);
    cosine[i] = d < 2 * half ? load_float(cosines + at) : 1.0f;
    sine[i] = d < 2 * half ? load_float(sines + at) : 0.0f;
  }
  wait_for_kernels_ahead();

  // Each number and, where it is turned, the other of its pair.
  float value[kPerLane], other[kPerLane];
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int d = lane + kWarp * i;
    value[i] = d < head_dim ? load_float(source + d) : 0.0f;
    other[i] = d < 2 * half ? load_float(source + (d < half ? d + half : d - half)) : 0.0f;
    squares = fmaf(value[i], value[i], squares);
  }
  if (norm != nullptr) {
    const float rms = sqrtf(warp_sum(squares) / static_cast<float>(head_dim) + eps);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int d = lane + kWarp * i;
      if (d < head_dim) value[i] = value[i] / rms * norm[d];
      if (d < 2 * half) other[i] = other[i] / rms * norm[d < half ? d + half : d - half];
    }
  }
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int d = lane + kWarp * i;
    if (d >= 2 * half) continue;
    const float turned = other[i] * sine[i];
    value[i] = fmaf(value[i], cosine[i], d < half ? -turned : turned);
  }
  warp_sync();  // q is read by all lanes before it is written

  if (of_q) {
    float* out = q + (static_cast<int64_t>(row) * heads + head) * head_dim;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const int d = lane + kWarp * i;
      if (d < head_dim) out[d] = value[i];
    }
    return;
  }
  const int64_t values_of = of_k ? 0 : static_cast<int64_t>(kv_heads) * kTilePositions * head_dim;
  const int64_t slot = static_cast<int64_t>(kv_head) * kTilePositions + position % kTilePositions;
  const int64_t start = values_of + slot * head_dim;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int d = lane + kWarp * i;
    if (d < head_dim) put(tile, start + d, value[i]);
  }
}
